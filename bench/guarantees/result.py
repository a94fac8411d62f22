"""What a check of a guarantee says: one row of `athanor selftest`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "absent"]


@dataclass(frozen=True, slots=True)
class Result:
    """One figure against its bar.

    A positive control is a row of its own (``id`` ends in ``.control``): it passes when the effect that the guarantee
    excludes is seen where it must be seen.

    Attributes:
        id: the guarantee and the part of it, for example ``G1.memory``.
        verdict: ``absent`` where this machine or this build cannot show it; the figure then says why.
        figure: what was measured, with its unit.
        bar: what the figure is held against.
        command: what a reader types to see the same figure.
    """

    id: str
    verdict: Verdict
    figure: str
    bar: str
    command: str


def judged(id_: str, passed: bool, *, figure: str, bar: str, command: str) -> Result:
    """The row of a figure that could be taken."""
    return Result(id_, "pass" if passed else "fail", figure, bar, command)
