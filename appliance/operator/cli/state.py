"""``athanor state show | restore``: which form this machine's state has, and the way back before a downgrade."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from appliance.common.errors import os_errors_as
from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

SHOW_EXAMPLES = """
athanor state show | before an upgrade, or a downgrade
"""

RESTORE_EXAMPLES = """
athanor state restore | then install the older package
"""

ROOT = Path("/")

Prefix = Annotated[Path, typer.Option("--prefix", metavar="DIR", help="Another root than /.")]


def show(prefix: Prefix = ROOT, output_format: Output = Format.TABLE) -> None:
    """Show the form of the state, the one that this version knows, and which backups there are."""
    from appliance.common import backup, schema

    found = schema.read_schema(prefix / schema.STATE)
    with os_errors_as(f"cannot read {prefix / backup.BACKUPS}"):
        backups = [backup.find(prefix, number) for number in backup.numbers(prefix)]
    number = found.number if found is not None else None
    writer = found.written_by if found is not None else None
    document = {"form": number, "written_by": writer, "known": schema.known(), "backups": list(map(asdict, backups))}
    if print_data(document, output_format):
        return
    console = output()
    if found is None:
        console.print("nothing says which form the state has: athanor install --systemd will")
    else:
        writer = backup.version_words(found.written_by)
        console.print(f"the state has the form {found.number}, written by {writer}", soft_wrap=True)
    console.print(f"this version knows {schema.known()}")
    console.print(f"backups in {prefix / backup.BACKUPS}:" if backups else "there are no backups", soft_wrap=True)
    for one in backups:
        console.print(f"  {one.name}   {one.about}", soft_wrap=True)


def restore(
    number: Annotated[
        int | None, typer.Option("--form", metavar="N", help="Form of the backup [the newest older form].")
    ] = None,
    prefix: Prefix = ROOT,
) -> None:
    """Put the configuration, policy and keys of before an upgrade in place, for the older version.

    What is there now is backed up first. API keys that were made since the upgrade are void then,
    and those withdrawn since are valid again. The audit log and tenants' sealed keys are left alone.
    """
    from appliance.common import schema

    if prefix == ROOT and os.geteuid() != 0:
        fail(exits.REFUSED, "this needs root", "sudo athanor state restore")
    done = schema.restore(prefix, number)
    console = output()
    if done.kept is not None:
        console.print(f"what was there is kept as {done.kept.name}", soft_wrap=True)
    console.print(f"in place again is {done.put.name}: {done.put.about}", soft_wrap=True)
    version = f"athanor {done.put.state_of}" if done.put.state_of else "the version that it is of"
    console.print(f"install {version} before the next start", soft_wrap=True)
