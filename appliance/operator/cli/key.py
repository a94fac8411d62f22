"""``athanor key create``: a fresh API key for a tenant. The plain key is shown once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from appliance.common.errors import ConfigError, reason_of
from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

EXAMPLES = """
athanor key create alpha | in the demo's state directory
athanor key create alpha --id alpha-ci | with a name of its own
athanor key create acme --credentials /etc/athanor/credentials.json | of a service
"""

DEFAULT_CREDENTIALS = Path(".athanor/credentials.json")
"""The demo's own."""

ID_SUFFIX_BYTES = 2
"""Random bytes that tell two keys of one tenant apart."""

TENANT_CHARACTERS = 58
"""Most characters of the tenant's name in the id of its key; an id has at most 63."""


@dataclass(frozen=True, slots=True)
class Created:
    """A key that now is in the table."""

    tenant: str
    id: str
    key: str

    @property
    def credential(self) -> str:
        """How the policy names it."""
        return f"key:{self.id}"


def create(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it will be.")],
    credentials: Annotated[
        Path, typer.Option(metavar="FILE", help="The key table; made when there is none.")
    ] = DEFAULT_CREDENTIALS,
    pepper: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret beside it [pepper, in the same folder].")
    ] = None,
    key_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Name of the key [the tenant's and 4 digits].")
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Create an API key and print it once.

    The key works when the tenant's entry in the policy names it and the policy is reloaded.
    """
    from policy.schema import TENANT_ID

    if not re.fullmatch(TENANT_ID, tenant):
        hint = "lower-case letters, digits and dashes, 63 at most, as in the policy"
        fail(exits.REFUSED, f"{tenant!r} is no tenant id", hint)
    chosen = key_id or f"{tenant[:TENANT_CHARACTERS]}-{secrets.token_hex(ID_SUFFIX_BYTES)}"
    beside = pepper or credentials.with_name("pepper")
    try:
        created = create_key(tenant, chosen, credentials, beside)
    except OSError as error:
        fail(exits.REFUSED, f"cannot write {error.filename or credentials}: {reason_of(error)}")
    if not print_data({**asdict(created), "credential": created.credential}, output_format):
        _show(created)


def create_key(tenant: str, key_id: str, credentials: Path, pepper: Path) -> Created:
    """Add a key to the table, which is replaced in one step; owner and group of the file stay.

    Raises:
        ConfigError: the id is taken or unusable, or a file is malformed or open to others.
        OSError: a file cannot be read or written.
    """
    from datetime import UTC, datetime

    from appliance.common.credentials import new_pepper, read_key_table
    from appliance.common.keys import KeyRecord, issue, serialise_records

    if not credentials.parent.is_dir():
        raise ConfigError(f"there is no folder {credentials.parent}; run `athanor demo` first, or make it")
    with _alone(credentials.parent):
        if credentials.exists():
            table = read_key_table(credentials, pepper)
            records, secret = dict(table.records), table.pepper
        elif pepper.exists():
            raise ConfigError(f"there is a pepper at {pepper} but no key table at {credentials}")
        else:
            records, secret = {}, new_pepper()
            _replace(pepper, secret, group_reads=False)
        if key_id in records:
            raise ConfigError(f"there is a key {key_id} already; choose another --id")
        plain, digest = issue(key_id, secret)
        records[key_id] = KeyRecord(digest, datetime.now(UTC))
        _replace(credentials, serialise_records(records).encode(), group_reads=True)
    return Created(tenant, key_id, plain)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two commands at once do not lose each other's key."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes, *, group_reads: bool) -> None:
    """Write a private file that belongs to whom the old one, or else the folder, belongs to: the
    operator may be root, the service that reads it is not. With ``group_reads`` a group that may
    read the folder may read the file, as the units' gateway does."""
    from isolation.host.atomic_file import write_whole

    old = path if path.exists() else path.parent
    owner = old.stat()
    write_whole(path, data)
    if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(path, owner.st_uid, owner.st_gid)
    if group_reads and owner.st_mode & stat.S_IRGRP:
        path.chmod(0o640)


def _show(created: Created) -> None:
    from rich.text import Text

    console = output()
    title = Text.assemble(("key ", "dim"), (created.id, "bold"), (" for tenant ", "dim"))
    title.append(created.tenant, "bold")
    console.print(title)
    console.print(Text(f"\n  {created.key}\n", "cyan"), soft_wrap=True)
    console.print(Text("It is shown this once. Name it in the policy, then `athanor reload`:", "dim"))
    console.print(Text(f'\n  {created.tenant}:\n    credentials: ["{created.credential}"]\n    models: ["*"]\n'))
