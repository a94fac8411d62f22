"""``athanor state show | restore``: which form this machine's state has, and the way back before a downgrade."""

from __future__ import annotations

import os
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
        backups = list(backup.numbers(prefix))
    number = found.number if found is not None else None
    writer = found.written_by if found is not None else None
    document = {"form": number, "written_by": writer, "known": schema.known(), "backups": backups}
    if print_data(document, output_format):
        return
    console = output()
    if found is None:
        console.print("nothing says which form the state has: athanor install --systemd will")
    else:
        console.print(f"the state has the form {found.number}, written by athanor {found.written_by}", soft_wrap=True)
    console.print(f"this version knows {schema.known()}")
    console.print(f"backups of the forms: {', '.join(map(str, backups)) or 'none'}")


def restore(
    number: Annotated[
        int | None, typer.Option("--form", metavar="N", help="Which backup [the newest of an older form].")
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
    chosen = schema.restore(prefix, number)
    output().print(f"the state has the form {chosen} again; install the version that it is of", soft_wrap=True)
