"""``athanor tenant list``: the tenants of the policy, with what they have and use."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config, Output
from appliance.operator.cli.tenant_change import Present, present
from appliance.operator.cli.terminal import Format, errors, output, print_data

if TYPE_CHECKING:
    from appliance.operator.tenants import Known

EXAMPLES = """
athanor tenant list | every tenant, with its keys, its requests and what it used today
athanor tenant list -o json | for scripts
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRow:
    """One tenant. None: not known."""

    tenant: str
    isolation_class: str
    group: str
    """Tenant group that it inherits from; empty: none."""
    models: list[str]
    credentials: int
    keys: int | None
    """Its API keys that are in force."""
    running: int | None
    """Its requests that run now; None too where the policy in force does not have it."""
    requests_today: int | None
    tokens_today: int | None
    cost_today: str | None
    """In the currency of the policy's prices."""


def list_tenants(config: Config = DEFAULT_CONFIG, admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Show the tenants of the policy.

    Class, tenant group, models, API keys in force, running requests, and what each used today (UTC)
    by the usage book. The policy is the one on the disk; what cannot be read is shown as unknown,
    and why is said on standard error.
    """
    from appliance.operator.cli.tenant_view import tenants_view

    found, now = present(config), datetime.now(UTC)
    known = look(found, admin, now)
    rows = _rows(found, known, now)
    document = {"tenants": [asdict(row) for row in rows], "policy": found.policy.digest}
    if not print_data(document, output_format):
        console = output()
        console.print(tenants_view(rows, console.width))
    tell_notes(known)


def look(found: Present, admin: str, now: datetime, tenants: tuple[str, ...] = ()) -> Known:
    """Return what is known of tenants; of all, where none is named."""
    from appliance.common.status import ApplianceStatus
    from appliance.operator.cli.admin_client import UnreachableError, read, try_ask
    from appliance.operator.tenants import Known, read_keys, read_usage

    known = Known()
    read_keys(known, found.config)
    read_usage(known, found.config, now, tenants)
    try:
        status = read(ApplianceStatus, try_ask(admin, "/status"))
    except UnreachableError as error:
        known.notes.append(f"what runs: {error.args[0]}")
    else:
        known.running = {one.id: one.in_flight for one in status.tenants}
    return known


def tell_notes(known: Known) -> None:
    """Say on standard error what is not known, and why."""
    for note in known.notes:
        errors().print(f"not known: {note}", style="dim", soft_wrap=True, markup=False)


def _rows(found: Present, known: Known, now: datetime) -> list[TenantRow]:
    from appliance.operator.tenants import keys_in_force
    from policy.origins import written_files
    from policy.prices import amount_text

    files = written_files(found.sources)
    groups = {name: tenant.inherits for file in files for name, tenant in file.content.tenants.items()}
    rows = []
    for name, tenant in sorted(found.policy.tenants.items()):
        used = None if known.today is None else known.today.get(name)
        is_known = known.today is not None
        rows.append(
            TenantRow(
                tenant=name,
                isolation_class=tenant.isolation_class.value,
                group=groups[name],
                models=list(tenant.models),
                credentials=len(tenant.credentials),
                keys=None if known.keys is None else keys_in_force(tenant.credentials, known.keys, now),
                running=None if known.running is None else known.running.get(name),
                requests_today=(used.requests if used else 0) if is_known else None,
                tokens_today=(used.tokens if used else 0) if is_known else None,
                cost_today=(amount_text(used.cost) if used else "0") if is_known and found.policy.currency else None,
            )
        )
    return rows
