"""Result of a guarantee's check: one row of `athanor selftest`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "absent", "not run"]


@dataclass(frozen=True, slots=True)
class Result:
    """A measured figure and its bar.

    A positive control has its own row (``id`` ends in ``.control``): it passes when the effect that the guarantee
    excludes is observed where it must be.

    Attributes:
        id: the guarantee and the part of it, for example ``G1.memory``.
        verdict: ``absent`` when this machine or this build cannot show it, ``not run`` when the short form leaves it
            out; the figure then says why, or what runs it.
        figure: what was measured, with its unit.
        bar: the limit with which the figure is compared.
        command: the command that reproduces the figure.
    """

    id: str
    verdict: Verdict
    figure: str
    bar: str
    command: str


def judged(id_: str, passed: bool, *, figure: str, bar: str, command: str) -> Result:
    """Build the row of a measured figure."""
    return Result(id_, "pass" if passed else "fail", figure, bar, command)
