"""``athanor selftest``: the ten guarantees, shown on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.selftest_record import NAME, SelftestRecord, write_record
from appliance.common.version import VERSION
from appliance.operator.cli import exits
from appliance.operator.cli.audit import DEFAULT_FOLDER, From, config_errors_fail
from appliance.operator.cli.guarded import guard_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.selftest.registry import Guarantee
    from appliance.selftest.result import Result

EXAMPLES = """
athanor selftest | the short form, within two minutes; names what it leaves out
athanor selftest --only G2,G8 | all rows of two of them, at short counts
athanor selftest --full --json | all rows at release counts, for other programs; hours
athanor selftest --record | tenants' attestations name the outcome; as root
"""

Full = Annotated[bool, typer.Option("--full", help="All rows, at release counts; hours.")]
Json = Annotated[bool, typer.Option("--json", help="Rows as a JSON list: id, verdict, figure, bar, command.")]
Record = Annotated[bool, typer.Option("--record", help="Keep the outcome beside the audit log: attestations name it.")]
Only = Annotated[str | None, typer.Option(metavar="IDS", help="All rows of these guarantees, for example G1,G8.")]


def selftest(
    context: typer.Context,
    full: Full = False,
    as_json: Json = False,
    only: Only = None,
    record: Record = False,
    directory: From = DEFAULT_FOLDER,
) -> None:
    """Show on this machine that the guarantees hold.

    Each row is a figure against its bar, shown as soon as it has ended. Rows whose name ends in
    "control" show that the check can see what it looks for. The short form leaves the longest
    checks out and names them as "not run". Sandboxes and appliances of its own are started beside
    yours, which is not touched, and end with this command, also when it is killed; it needs root
    for real sandboxes, and loads the machine while it runs.

    With --record the outcome is written to selftest.json in the folder of the audit log, also where
    rows failed, and attestations name it from then on (docs/attestation.md).

    Ends with 0 when every row that ran passed, 1 when one failed, 5 when none failed and some could
    not be shown here.
    """
    from appliance.operator.cli.terminal import errors, fail, output, print_json
    from appliance.selftest import registry

    try:
        chosen = registry.choose(only.split(",") if only is not None else ())
    except ValueError as error:
        fail(exits.USAGE, str(error), "give ids as in: athanor selftest --only G1,G8")
    if record and only is not None:
        fail(exits.USAGE, "a part of the self-test is not recorded", "leave --only out")
    if record and not directory.is_dir():
        fail(exits.REFUSED, f"{directory} is no folder", "name the folder of the audit log: --from DIR")
    guard_command(context)
    # Rows for other programs come in one document, at the end; meanwhile standard error shows them.
    console = errors() if as_json else output()

    def show(part: RenderableType) -> None:
        console.print(part)
        console.file.flush()

    found = list(_run(chosen, full=full, whole=full or only is not None, width=console.width, show=show))
    if as_json:
        print_json([asdict(row) for row in found])
    if record:
        with config_errors_fail():
            write_record(directory, outcome(found, full=full, now=time.time()))
        errors().print(f"recorded in {directory / NAME}", soft_wrap=True, markup=False)
    raise typer.Exit(exit_code(found))


def _run(
    chosen: Sequence[Guarantee], *, full: bool, whole: bool, width: int, show: Callable[[RenderableType], None]
) -> Iterator[Result]:
    """Run the checks, show each row as it ends, and what it all comes to; gives the rows.

    Args:
        chosen: guarantees to show.
        full: run release counts.
        whole: run the modules that the short form leaves out, too.
        width: columns of the terminal.
        show: prints at once.
    """
    from appliance.operator.cli import selftest_view as view
    from appliance.selftest import registry

    modules = [module for one in chosen for module in one.modules if whole or module not in registry.LEFT_OUT]
    estimate = view.Estimate(registry.seconds(modules), endless=full)
    show(view.beginning(len(modules), estimate))
    rows: list[Result] = []
    began = time.monotonic()
    for guarantee in chosen:
        show(view.heading(guarantee, estimate.remaining(time.monotonic() - began)))
        for module in guarantee.modules:
            runs = module in modules
            for row in registry.check_module(guarantee, module, full=full) if runs else registry.left_out(module):
                show(view.line(guarantee, row, width))
                rows.append(row)
                yield row
            estimate.done_s += registry.seconds([module]) if runs else 0
    show(view.summary(rows, time.monotonic() - began))


def outcome(rows: Sequence[Result], *, full: bool, now: float) -> SelftestRecord:
    """What is recorded of a self-test that ended at ``now`` (Unix time)."""
    counts = Counter(row.verdict for row in rows)
    kept = counts["pass"], counts["fail"], counts["absent"], counts["not run"]
    return SelftestRecord(int(now), VERSION, "full" if full else "short", kept)


def exit_code(rows: list[Result]) -> int:
    """What the verdicts come to. Rows that were not run do not count."""
    verdicts = {row.verdict for row in rows}
    if "fail" in verdicts:
        return exits.REFUSED
    return exits.INCOMPLETE if "absent" in verdicts else exits.OK
