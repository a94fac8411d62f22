"""``athanor tenant show``: everything that policy, keys and usage say about one tenant."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.key_list import KeyRow, rows_of
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config, Output
from appliance.operator.cli.tenant_change import Present, present
from appliance.operator.cli.tenant_list import look, tell_notes
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.operator.tenants import KeptOfTenant, Known
    from policy.origins import Origin, Setting

EXAMPLES = """
athanor tenant show acme | what it may do and where that is written, its credentials, what it used
athanor tenant show acme -o json | for scripts
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPage:
    """What is shown of one tenant."""

    tenant: str
    group: str
    """Tenant group that it inherits from; empty: none."""
    written: Origin
    """Where its entry is."""
    settings: list[Setting]
    credentials: list[str]
    keys: list[KeyRow] | None
    """Those of its API keys that the table has, a line for each secret; None: not known."""
    sharing_group: str | None
    public_prefixes: list[str]
    running: int | None
    currency: str
    used: dict[str, dict[str, Any] | None]
    """Use of the day and of the month; None: not known."""
    kept: KeptOfTenant | None = None
    digest: str = field(default="")
    """Digest of the policy on the disk."""


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the tenant.")],
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Show everything about one tenant.

    What it may do, each setting with the group or default that it comes from; its credentials and
    when they were last used; what it used today and this month; what is kept of it on the disk.
    """
    from appliance.operator.cli.tenant_view import tenant_view

    found, now = present(config), datetime.now(UTC)
    check_known(found, name)
    known = look(found, admin, now, (name,))
    page = page_of(found, known, name, now)
    if not print_data(asdict(page), output_format):
        output().print(tenant_view(page))
    tell_notes(known)


def check_known(found: Present, name: str) -> None:
    """End the command where the policy does not have a tenant."""
    import difflib

    if name not in found.policy.tenants:
        close = difflib.get_close_matches(name, found.policy.tenants, n=1)
        hint = f"did you mean {close[0]}?" if close else "athanor tenant list"
        fail(exits.REFUSED, f"the policy has no tenant {name!r}", hint)


def keys_of(found: Present, known: Known, name: str, now: datetime) -> list[KeyRow] | None:
    """Return the API keys that the policy names for a tenant, a line for each secret; None where the table cannot be
    read."""
    from appliance.operator.tenants import KEY

    if known.keys is None:
        return None
    ids = (one.removeprefix(KEY) for one in found.policy.tenants[name].credentials if one.startswith(KEY))
    records = known.keys
    return [row for one in ids if one in records for row in rows_of(one, records[one], known.uses, now)]


def page_of(found: Present, known: Known, name: str, now: datetime) -> TenantPage:
    """Return what is shown of a tenant."""
    from appliance.common.errors import ConfigError
    from appliance.operator.tenants import read_kept
    from policy.origins import Origin, settings_of, written_files

    tenant = found.policy.tenants[name]
    file = next(file for file in written_files(found.sources) if name in file.content.tenants)
    kept = None
    try:
        kept = read_kept(found.config, name)
    except ConfigError as error:
        known.notes.append(f"what is kept: {error.message}")
    place = ("tenants", name)
    return TenantPage(
        tenant=name,
        group=file.content.tenants[name].inherits,
        written=Origin(f"tenants.{name}", file.name, *file.locator.key(place), inherited=False),
        settings=settings_of(found.sources, found.policy, name),
        credentials=list(tenant.credentials),
        keys=keys_of(found, known, name, now),
        sharing_group=tenant.group,
        public_prefixes=list(tenant.public),
        running=None if known.running is None else known.running.get(name),
        currency=found.policy.currency,
        used={"today": _used(known, name, month=False), "month": _used(known, name, month=True)},
        kept=kept,
        digest=found.policy.digest,
    )


def _used(known: Known, name: str, *, month: bool) -> dict[str, Any] | None:
    from appliance.common.usage.report import total
    from policy.prices import amount_text

    sums = known.month if month else known.today
    if sums is None:
        return None
    used = sums.get(name, total(()))
    numbers = {"requests": used.requests, "input_tokens": used.input, "cached_tokens": used.cached}
    return {**numbers, "output_tokens": used.output, "cost": amount_text(used.cost)}
