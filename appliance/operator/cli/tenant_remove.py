"""``athanor tenant remove``: a tenant leaves the policy, its API keys are revoked, and what is kept of it is named."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import ConfigError, reason_of
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config
from appliance.operator.cli.policy_versions import put_policy
from appliance.operator.cli.tenant import Yes, confirm, shred_key
from appliance.operator.cli.tenant_change import Draft, Present, Sign, changed, present, tell_and_sign, write_draft
from appliance.operator.cli.tenant_list import look, tell_notes
from appliance.operator.cli.tenant_show import check_known, page_of
from appliance.operator.cli.terminal import Format, fail, output, tell

if TYPE_CHECKING:
    from policy.loader import Source

EXAMPLES = """
athanor tenant remove acme | show what ends, ask, revoke its keys, put the policy without it in force
athanor tenant remove acme --shred --yes | and destroy the key under which what is kept of it is sealed
"""


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Id of the tenant.")],
    shred: Annotated[
        bool, typer.Option("--shred", help="Destroy its key too: what is sealed of it is unreadable for good.")
    ] = False,
    sign: Sign = None,
    draft: Draft = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    yes: Yes = False,
) -> None:
    """Remove a tenant from the policy, and revoke its API keys.

    Shows first what ends: running requests, keys, batches, what is kept. The entry leaves its file
    with the comments inside it, and the lists of sharing groups and public prefixes that name it;
    every other character stays. When the policy is in force the keys are revoked. Usage, bills and
    the audit log keep what the tenant did.
    """
    from appliance.operator.cli.tenant_view import ends_view

    found, now = present(config), datetime.now(UTC)
    check_known(found, name)
    if shred and draft is not None:
        fail(
            exits.USAGE, "a draft changes nothing, so there is nothing to shred", f"later: athanor tenant shred {name}"
        )
    _check_lists(found, name)
    known = look(found, admin, now, (name,))
    page = page_of(found, known, name, now)
    output().print(ends_view(page))
    tell_notes(known)
    target = tell_and_sign(found, changed(found, _without(found, name)), sign, draft)
    confirm(f"remove {name}", yes=yes)
    if draft is not None:
        write_draft(found, target, draft)
        return
    put_policy(found.config, target, admin)
    _revoke(found, name)
    if shred and found.config.keys is None:
        output().print("nothing is sealed here, so there is nothing to shred")
    elif shred:
        shred_key(found.config, name)
    elif page.kept is not None and (page.kept.has_key or page.kept.files):
        line = f"what is sealed of it stays on the disk: athanor tenant shred {name} destroys the key of that"
        output().print(line, soft_wrap=True)


def _check_lists(found: Present, name: str) -> None:
    """Refuse where a list of tenants would be left too short to be one."""
    from policy.origins import written_files

    for file in written_files(found.sources):
        for group, content in file.content.sharing_groups.items():
            if name in content.tenants and len(content.tenants) <= SMALLEST_GROUP:
                _left(f"the sharing group {group} would have one tenant")
        for prefix, one in file.content.public_prefixes.items():
            if one.tenants == [name]:
                _left(f"the public prefix {prefix} is for this tenant alone")


SMALLEST_GROUP = 2
"""Tenants that a sharing group has at least."""


def _left(problem: str) -> None:
    fail(exits.REFUSED, f"{problem}, so nothing was changed", "remove it first: athanor policy edit")


def _without(found: Present, name: str) -> list[Source]:
    """Return the files that change."""
    from appliance.operator.cli.policy_sources import refuse
    from policy.editing import without_tenant
    from policy.errors import PolicyError

    try:
        pairs = [(one, without_tenant(one, name)) for one in found.sources]
    except PolicyError as error:
        refuse(error, found.sources, Format.TABLE)
    return [new for old, new in pairs if new.text != old.text]


def _revoke(found: Present, name: str) -> None:
    """Revoke the API keys that the policy named for the tenant, and those that were made for it and no other tenant
    has."""
    from appliance.operator.key_table import revoking
    from appliance.operator.tenants import KEY

    credentials = found.config.credentials
    if not credentials.exists():
        return
    others = {one for id_, tenant in found.policy.tenants.items() if id_ != name for one in tenant.credentials}
    own = {one.removeprefix(KEY) for one in found.policy.tenants[name].credentials if one.startswith(KEY)}
    try:
        with revoking(credentials) as table:
            made = {
                id_ for id_, record in table.records.items() if record.tenant == name and f"{KEY}{id_}" not in others
            }
            revoked = table.revoke(sorted((own | made) & table.records.keys()))
    except (OSError, ConfigError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error.message
        tell(f"the policy is changed, and the keys are not revoked: {why}", f"athanor key revoke --tenant {name}")
        raise typer.Exit(exits.REFUSED) from error
    output().print(
        f"revoked {counted(len(revoked), 'key')}{': ' if revoked else ''}{', '.join(revoked)}", soft_wrap=True
    )
