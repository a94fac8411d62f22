"""``athanor tenant add``: a new tenant in the policy, with its first API key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from appliance.common.errors import reason_of
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config
from appliance.operator.cli.policy_versions import put_policy
from appliance.operator.cli.tenant import Yes, confirm
from appliance.operator.cli.tenant_change import Draft, Present, Sign, changed, present, tell_and_sign, write_draft
from appliance.operator.cli.terminal import fail, output
from policy.model import IsolationClass

if TYPE_CHECKING:
    from appliance.operator.key_table import Created, WantedKey
    from policy.editing import Value
    from policy.loader import Source

EXAMPLES = """
athanor tenant add acme --models athanor-mini --key | with an API key, which is printed once
athanor tenant add acme --group staff --credential spiffe://example.org/tenant/acme | its models are the group's
athanor tenant add acme --models "qwen3-*,mini" --class strict --reservation 20% --key | kept apart
"""

NEW_TENANTS = "tenants.yaml"
"""File that new tenants are written to where the policy is a folder."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is written of the tenant."""

    name: str
    isolation_class: IsolationClass | None
    reservation: str
    group: str
    models: tuple[str, ...]
    credentials: tuple[str, ...]

    def fields(self) -> dict[str, Value]:
        """Return its keys, in the order of the reference's examples."""
        written: dict[str, Value] = {"credentials": self.credentials}
        if self.group:
            written["inherits"] = self.group
        if self.models:
            written["models"] = self.models
        if self.isolation_class is not None:
            written["class"] = self.isolation_class.value
        if self.reservation:
            written["kv"] = {"reservation": self.reservation}
        return written


def add(  # noqa: PLR0913 - a parameter is an option
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the new tenant.")],
    models: Annotated[
        str,
        typer.Option("--models", metavar="NAMES", help="Models that it may use, with commas; * for any characters."),
    ] = "",
    group: Annotated[str, typer.Option("--group", metavar="NAME", help="Tenant group that it inherits from.")] = "",
    isolation_class: Annotated[
        IsolationClass | None, typer.Option("--class", help="How far apart it is kept [its group's, or shared].")
    ] = None,
    reservation: Annotated[
        str, typer.Option("--reservation", metavar="PERCENT", help="Its part of the KV pool, which class strict needs.")
    ] = "",
    credential: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Credential that is its own: key:ID, oidc:ISSUER:VALUE or a SPIFFE URI; may be repeated.",
        ),
    ] = None,
    key: Annotated[bool, typer.Option("--key", help="Make an API key for it, and print it once.")] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="End of that key: 90d, 2027-01-31 [none].")
    ] = None,
    sign: Sign = None,
    draft: Draft = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    yes: Yes = False,
) -> None:
    """Add a tenant to the policy, and put the policy in force.

    Writes the tenant behind the others of the policy's file (of tenants.yaml where the policy is a
    folder); every other character of it stays. The whole policy is checked, the change told, and
    after your yes it goes on as policy apply does. If it is refused, neither policy nor key is there.
    """
    found = present(config)
    _check_name(found, name, group)
    wanted = _wanted(found, name, key=key, expires=expires)
    named = (*(credential or ()), *((f"key:{wanted.id}",) if wanted is not None else ()))
    chosen = tuple(one.strip() for one in models.split(",") if one.strip())
    if not named:
        fail(exits.USAGE, f"{name} has no credential", "--key makes an API key for it, --credential names one")
    if not chosen and not group:
        fail(exits.USAGE, f"{name} has no models", "--models names them; a tenant group of --group may have them")
    target = changed(found, [_written(found, _Entry(name, isolation_class, reservation, group, chosen, named))])
    target = tell_and_sign(found, target, sign, draft)
    confirm(f"add {name}", yes=yes)
    made = _make_key(found, wanted) if wanted is not None else None
    try:
        if draft is None:
            put_policy(found.config, target, admin)
        else:
            write_draft(found, target, draft)
    except BaseException:
        if made is not None:
            _drop_key(found, made.id)
        raise
    if made is not None:
        _print_key(made)


def _check_name(found: Present, name: str, group: str) -> None:
    from policy.schema import TENANT_ID

    if not re.fullmatch(TENANT_ID, name):
        fail(exits.REFUSED, f"{name!r} is no tenant id", "lower-case letters, digits and dashes, 63 at most")
    if name in found.policy.tenants:
        fail(exits.REFUSED, f"there is a tenant {name} already", f"athanor tenant show {name}")
    if group:
        from policy.origins import written_files

        groups = sorted(one for file in written_files(found.sources) for one in file.content.tenant_groups)
        if group not in groups:
            fail(exits.REFUSED, f"there is no tenant group {group!r}", f"groups: {', '.join(groups) or 'none'}")


def _wanted(found: Present, name: str, *, key: bool, expires: str | None) -> WantedKey | None:
    """Return the key that shall be made; None where none shall."""
    from appliance.common.credentials import read_key_records
    from appliance.operator.key_import import read_end
    from appliance.operator.key_table import WantedKey, free_id

    if not key:
        if expires is not None:
            fail(exits.USAGE, "--expires is the end of the key that --key makes")
        return None
    try:
        end = read_end(expires, datetime.now(UTC)) if expires is not None else None
    except ValueError as error:
        fail(exits.REFUSED, str(error))
    table = found.config.credentials
    taken = read_key_records(table) if table.exists() else {}
    return WantedKey(tenant=name, id=free_id(name, taken), expires=end)


def _written(found: Present, entry: _Entry) -> Source:
    """Return the file that the tenant comes to, with it."""
    from appliance.operator.cli.policy_sources import refuse
    from appliance.operator.cli.terminal import Format
    from policy.editing import NEW_FILE, with_tenant
    from policy.errors import PolicyError
    from policy.loader import Source

    path = found.config.policy
    target = str(path / NEW_TENANTS if path.is_dir() else path)
    beside = found.sources[0].files if path.is_dir() and found.sources else {}
    source = next((one for one in found.sources if one.name == target), Source(target, NEW_FILE, beside))
    try:
        return with_tenant(source, entry.name, entry.fields())
    except PolicyError as error:
        refuse(error, [source], Format.TABLE)


def _make_key(found: Present, wanted: WantedKey) -> Created:
    from appliance.operator.key_table import changing

    try:
        with changing(found.key_files, make=True) as table:
            return table.add(wanted, datetime.now(UTC))
    except OSError as error:
        _unwritable(error, found.config.credentials)


def _drop_key(found: Present, key_id: str) -> None:
    from appliance.operator.key_table import changing

    with changing(found.key_files) as table:
        table.drop(key_id)


def _unwritable(error: OSError, credentials: Path) -> NoReturn:
    fail(exits.REFUSED, f"cannot write {error.filename or credentials}: {reason_of(error)}")


def _print_key(made: Created) -> None:
    from rich.text import Text

    console = output()
    console.print(Text.assemble(("key ", "dim"), (made.id, "bold"), (" for tenant ", "dim"), (made.tenant, "bold")))
    console.print(Text(f"\n  {made.key}\n", "cyan"), soft_wrap=True)
    console.print(Text("It is shown this once.", "dim"))
