"""``athanor selftest``: the ten guarantees, shown on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits

if TYPE_CHECKING:
    from appliance.selftest.registry import Guarantee
    from appliance.selftest.result import Result

EXAMPLES = """
athanor selftest | all ten in their short form, some minutes
athanor selftest --only G2,G8 | two of them
athanor selftest --full --json | release counts, for other programs; hours
"""

Full = Annotated[bool, typer.Option("--full", help="Release counts in place of the short form.")]
Json = Annotated[bool, typer.Option("--json", help="Rows as a JSON list: id, verdict, figure, bar, command.")]
Only = Annotated[str | None, typer.Option(metavar="IDS", help="Guarantees to show, for example G1,G8.")]


def selftest(full: Full = False, as_json: Json = False, only: Only = None) -> None:
    """Show on this machine that the guarantees hold.

    Each row is a figure against its bar. Rows whose name ends in "control" show that the check can
    see what it looks for. Sandboxes and appliances of its own are started beside yours, which is
    not touched; it needs root for real sandboxes, and loads the machine while it runs.

    Ends with 0 when every row passed, 1 when one failed, 5 when none failed and some could not be
    shown here.
    """
    from appliance.operator.cli.terminal import errors, fail, output, print_json
    from appliance.selftest import registry

    try:
        chosen = registry.choose(only.split(",") if only is not None else ())
    except ValueError as error:
        fail(exits.USAGE, str(error), "give ids as in: athanor selftest --only G1,G8")
    rows: list[tuple[Guarantee, list[Result]]] = []
    with errors().status("") as status:
        for number, guarantee in enumerate(chosen, 1):
            status.update(f"{guarantee.id}  {guarantee.promise}  ({number} of {len(chosen)})")
            rows.append((guarantee, registry.check(guarantee, full=full)))
    found = [row for _, some in rows for row in some]
    if as_json:
        print_json([asdict(row) for row in found])
    else:
        from appliance.operator.cli.selftest_view import selftest_view

        console = output()
        console.print(selftest_view(rows, console.width))
    raise typer.Exit(exit_code(found))


def exit_code(rows: list[Result]) -> int:
    """What the verdicts come to."""
    verdicts = {row.verdict for row in rows}
    if "fail" in verdicts:
        return exits.REFUSED
    return exits.INCOMPLETE if "absent" in verdicts else exits.OK
