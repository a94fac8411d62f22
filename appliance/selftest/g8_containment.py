"""G8: a compromised sandbox reaches nothing.

Not covered: code that runs inside an engine reads the KV of every tenant of that engine; drivers of accelerators that
are passed into a sandbox; the processor's own side channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from signal import SIGSYS

from appliance.common.figures import counted
from appliance.selftest import intruder
from appliance.selftest.result import Result, judged
from isolation.ipc.messages import Role

COMMAND = "athanor selftest --only G8"
MOSTLY = 0.75
"""Share of the attacks that must succeed outside a sandbox, for the control: kernels differ in their features."""

ENDED = {Role.ENGINE: 0.9, Role.TEXT: 0.75}
"""Share of the attempts that end a locked-down process; the others need no unlisted call, and achieve nothing. A text
worker that looks up files gets "not found" and survives."""


def run(full: bool) -> Iterator[Result]:
    """Run the rows about what a compromised sandbox reaches; they are the same in both forms."""
    del full
    try:
        with intruder.gvisor() as runtime:
            control = intruder.outside()
            for role in (Role.ENGINE, Role.TEXT):
                yield reach(role, intruder.inside(runtime, role), control)
            copy = reach(Role.ENGINE, intruder.inside(runtime, Role.ENGINE, restored=True), control)
            yield replace(copy, id="G8.reach.restored")
            for role in (Role.ENGINE, Role.TEXT):
                yield locked(role, intruder.inside(runtime, role, locked=True), control)
            yield reach_control(control)
    except intruder.CannotBeShownError as error:
        yield Result("G8.sandbox", "absent", str(error), "it starts here", COMMAND)


def reach(role: Role, found: intruder.Findings, control: intruder.Findings) -> Result:
    """Build the row of one sandbox: every attack of the control was tried, none reached anything."""
    reached = sorted(name for name, row in found.items() if row["outcome"] != "refused")
    missing = sorted(control.keys() - found.keys())
    figure = f"{len(reached)} of {counted(len(found), 'attempt')} reached anything"
    figure += "".join(f"; {name}: {found[name]['said']}" for name in reached[:5])
    figure += f"; not tried: {', '.join(missing)}" if missing else ""
    return judged(
        f"G8.reach.{role.name.lower()}",
        not reached and not missing,
        figure=figure,
        bar="0 reached, all tried",
        command=COMMAND,
    )


def locked(role: Role, found: intruder.Findings, control: intruder.Findings) -> Result:
    """Build the row of a serving program: each attempt ends the process that makes it."""
    row = reach(role, found, control)
    ended = sum(one["said"] == f"the process ended with {-SIGSYS}" for one in found.values())
    figure = f"{ended} of {counted(len(found), 'attempt')} ended the process that made them; {row.figure}"
    passed = row.verdict == "pass" and ended >= ENDED[role] * len(found)
    bar = f"{ENDED[role]:.0%} ended, 0 reached"
    return judged(f"G8.reach.locked.{role.name.lower()}", passed, figure=figure, bar=bar, command=COMMAND)


def reach_control(control: intruder.Findings) -> Result:
    """Build the control's row: outside a sandbox most attacks succeed, and some of every kind."""
    reached = {name for name, row in control.items() if row["outcome"] == "reached"}
    kinds = {name.partition(".")[0] for name in control}
    without = sorted(kinds - {name.partition(".")[0] for name in reached})
    figure = f"{len(reached)} of {len(control)} reach outside a sandbox"
    figure += f"; none of {', '.join(without)}" if without else ""
    passed = not without and len(reached) >= MOSTLY * len(control) > 0
    return judged("G8.reach.control", passed, figure=figure, bar="three quarters, some of every kind", command=COMMAND)
