"""Registry of guarantees and their checks, and a runner in which no check can end the others.

A guarantee's module defines ``run(full)``, which gives rows of the claim, and rows of its positive control, whose ids
end in ``.control``: each as soon as it has ended. A check without a control proves nothing, and fails with that reason.

The short form leaves some modules out (``LEFT_OUT``), so that it ends within two minutes on two cores.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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
        return _command(self.id)


GUARANTEES = (
    Guarantee(
        "G1",
        "Nothing computed for one tenant serves another, in any tier",
        ("g1_reuse", "g1_spill", "g1_public", "g1_stored", "g1_timing"),
    ),
    Guarantee("G2", "A namespace follows from the proved identity alone", ("g2_namespace", "g2_stored", "g2_split")),
    Guarantee("G3", "Strict answers are the same bits alone and beside any company", ("g3_noninterference",)),
    Guarantee("G4", "Memory is clear before it changes owner", ("g4_residue",)),
    Guarantee("G5", "Nobody pushes a tenant's KV below what is reserved for it", ("g5_occupancy",)),
    Guarantee("G6", "A flood takes a bounded share of a tenant's service", ("g6_interference",)),
    Guarantee("G7", "Strict answers look alike on the wire", ("g7_wire",)),
    Guarantee(
        "G8",
        "No request ends service for others; a taken-over sandbox reaches nothing",
        ("g8_containment", "g8_hostile", "g8_service"),
    ),
    Guarantee(
        "G9", "Nothing of a request stays in clear; deleted means gone", ("g9_sealed", "g9_stored", "g9_forgetting")
    ),
    Guarantee("G10", "Every decision is in a log in which no change goes unseen", ("g10_account", "g10_model")),
)
"""All guarantees, in the order in which they are shown."""

SECONDS: Mapping[str, int] = MappingProxyType(
    {
        "g1_reuse": 2,
        "g1_spill": 6,
        "g1_public": 2,
        "g1_stored": 3,
        "g1_timing": 35,
        "g2_namespace": 4,
        "g2_stored": 2,
        "g2_split": 3,
        "g3_noninterference": 10,
        "g4_residue": 5,
        "g5_occupancy": 5,
        "g6_interference": 8,
        "g7_wire": 6,
        "g8_containment": 14,
        "g8_hostile": 25,
        "g8_service": 40,
        "g9_sealed": 1,
        "g9_stored": 3,
        "g9_forgetting": 20,
        "g10_account": 1,
        "g10_model": 6,
    }
)
"""About how many seconds each module takes at short counts on two cores; only the estimate depends on them."""

LEFT_OUT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "g1_timing": ("G1.timing", "G1.cached"),
        "g8_hostile": ("G8.greed", "G8.wire"),
        "g8_service": ("G8.fuzz", "G8.deaths"),
        "g9_forgetting": ("G9.canaries", "G9.ids", "G9.cores", "G9.deleted"),
    }
)
"""Modules that the short form leaves out, and the claims that they show."""


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


def left_out(module: str) -> list[Result]:
    """Return the rows that say what the short form leaves out with this module; pure."""
    return [
        Result(claim, "not run", "left out of the short form; --full runs it", "", _command(claim.partition(".")[0]))
        for claim in LEFT_OUT.get(module, ())
    ]


def seconds(modules: Iterable[str]) -> int:
    """Estimate how long these modules take at short counts on two cores; pure."""
    return sum(SECONDS.get(module, 0) for module in modules)


def check(guarantee: Guarantee, *, full: bool) -> list[Result]:
    """Run all checks of a guarantee; see ``check_module``."""
    return [row for module in guarantee.modules for row in check_module(guarantee, module, full=full)]


def check_module(guarantee: Guarantee, module: str, *, full: bool) -> Iterator[Result]:
    """Run one module of a guarantee's check; each row is given as soon as it has ended, whatever the check does.

    A module that does not exist is ``absent``. One that cannot be imported, raises, returns no row, returns a row of
    another guarantee or has no positive control is ``fail``.
    """
    name = f"appliance.selftest.{module}"
    if importlib.util.find_spec(name) is None:
        reason = f"not part of this build: there is no {name}"
        yield Result(guarantee.id, "absent", reason, "a check that runs", guarantee.command)
        return
    rows: list[Result] = []
    try:
        run: Callable[[bool], Iterable[Result]] = importlib.import_module(name).run
        for row in run(full):
            rows.append(row)
            yield row
    except Exception as error:  # noqa: BLE001 - the boundary of one check: an exception is a failure of it
        said = str(error).partition("\n")[0][:200]
        yield _defect(guarantee, f"the check broke: {type(error).__name__}: {said}")
        return
    for problem in problems(guarantee, rows):
        yield _defect(guarantee, problem)


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


def _command(guarantee: str) -> str:
    return f"athanor selftest --only {guarantee}"


def _defect(guarantee: Guarantee, problem: str) -> Result:
    return judged(f"{guarantee.id}.check", False, figure=problem, bar="a check that runs", command=guarantee.command)
