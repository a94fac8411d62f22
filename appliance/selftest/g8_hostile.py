"""G8: a sandbox that takes everything, or breaks the wire's rules, harms nothing outside of itself."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.figures import counted
from appliance.selftest import exhaustion, hostile_guest, intruder
from appliance.selftest.result import Result, judged
from isolation.gvisor.gvisor_runtime import GvisorRuntime

COMMAND = "athanor selftest --only G8"

CHANGED_FRAMES = (20_000, 1_000_000)
"""Frames read while they change, in the short and the full form."""


def run(full: bool) -> Iterator[Result]:
    """Run the rows about hostile sandboxes."""
    try:
        with intruder.gvisor() as runtime:
            yield from greed(runtime)
            yield from wire(runtime, CHANGED_FRAMES[full])
    except intruder.CannotBeShownError as error:
        yield Result("G8.hostile", "absent", str(error), "it starts here", COMMAND)


def greed(runtime: GvisorRuntime) -> list[Result]:
    """Measure what sandboxes take, and check that the host is unaffected."""
    all_taken = [exhaustion.take(kind, runtime) for kind in exhaustion.KINDS]
    harmful = [taken.kind for taken in all_taken if not taken.harmless]
    said = ", ".join(f"{taken.kind} {taken.said}" for taken in all_taken)
    figure = f"{len(harmful)} of {len(all_taken)} were felt outside" + "".join(f"; {kind}" for kind in harmful)
    bar = "0: programs of the host start beside it, nothing grows, nothing is left"
    takes = [taken for taken in all_taken if taken.said != "took 0"]
    return [
        judged("G8.greed", not harmful, figure=figure, bar=bar, command=COMMAND),
        judged(
            "G8.greed.control",
            len(takes) == len(all_taken),
            figure=said,
            bar="each takes until it is stopped",
            command=COMMAND,
        ),
    ]


def wire(runtime: GvisorRuntime | None, frames: int) -> list[Result]:
    """Check the host's response to guests that violate the wire protocol, and to memory that changes while it is
    read."""
    ended = [hostile_guest.one_way(way, runtime) for way in hostile_guest.ENDED]
    unseen = [seen.way for seen in ended if not seen.at_fault]
    borne = [hostile_guest.one_way(way, runtime) for way in hostile_guest.BORNE]
    least = hostile_guest.LEAST_TURNS
    slow = [f"{one.way}: {counted(one.turns, 'turn')} {one.reason}" for one in borne if one.turns < least or one.reason]
    changed = hostile_guest.read_while_it_changes(frames, runtime)
    ends = f"{len(ended) - len(unseen)} of {counted(len(ended), 'breach', 'breaches')} ended their sandbox"
    figure = f"{ends}, {len(borne) - len(slow)} of {counted(len(borne), 'flood')} borne" + "".join(
        f"; {one}" for one in (*unseen, *slow)
    )
    met = changed.whole + changed.refused
    return [
        judged("G8.wire", not unseen and not slow, figure=figure, bar="all ended, all borne", command=COMMAND),
        judged(
            "G8.wire.changed",
            met == frames,
            figure=f"{met} of {counted(frames, 'frame')} gave a message or the protocol's error",
            bar="all",
            command=COMMAND,
        ),
        judged(
            "G8.wire.control",
            changed.fooled > 0,
            figure=f"{counted(changed.fooled, 'time')} a reader that looks twice would have been fooled",
            bar="at least 1",
            command=COMMAND,
        ),
    ]
