"""``athanor key list``: API keys with their state, scopes, expiry and last use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import ConfigError
from appliance.operator.cli import exits
from appliance.operator.cli.key import DEFAULT_CREDENTIALS, Credentials
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.common.keys import KeyRecord

EXAMPLES = """
athanor key list | in the demo's state directory
athanor key list --credentials /etc/athanor/credentials.json --uses /var/lib/athanor-supervisor/audit | of a service
athanor key list --tenant alpha -o json | for scripts
"""

DEMO_USES = "audit"
"""Folder of the demo's audit log, beside its key table."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One secret of a key. Times are ISO 8601."""

    id: str
    tenant: str
    state: str
    """``active``, ``old`` (of a key that was rotated, until it expires), ``expired`` or ``revoked``."""
    scopes: list[str] | None
    created: str
    expires: str | None
    last_used: str | None
    """None: never, as far as is known."""


def list_keys(
    credentials: Credentials = DEFAULT_CREDENTIALS,
    uses: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the audit log, which has the last uses [audit, beside the table]."),
    ] = None,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Show the keys that were made for it alone.")] = "",
    output_format: Output = Format.TABLE,
) -> None:
    """Show API keys: tenant, state, scopes, end and last use.

    The last use is known to some seconds, where an audit log is kept. A key that is being rotated
    has two lines.
    """
    from appliance.common.credentials import read_key_records
    from appliance.common.key_uses import read_uses

    try:
        records, used = read_key_records(credentials), read_uses(uses or credentials.with_name(DEMO_USES))
    except ConfigError as error:
        fail(exits.REFUSED, error.message)
    now = datetime.now(UTC)
    rows = [row for key_id in sorted(records) for row in rows_of(key_id, records[key_id], used, now)]
    chosen = [row for row in rows if row.tenant == tenant] if tenant else rows
    if not print_data({"keys": [asdict(row) for row in chosen]}, output_format):
        output().print(keys_view(chosen) if chosen else "there is no key: athanor key create TENANT")


def rows_of(key_id: str, record: KeyRecord, used: Mapping[str, int], now: datetime) -> Iterator[KeyRow]:
    """Yield a line for each secret of a key; ``used`` are last uses by secret."""
    from appliance.common.keys import secret_name

    scopes = None if record.scopes is None else sorted(scope.value for scope in record.scopes)

    def row(state: str, created: datetime, expires: datetime | None) -> KeyRow:
        at = used.get(secret_name(key_id, created))
        last = None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
        end = None if expires is None else expires.isoformat()
        return KeyRow(key_id, record.tenant, state, scopes, created.isoformat(), end, last)

    state = "revoked" if record.revoked else "active" if record.holds(now) else "expired"
    yield row(state, record.created, record.expires)
    if record.previous is not None and not record.revoked:
        old = "old" if now < record.previous.expires else "expired"
        yield row(old, record.previous.created, record.previous.expires)


def keys_view(rows: list[KeyRow]) -> RenderableType:
    """Return the table of keys."""
    from rich.text import Text

    from appliance.operator.cli.tables import table

    colours = {"active": "green", "old": "yellow", "expired": "dim", "revoked": "red"}
    shown = table("KEY", "TENANT", "STATE", "SCOPES", "EXPIRES", "LAST USED")
    for one in rows:
        scopes = "all" if one.scopes is None else ", ".join(one.scopes) or "none"
        shown.add_row(
            Text(one.id, "bold"),
            one.tenant or "-",
            Text(one.state, colours[one.state]),
            scopes,
            _minute(one.expires),
            _minute(one.last_used),
        )
    return shown


def _minute(time: str | None) -> str:
    return "-" if time is None else datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%M")
