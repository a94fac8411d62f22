"""Registry of guarantees and their checks, and a runner in which no check can end the others.

A guarantee's module defines ``run(full) -> list[Result]``: rows of the claim, and rows of its positive control, whose
ids end in ``.control``. A check without a control proves nothing, and fails with that reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.selftest.result import Result, judged

CONTROL = ".control"
"""Suffix of the id of a positive control's row."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A guarantee and the modules of its check."""

    id: str
    promise: str
    modules: tuple[str, ...]
    """Modules below this package; each shows a part."""

    @property
    def command(self) -> str:
        """Return the command that shows this guarantee alone."""
        return f"athanor selftest --only {self.id}"


GUARANTEES = (
    Guarantee(
        "G1",
        "Nothing computed for one tenant serves another, in any tier",
        ("g1_reuse", "g1_spill", "g1_public", "g1_timing"),
    ),
    Guarantee("G2", "A namespace follows from the proved identity alone", ("g2_namespace",)),
    Guarantee("G3", "Strict answers are the same bits alone and beside any company", ("g3_noninterference",)),
    Guarantee("G4", "Memory is clear before it changes owner", ("g4_residue",)),
    Guarantee("G5", "Nobody pushes a tenant's KV below what is reserved for it", ("g5_occupancy",)),
    Guarantee("G6", "A flood takes a bounded share of a tenant's service", ("g6_interference",)),
    Guarantee("G7", "Strict answers look alike on the wire", ("g7_wire",)),
    Guarantee("G8", "No request ends service for others; a taken-over sandbox reaches nothing", ("g8_containment",)),
    Guarantee("G9", "Nothing of a request stays in clear; deleted means gone", ("g9_forgetting",)),
    Guarantee("G10", "Every decision is in a log in which no change goes unseen", ("g10_account", "g10_model")),
)
"""All guarantees, in the order in which they are shown."""


def choose(words: Sequence[str]) -> tuple[Guarantee, ...]:
    """Return the guarantees with these ids, in the order of the table; all of them without ids.

    Raises:
        ValueError: an id is unknown; the message names it.
    """
    wanted = {word.strip().upper() for word in words}
    known = {one.id for one in GUARANTEES}
    if unknown := sorted(wanted - known):
        raise ValueError(f"there is no guarantee {unknown[0] or 'without a name'}; they are {', '.join(known_ids())}")
    return tuple(one for one in GUARANTEES if not wanted or one.id in wanted)


def known_ids() -> tuple[str, ...]:
    """Return every id."""
    return tuple(one.id for one in GUARANTEES)


def check(guarantee: Guarantee, *, full: bool) -> list[Result]:
    """Run a guarantee's checks; rows are returned whatever a check does.

    A module that does not exist is ``absent``. One that cannot be imported, raises, returns no row, returns a row of
    another guarantee or has no positive control is ``fail``.
    """
    return [row for module in guarantee.modules for row in _checked(guarantee, module, full)]


def _checked(guarantee: Guarantee, module: str, full: bool) -> list[Result]:
    name = f"appliance.selftest.{module}"
    if importlib.util.find_spec(name) is None:
        reason = f"not part of this build: there is no {name}"
        return [Result(guarantee.id, "absent", reason, "a check that runs", guarantee.command)]
    try:
        run: Callable[[bool], list[Result]] = importlib.import_module(name).run
        rows = run(full)
    except Exception as error:  # noqa: BLE001 - the boundary of one check: an exception is a failure of it
        said = str(error).partition("\n")[0][:200]
        return [_defect(guarantee, f"the check broke: {type(error).__name__}: {said}")]
    return rows + [_defect(guarantee, problem) for problem in problems(guarantee, rows)]


def problems(guarantee: Guarantee, rows: Sequence[Result]) -> list[str]:
    """Return what is wrong with the rows of a check; pure."""
    if not rows:
        return ["the check gave no row"]
    found = [
        f"a row of another guarantee: {row.id}"
        for row in rows
        if row.id != guarantee.id and not row.id.startswith(f"{guarantee.id}.")
    ]
    shown = [row for row in rows if row.verdict != "absent"]
    if shown and not any(row.id.endswith(CONTROL) for row in shown):
        found.append("no positive control ran beside it")
    return found


def _defect(guarantee: Guarantee, problem: str) -> Result:
    return judged(f"{guarantee.id}.check", False, figure=problem, bar="a check that runs", command=guarantee.command)
