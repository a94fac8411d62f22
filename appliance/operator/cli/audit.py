"""``athanor audit verify`` and ``show``: the audit log, without asking anything that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import os_errors_as, reason_of
from appliance.common.figures import counted, printable
from appliance.operator.cli import exits
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.audit.checkpoint import Verifier
    from appliance.common.audit.verify import Report
    from appliance.operator.audit_entries import EntryFilter

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
athanor audit show --tenant alpha --since today | what alpha was allowed and denied
athanor audit show --config .athanor/athanor.yaml | the log that this configuration names
athanor audit show -o json | for other programs, with every field and whole digests
"""

LAST, MOST = 20, 10_000
"""Entries that are shown, where ``--last`` says nothing: without a time, and since one."""

DIGEST_CHARACTERS = 12
"""Leading characters of a digest in a table: enough to tell two apart."""

_DIGEST = re.compile(r"[0-9a-f]{40,}")

From = Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder of the log.")]
Folder = Annotated[
    Path | None, typer.Option("--from", metavar="DIR", help="Folder of the log, in place of that of --config.")
]
Names = Annotated[
    Path | None,
    typer.Option("--names", metavar="DIR", help="Folder of the log whose keys resolve pseudonyms, else --from."),
]
Kinds = Annotated[
    list[str] | None, typer.Option("--kind", metavar="KIND", help="Only entries of this kind; may be repeated.")
]
Tenants = Annotated[
    list[str] | None, typer.Option("--tenant", metavar="ID", help="Only entries about this tenant; may be repeated.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", metavar="NAME", help="Only entries about this model; may be repeated.")
]
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"Only entries from then on: {MOMENTS} (UTC).")
]
Until = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Only entries before then, likewise.")]


def verify(  # noqa: PLR0913 - a parameter is an option
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
    tiles: Annotated[
        Path | None, typer.Option("--tiles", metavar="DIR", help="Verify an export of athanor audit tiles instead.")
    ] = None,
    proof: Annotated[
        Path | None, typer.Option("--proof", metavar="FILE", help="Verify a proof of athanor audit prove instead.")
    ] = None,
    cosigner: Annotated[
        list[Path] | None,
        typer.Option("--cosigner", metavar="FILE", help="Key of a witness that must have cosigned; may be repeated."),
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Verify that no entry of the audit log was changed, removed, added or moved.

    Offline: reads the folder and nothing else. A key and witnesses that were kept on another
    machine show more than the folder alone can: that its end was not cut off, and that nobody who
    holds the signing key wrote another log. The last checkpoint is printed: keep it as a witness.
    """
    from appliance.common.audit import verify as verifier
    from appliance.operator.cli.audit_tiles import check_tiles, verify_proof

    if proof is not None:
        return verify_proof(proof, key, cosigner or [], output_format)
    if tiles is not None:
        report = check_tiles(tiles, key, _witnesses(witness or []), cosigner or [])
        _show_report(report, output_format, own_key=key is None)
        if not report.sound:
            raise typer.Exit(exits.REFUSED)
        return None
    try:
        report = verifier.verify(directory, _verifier(directory, key), _witnesses(witness or []), archived=archived)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {directory}: {reason_of(error)}", ELSEWHERE)
    _show_report(report, output_format, own_key=key is None)
    if not report.sound:
        raise typer.Exit(exits.REFUSED)
    return None


def show(  # noqa: PLR0913 - a parameter is an option
    directory: Folder = None,
    config: Config = DEFAULT_CONFIG,
    last: Annotated[
        int | None,
        typer.Option(
            "--last", metavar="N", min=1, help=f"How many entries. [{LAST}; {MOST} with --since]", show_default=False
        ),
    ] = None,
    kind: Kinds = None,
    tenant: Tenants = None,
    model: Models = None,
    since: Since = None,
    until: Until = None,
    names: Names = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Show the newest entries of the audit log. Verifies nothing: see athanor audit verify.

    Fields that are empty or 0 are left out, and digests are cut short; -o json has all of them.
    Tenants and credentials have their names as long as their keys of pseudonyms live; after athanor
    tenant shred their pseudonyms are shown.
    """
    from datetime import UTC, datetime

    from appliance.operator.audit_entries import newest

    chosen = entry_filter(since, until, kind, tenant, model)
    with config_errors_fail():
        found = newest(directory or log_folder(config), chosen, last or (LAST if since is None else MOST), names)
    if print_data([one.values() for one in found], output_format):
        return
    console = output()
    for one in found:
        moment = datetime.fromtimestamp(one.time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        words = "  ".join(f"{name}={_short(value)}" for name, value in one.entry.fields.items() if value not in ("", 0))
        line = f"{one.number:>8}  {moment}  {one.entry.kind:<9}  {words}"
        console.print(printable(line), soft_wrap=True, markup=False)


def _short(value: str | int) -> str:
    """A field's value as a line has it."""
    text = str(value)
    return text[:DIGEST_CHARACTERS] if _DIGEST.fullmatch(text) else text


def log_folder(config: Path) -> Path:
    """Folder of the log by a configuration; that of the service where none is installed.

    Raises:
        ConfigError: the configuration cannot be used, or keeps no log.
    """
    from appliance.common.config_loader import load_config
    from appliance.common.errors import ConfigError

    if not config.exists():
        if config != DEFAULT_CONFIG:
            raise ConfigError(f"there is no configuration {config}")
        return DEFAULT_FOLDER
    audit = load_config(config).audit
    if audit is None:
        raise ConfigError(f"{config} has no section audit, so requests are not logged")
    return audit.directory


def entry_filter(
    since: str | None, until: str | None, kinds: list[str] | None, tenants: list[str] | None, models: list[str] | None
) -> EntryFilter:
    """Make a filter of the options; a kind that is none, and a time that is none, end the command."""
    from datetime import UTC, datetime

    from appliance.common.audit.entry import KINDS
    from appliance.operator.audit_entries import FOREVER_MS, EntryFilter

    for kind in kinds or ():
        if kind not in KINDS:
            fail(exits.USAGE, f"no entries are of the kind {kind!r}; there are {', '.join(KINDS)}")
    now = datetime.now(UTC)
    begin = 0 if since is None else int(read_moment(since, now, "--since").timestamp() * 1_000)
    end = FOREVER_MS if until is None else int(read_moment(until, now, "--until").timestamp() * 1_000)
    if end <= begin:
        fail(exits.USAGE, f"the time ends before it begins: --since {since} --until {until}")
    return EntryFilter(begin, end, tuple(kinds or ()), tuple(tenants or ()), tuple(models or ()))


@contextmanager
def config_errors_fail() -> Iterator[None]:
    """End the command with what a log that cannot be read is told."""
    from appliance.common.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        fail(exits.REFUSED, error.message, ELSEWHERE)


def _verifier(directory: Path, key: Path | None) -> Verifier:
    from appliance.common.audit import files

    return verifier_in(key or directory / files.PUBLIC_KEY, ELSEWHERE)


def verifier_in(path: Path, hint: str | None = None) -> Verifier:
    """Read the public key of an audit log from a file; what is none ends the command, with a hint where one helps."""
    from appliance.common.audit.checkpoint import CheckpointError
    from appliance.common.audit.verify import read_verifier

    try:
        return read_verifier(path)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {path}: {reason_of(error)}", hint)
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
    if report.cosigned:
        console.print(f"cosigned by {', '.join(report.cosigned)}", soft_wrap=True, markup=False)
    if own_key:
        console.print("verified by the key beside the log: name one kept elsewhere with --key", soft_wrap=True)
    for problem in report.problems:
        console.print(printable(problem), style="red", soft_wrap=True, markup=False)
    console.print("the log is whole" if report.sound else "the log is NOT whole", style="bold")
