"""What came of a trial, as plain lines: for the command and for measurements on a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.operator.calls.session import Mode, TrialOutcome
from isolation.errors import describe_status

MOST_ARGUMENT = 96
"""Characters of a call's arguments in a table."""


def lines(outcome: TrialOutcome, mode: Mode) -> list[str]:
    """The verdict, the load, and of a collection each program with what is outside of its list and what is unused."""
    ended = ", ".join(f"{count} {name}" for name, count in sorted(outcome.ended.items())) or "none"
    result = [
        verdict(outcome, mode),
        f"ready after {outcome.ready_s:.1f} s; load of {outcome.loaded_s:.1f} s, requests: {ended}",
    ]
    if outcome.spilled:
        result.append("blocks that left the engine: " + ", ".join(f"{n} {name}" for name, n in outcome.spilled.items()))
    for program in outcome.programs:
        result += _program(program)
    if outcome.said.strip() and not outcome.lived:
        result += ["it said last:", *(f"  {line}" for line in outcome.said.strip().splitlines()[-8:])]
    return result


def verdict(outcome: TrialOutcome, mode: Mode) -> str:
    """One line: whether it lived, and whether its calls are those of its lists."""
    if outcome.killed:
        return "ended by its lock-down: it made a call beyond its list"
    if not outcome.lived:
        ending = "had to be ended" if outcome.status is None else describe_status(outcome.status)
        return f"the load came to no end: {outcome.problem or ending}"
    if mode is Mode.ENFORCE:
        return "served the load under its lists"
    count = sum(len(found) for found in outcome.outside.values())
    return "every call is on its list" if not count else f"{count} kinds of calls outside of the lists"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns under heads, as wide as they have to be; the last one as it is."""
    cells = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(heads) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in cells
    ]


def _program(program: Mapping[str, Any]) -> list[str]:
    result = [f"{program['program']}: {program['processes']} process{'es' if program['processes'] != 1 else ''}"]
    if program["outside"]:
        rows = [
            (
                one["name"],
                str(one["count"]),
                ", ".join(one["threads"]),
                ", ".join(one["near"]) or "-",
                one["arguments"][:MOST_ARGUMENT] or "any arguments",
            )
            for one in sorted(program["outside"], key=lambda one: -one["count"])
        ]
        result += ["  outside of its list:"]
        result += [f"    {line}" for line in table(("call", "times", "threads", "near", "arguments"), rows)]
    if program["used"] is not None:
        used = ", ".join(f"{name} {count:,}" for name, count in program["used"].items())
        result.append(f"  on its list: {used or 'none'}")
        result.append(f"  never used: {', '.join(program['unused']) or 'none'}")
    return result
