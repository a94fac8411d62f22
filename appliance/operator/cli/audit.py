"""``athanor audit verify`` and ``show``: the audit log, without asking anything that runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import os_errors_as, reason_of
from appliance.common.figures import counted, printable
from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.audit.checkpoint import Verifier
    from appliance.common.audit.entry import Entry
    from appliance.common.audit.verify import Report

DEFAULT_FOLDER = Path("/var/lib/athanor-supervisor/audit")
MAX_WITNESS_BYTES = 1 << 20

ELSEWHERE = "as root; `audit: directory` in athanor.yaml says where the log is, --from names another folder"

VERIFY_EXAMPLES = """
athanor audit verify | the log of this machine
athanor audit verify --from /mnt/copy/audit --key kept.key | a copy, by a key kept elsewhere
athanor audit verify --witness monday.checkpoint | nothing that monday's checkpoint covers is missing
"""

SHOW_EXAMPLES = """
athanor audit show | the last twenty entries
athanor audit show --kind sandbox --last 100 | which sandboxes came and went
athanor audit show -o json | for other programs
"""

From = Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder of the log.")]


def verify(
    directory: From = DEFAULT_FOLDER,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Its public key; without it that beside the log.")
    ] = None,
    witness: Annotated[
        list[Path] | None,
        typer.Option("--witness", metavar="FILE", help="Checkpoints of this log that were kept elsewhere."),
    ] = None,
    archived: Annotated[
        bool, typer.Option("--archived", help="The oldest segments were moved away; verify what is here.")
    ] = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Verify that no entry of the audit log was changed, removed, added or moved.

    Offline: reads the folder and nothing else. A key and witnesses that were kept on another
    machine show more than the folder alone can: that its end was not cut off, and that nobody who
    holds the signing key wrote another log. The last checkpoint is printed: keep it as a witness.
    """
    from appliance.common.audit import verify as verifier

    try:
        report = verifier.verify(directory, _verifier(directory, key), _witnesses(witness or []), archived=archived)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {directory}: {reason_of(error)}", ELSEWHERE)
    _show_report(report, output_format, own_key=key is None)
    if not report.sound:
        raise typer.Exit(exits.REFUSED)


def show(
    directory: From = DEFAULT_FOLDER,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, help="How many entries.")] = 20,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only entries of this kind.")] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Show the newest entries of the audit log. Verifies nothing: see athanor audit verify."""
    from appliance.common.audit.entry import KINDS

    if kind is not None and kind not in KINDS:
        fail(exits.USAGE, f"no entries are of the kind {kind!r}; there are {', '.join(KINDS)}")
    try:
        found = _newest(directory, last, kind)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {directory}: {reason_of(error)}", ELSEWHERE)
    entries = [{"n": number, "t": time_ms, "kind": one.kind, **one.fields} for number, time_ms, one in found]
    if print_data(entries, output_format):
        return
    from datetime import UTC, datetime

    console = output()
    for number, time_ms, one in found:
        moment = datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        words = "  ".join(f"{name}={value}" for name, value in one.fields.items() if value != "")
        console.print(printable(f"{number:>8}  {moment}  {one.kind:<9}  {words}"), soft_wrap=True, markup=False)


def _verifier(directory: Path, key: Path | None) -> Verifier:
    from appliance.common.audit import files
    from appliance.common.audit.checkpoint import CheckpointError
    from appliance.common.audit.verify import read_verifier

    path = key or directory / files.PUBLIC_KEY
    try:
        return read_verifier(path)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {path}: {reason_of(error)}", ELSEWHERE)
    except CheckpointError as error:
        fail(exits.REFUSED, f"{path}: {error}")


def _witnesses(paths: list[Path]) -> list[str]:
    """The checkpoints in the files, five lines each."""
    from appliance.common.audit.files import CHECKPOINT_LINES

    notes = []
    for path in paths:
        with os_errors_as(f"cannot read {path}"), path.open("rb") as file:
            lines = file.read(MAX_WITNESS_BYTES).decode("utf-8", "replace").splitlines(keepends=True)
        notes += ["".join(lines[at : at + CHECKPOINT_LINES]) for at in range(0, len(lines), CHECKPOINT_LINES)]
    return notes


def _show_report(report: Report, output_format: Format, *, own_key: bool) -> None:
    last = {"size": report.last.size, "root": report.last.root.hex()} if report.last is not None else None
    values = {**asdict(report), "last": last}
    if print_data({"ok": report.sound, "log": values.pop("name"), **values}, output_format):
        return
    console = output()
    console.print(
        f"{report.name}: {counted(report.entries, 'entry', 'entries')} from number {report.first} on, "
        f"{counted(report.checkpoints, 'checkpoint')}, {counted(report.witnesses, 'witness', 'witnesses')}",
        soft_wrap=True,
    )
    if report.last is not None:
        size = counted(report.last.size, "entry", "entries")
        console.print(f"the last checkpoint covers {size}, root {report.last.root.hex()}", soft_wrap=True)
    if report.unsigned:
        waiting = counted(report.unsigned, "entry", "entries")
        console.print(f"{waiting} not yet in a checkpoint: the log is being written", soft_wrap=True)
    if own_key:
        console.print("verified by the key beside the log: name one kept elsewhere with --key", soft_wrap=True)
    for problem in report.problems:
        console.print(printable(problem), style="red", soft_wrap=True, markup=False)
    console.print("the log is whole" if report.sound else "the log is NOT whole", style="bold")


def _newest(directory: Path, last: int, kind: str | None) -> list[tuple[int, int, Entry]]:
    """The newest entries, the oldest of them first."""
    from appliance.common.audit import files
    from appliance.common.audit.entry import EntryError, from_line

    found: list[tuple[int, int, Entry]] = []
    for path in reversed(files.segment_paths(directory)):
        try:
            lines = files.read_segment(path).lines
        except files.LogFormatError as error:
            fail(exits.REFUSED, str(error))
        for line in reversed(lines):
            try:
                number, time_ms, one = from_line(line)
            except EntryError:
                fail(exits.REFUSED, f"{path.name} holds a line that is no entry; athanor audit verify tells more")
            if kind is None or one.kind == kind:
                found.append((number, time_ms, one))
            if len(found) == last:
                return found[::-1]
    return found[::-1]
