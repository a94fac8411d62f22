"""``athanor audit tiles``, ``prove`` and the verification of both: the audit log as static files for others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import reason_of
from appliance.common.figures import counted, printable
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.audit.cosignature import Witness
    from appliance.common.audit.verify import Report

TILES_EXAMPLES = """
athanor audit tiles /var/lib/athanor-tiles | add what is new, for a server of files or a copy
athanor audit verify --tiles /mnt/copy/tiles --key kept.key | verify such a copy, by a key kept elsewhere
"""

WITNESS_EXAMPLES = """
athanor audit witness | ask all witnesses of athanor.yaml; for a timer
"""

PROVE_EXAMPLES = """
athanor audit prove 1840 --tiles /var/lib/athanor-tiles > 1840.tlog-proof | that this entry is in the log
athanor audit verify --proof 1840.tlog-proof --key kept.key | and whether that is so
"""

DEFAULT_FOLDER = Path("/var/lib/athanor-supervisor/audit")
Tiles = Annotated[Path, typer.Option("--tiles", metavar="DIR", help="Folder of the tiles.")]


def tiles(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the tiles are; made where it is missing.")],
    directory: Annotated[Path, typer.Option("--from", metavar="DIR", help="Folder of the log.")] = DEFAULT_FOLDER,
    output_format: Output = Format.TABLE,
) -> None:
    """Export the audit log as static tiles, from which anybody can make proofs.

    The layout is C2SP tlog-tiles: hashes, entries and the last checkpoint, in files that never change
    but for the checkpoint. Run again, it adds what is new. Entries have pseudonyms as the log has.
    """
    from appliance.operator.cli.audit import config_errors_fail
    from appliance.operator.tile_export import export_tiles

    with config_errors_fail():
        done = export_tiles(directory, folder)
    if print_data({"log": done.log, "entries": done.size, "added": done.added}, output_format):
        return
    entries = counted(done.size, "entry", "entries")
    output().print(f"{done.log}: {entries} in tiles, {done.added} of them new", soft_wrap=True, highlight=False)


def prove(
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Number of the entry.")], folder: Tiles
) -> None:
    """Print a proof that an entry is in the audit log: C2SP tlog-proof, with the entry in it.

    It is verified with the log's public key alone, and tells nothing of other entries.
    """
    from appliance.common.audit.checkpoint import CheckpointError, read_checkpoint
    from appliance.common.audit.cosignature import first_note
    from appliance.common.audit.files import PUBLIC_KEY
    from appliance.common.audit.proof_file import write_proof
    from appliance.common.audit.proofs import prove_inclusion
    from appliance.common.audit.tiles import CHECKPOINT, TILE_WIDTH, TileError, TileReader
    from appliance.operator.cli.audit import verifier_in

    verifier = verifier_in(folder / PUBLIC_KEY)
    text = _text(folder / CHECKPOINT)
    try:
        size = read_checkpoint(first_note(text), verifier).size
        if number >= size:
            fail(exits.REFUSED, f"the tiles have {counted(size, 'entry', 'entries')}, and none of this number")
        reader = TileReader(folder, size)
        entry = reader.entries(number // TILE_WIDTH)[number % TILE_WIDTH]
        typer.echo(write_proof(entry, number, prove_inclusion(number, size, reader.subtree), text), nl=False)
    except (CheckpointError, TileError) as error:
        fail(exits.REFUSED, f"{folder}: {error}", "athanor audit verify --tiles DIR tells more")


def witness(config: Config = DEFAULT_CONFIG, output_format: Output = Format.TABLE) -> None:
    """Export new tiles, and have the configured witnesses cosign the last checkpoint. For a timer.

    A witness cosigns only what continues all that it has cosigned. One that refuses or cannot be
    reached is told here, by athanor doctor, a metric and an alert; nothing of the appliance waits.
    """
    from appliance.common.audit.checkpoint import CheckpointError
    from appliance.common.audit.cosignature import parse_witness
    from appliance.common.config_loader import load_config
    from appliance.operator.cli.audit import config_errors_fail
    from appliance.operator.tile_export import export_tiles
    from appliance.operator.witnesses import Asked, ask_witnesses

    section = load_config(config).audit
    if section is None or section.tiles is None or not section.witnesses:
        fail(
            exits.REFUSED, "no witness is configured", "`audit: tiles` and `audit: witnesses` in athanor.yaml name them"
        )
    try:
        asked = [Asked(parse_witness(one.key), one.url, one.folder) for one in section.witnesses]
    except CheckpointError as error:
        fail(exits.REFUSED, f"audit.witnesses: {error}")
    with config_errors_fail():
        done = export_tiles(section.directory, section.tiles)
        states = ask_witnesses(section.tiles, asked)
    if not print_data([asdict(one) for one in states], output_format):
        for one in states:
            size = counted(one.size, "entry", "entries")
            said = f"did not cosign: {one.problem}" if one.problem else f"has cosigned {size} of {done.size}"
            output().print(printable(f"{one.name} {said}"), soft_wrap=True, markup=False, highlight=False)
    if any(one.problem for one in states):
        raise typer.Exit(exits.REFUSED)


def verify_proof(path: Path, key: Path | None, cosigners: list[Path], output_format: Format) -> None:
    """Verify a proof that ``prove`` has printed, and show the entry; one that shows nothing ends the command."""
    from appliance.common.audit.checkpoint import CheckpointError
    from appliance.common.audit.proof_file import read_proof
    from appliance.operator.cli.audit import verifier_in

    if key is None:
        fail(exits.USAGE, "by which key?", "write --key FILE: the public key of the log, kept elsewhere")
    try:
        proven = read_proof(_text(path), verifier_in(key), witnesses_in(cosigners))
    except CheckpointError as error:
        fail(exits.REFUSED, f"{path}: {error}")
    by = [one.witness for one in proven.cosigned]
    entry = proven.entry.decode("utf-8", "replace")
    size, values = proven.checkpoint.size, {"ok": True, "number": proven.index, "cosigned": by, "entry": entry}
    if print_data({**values, "size": size}, output_format):
        return
    console = output()
    console.print(json.dumps(entry)[1:-1].replace('\\"', '"'), soft_wrap=True, markup=False, highlight=False)
    among = counted(size, "entry", "entries")
    console.print(f"entry {proven.index} is in the log of {among}{_cosigned(by)}", style="bold")


def check_tiles(folder: Path, key: Path | None, kept: list[str], cosigners: list[Path]) -> Report:
    """Verify tiles; a folder that cannot be read ends the command."""
    from appliance.common.audit.files import PUBLIC_KEY
    from appliance.common.audit.verify_tiles import verify_tiles
    from appliance.operator.cli.audit import verifier_in

    verifier = verifier_in(key or folder / PUBLIC_KEY)
    try:
        report, cosigned = verify_tiles(folder, verifier, witnesses_in(cosigners), kept)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {folder}: {reason_of(error)}")
    report.cosigned = [one.witness for one in cosigned]
    return report


def witnesses_in(paths: list[Path]) -> list[Witness]:
    """Read keys of witnesses from files, one a file; what is none ends the command."""
    from appliance.common.audit.checkpoint import CheckpointError
    from appliance.common.audit.cosignature import parse_witness

    found = []
    for path in paths:
        try:
            found.append(parse_witness(_text(path)))
        except CheckpointError as error:
            fail(exits.REFUSED, f"{path}: {error}")
    return found


def _cosigned(names: list[str]) -> str:
    return f", cosigned by {', '.join(names)}" if names else ""


def _text(path: Path) -> str:
    from appliance.common.audit.proof_file import MAX_PROOF_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_PROOF_BYTES + 1).decode("utf-8", "replace")
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {path}: {reason_of(error)}")
