"""``athanor key create | import | rotate | revoke``: API keys of tenants. A plain key is shown once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from appliance.common.errors import ConfigError, reason_of
from appliance.operator.cli import exits
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.scopes import Scope
    from appliance.operator.key_table import Created

EXAMPLES = """
athanor key create alpha | in the demo's state directory
athanor key create alpha --id alpha-ci --expires 90d --scope embeddings | limited in time and use
athanor key create acme --credentials /etc/athanor/credentials.json | of a service
"""

IMPORT_EXAMPLES = """
athanor key import new-keys.jsonl -o json | make many keys at once, and print them
athanor key import moved.jsonl | keys that were made elsewhere: lines with "id" and "key"
"""

ROTATE_EXAMPLES = """
athanor key rotate alpha-ci | a second secret; the old one holds for another 7 days
athanor key rotate alpha-ci --overlap 12h --expires 90d | for 12 hours, and the new one for 90 days
"""

REVOKE_EXAMPLES = """
athanor key revoke alpha-ci | at once, running answers included
athanor key revoke --tenant alpha | every key that was made for a tenant
"""

DEFAULT_CREDENTIALS = Path(".athanor/credentials.json")
"""The demo's own."""

DEFAULT_OVERLAP = "7d"

Credentials = Annotated[Path, typer.Option(metavar="FILE", help="The key table.")]
Pepper = Annotated[Path | None, typer.Option(metavar="FILE", help="The secret beside it [pepper, in the same folder].")]
Expires = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Its end: 90d, 2027-01-31 or 2027-01-31T12:00Z [none].")
]


def create(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it will be.")],
    credentials: Annotated[
        Path, typer.Option(metavar="FILE", help="The key table; made when there is none.")
    ] = DEFAULT_CREDENTIALS,
    pepper: Pepper = None,
    key_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Name of the key [the tenant's and 4 digits].")
    ] = None,
    expires: Expires = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            help="Limit it to generate, embeddings, rerank, tokenize, attestation, responses or models; may be "
            "repeated [what its tenant may do].",
        ),
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Create an API key and print it once.

    The key works when the tenant's entry in the policy names it. A running appliance takes it within
    a second; a changed policy needs `athanor reload`.
    """
    from appliance.common.scopes import read_scopes
    from appliance.operator.key_import import read_end
    from policy.schema import TENANT_ID

    if not re.fullmatch(TENANT_ID, tenant):
        hint = "lower-case letters, digits and dashes, 63 at most, as in the policy"
        fail(exits.REFUSED, f"{tenant!r} is no tenant id", hint)
    try:
        end = read_end(expires, datetime.now(UTC)) if expires is not None else None
        scopes = read_scopes(scope) if scope else None
    except ValueError as error:
        fail(exits.REFUSED, str(error))
    beside = pepper or credentials.with_name("pepper")
    try:
        created = create_key(tenant, key_id or "", credentials, beside, expires=end, scopes=scopes)
    except OSError as error:
        _unwritable(error, credentials)
    if not print_data({**asdict(created), "credential": created.credential}, output_format):
        _show(created)


def create_key(
    tenant: str,
    key_id: str,
    credentials: Path,
    pepper: Path,
    *,
    expires: datetime | None = None,
    scopes: frozenset[Scope] | None = None,
) -> Created:
    """Add a key to the table, which is replaced in one step; owner and group of the file stay.

    Raises:
        ConfigError: the id is taken or unusable, or a file is malformed or open to others.
        OSError: a file cannot be read or written.
    """
    from appliance.operator.key_table import KeyFiles, WantedKey, changing

    with changing(KeyFiles(credentials, pepper), make=True) as table:
        return table.add(WantedKey(tenant=tenant, id=key_id, expires=expires, scopes=scopes), datetime.now(UTC))


def import_keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON Lines: tenant, and id, expires, scopes, key.")],
    credentials: Credentials = DEFAULT_CREDENTIALS,
    pepper: Pepper = None,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Add many keys in one step: fresh ones, printed once, and whole keys that were made elsewhere.

    Each line is an object with "tenant", and "id", "expires", "scopes" and "key" where they are
    wanted. A line that cannot be used refuses all, by its number.
    """
    from appliance.operator.cli.key_in_force import wait_for
    from appliance.operator.key_import import read_list
    from appliance.operator.key_table import KeyFiles, changing

    now = datetime.now(UTC)
    try:
        wanted = read_list(file.read_text("utf-8", "replace"), now)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {file}: {reason_of(error)}")
    except ConfigError as error:
        fail(exits.REFUSED, f"{file}: {error.message}")
    try:
        with changing(KeyFiles(credentials, pepper or credentials.with_name("pepper")), make=True) as table:
            created = [table.add(one, now) for one in wanted]
    except OSError as error:
        _unwritable(error, credentials)
    rows = [{**asdict(one), "credential": one.credential} for one in created]
    if print_data({"keys": rows}, output_format):
        return
    from appliance.common.figures import counted

    for one in created:
        if one.key:
            output().print(f"{one.tenant} {one.key}", soft_wrap=True)
    output().print(f"{counted(len(created), 'key')} in {credentials}", soft_wrap=True)
    wait_for(admin, credentials, table.digest)


def rotate(  # noqa: PLR0913 - a parameter is an option
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its name, as in the policy behind key:.")],
    credentials: Credentials = DEFAULT_CREDENTIALS,
    pepper: Pepper = None,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="How long the old secret still holds: 12h, 7d, 4w.")
    ] = DEFAULT_OVERLAP,
    expires: Expires = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="End at once the secret that an earlier rotation left.")
    ] = False,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Give a key a new secret and print it once; the old one holds for a while beside it.

    The key's id stays, so the policy does not change. `athanor key list` shows when either secret
    was last used.
    """
    from appliance.operator.cli.key_in_force import wait_for
    from appliance.operator.key_import import read_end, read_lasting
    from appliance.operator.key_table import KeyFiles, changing

    now = datetime.now(UTC)
    try:
        lasting = read_lasting(overlap) if overlap != "0" else timedelta()
        end = read_end(expires, now) if expires is not None else None
    except ValueError as error:
        fail(exits.REFUSED, str(error))
    try:
        with changing(KeyFiles(credentials, pepper or credentials.with_name("pepper"))) as table:
            created = table.rotate(key_id, now, lasting, end, replace=replace)
    except OSError as error:
        _unwritable(error, credentials)
    previous = table.records[key_id].previous
    until = previous.expires.isoformat() if previous is not None else None
    if print_data({**asdict(created), "credential": created.credential, "old_until": until}, output_format):
        return
    _print_key(created)
    last = "The old secret holds no longer." if previous is None else f"The old secret holds until {until}."
    output().print(f"It is shown this once. {last}", soft_wrap=True)
    wait_for(admin, credentials, table.digest)


def revoke(
    key_ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Names of keys.")] = None,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Revoke every key that was made for this tenant.")] = "",
    credentials: Credentials = DEFAULT_CREDENTIALS,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Revoke keys: calls with them are refused and running answers end within a second.

    A revoked key stays in the table, so that its id is not given to another one.
    """
    from appliance.common.figures import counted
    from appliance.operator.cli.key_in_force import wait_for
    from appliance.operator.key_table import revoking

    if not key_ids and not tenant:
        fail(exits.USAGE, "no key is named", "athanor key revoke ID..., or --tenant TENANT")
    try:
        with revoking(credentials) as table:
            revoked = table.revoke(key_ids or (), tenant)
    except OSError as error:
        _unwritable(error, credentials)
    if tenant and not any(record.tenant == tenant for record in table.records.values()):
        fail(
            exits.REFUSED,
            f"no key in {credentials} was made for the tenant {tenant}",
            "keys of older tables name no tenant: name their ids, which the policy lists",
        )
    if print_data({"revoked": revoked}, output_format):
        return
    output().print(f"revoked {counted(len(revoked), 'key')}: {_some(revoked)}", soft_wrap=True)
    wait_for(admin, credentials, table.digest)


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def _unwritable(error: OSError, credentials: Path) -> NoReturn:
    fail(exits.REFUSED, f"cannot write {error.filename or credentials}: {reason_of(error)}")


def _print_key(created: Created) -> None:
    from rich.text import Text

    console = output()
    title = Text.assemble(("key ", "dim"), (created.id, "bold"))
    if created.tenant:
        title.append(" for tenant ", "dim")
        title.append(created.tenant, "bold")
    console.print(title)
    console.print(Text(f"\n  {created.key}\n", "cyan"), soft_wrap=True)


def _show(created: Created) -> None:
    from rich.text import Text

    _print_key(created)
    console = output()
    console.print(Text("It is shown this once. Name it in the policy, then `athanor reload`:", "dim"))
    console.print(Text(f'\n  {created.tenant}:\n    credentials: ["{created.credential}"]\n    models: ["*"]\n'))
