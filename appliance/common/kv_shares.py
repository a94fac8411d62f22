"""KV shares: from the policy's percentages to what an engine is told, and from its reports back to names.

An account of blocks is a tenant's, a sharing group's or a public prefix's. Its namespace key comes from the supervisor
under its *account name*: the tenant's id, ``group/ID`` or ``public/ID/DIGEST``, which no tenant's id can be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from isolation.ipc.kv import KvQuota, KvQuotas, KvUsage, KvUse
from policy.model import KvShare, PolicySet, PublicPrefix
from policy.routes import reachable


def group_account(group: str) -> str:
    """Account name of a sharing group."""
    return f"group/{group}"


def public_account(prefix: PublicPrefix) -> str:
    """Account name of a public prefix: another text, or another model, has another, and so another key."""
    said = json.dumps([prefix.model, prefix.chat, prefix.source]).encode()
    return f"public/{prefix.id}/{hashlib.blake2b(said, digest_size=16).hexdigest()}"


def shown(account: str) -> str:
    """An account's name for people: of a public prefix without the digest of what it says."""
    return account.rpartition("/")[0] if account.startswith("public/") else account


def account_names(policy: PolicySet) -> list[str]:
    """The accounts of a policy: every tenant's, every sharing group's, and every public prefix's."""
    return [*policy.tenants, *map(group_account, policy.groups), *map(public_account, policy.public.values())]


def quotas_of(policy: PolicySet, keys: Mapping[str, bytes], model: str) -> KvQuotas:
    """What the engine of a model has to know: the shares of those who may use it, where they say anything. Accounts
    whose keys are not there yet are left out."""
    routes = {alias: route for alias, route in policy.routes.items() if alias == model or model in route.models}

    def may_use(name: str) -> bool:
        tenant = policy.tenants[name]
        return bool(reachable(routes, tenant.models, tenant.adapters, (model,)))

    shares: list[tuple[str, KvShare]] = [
        (tenant.id, tenant.kv) for tenant in policy.tenants.values() if tenant.kv.bounded and may_use(tenant.id)
    ]
    for group in policy.groups.values():
        if group.kv.bounded and any(map(may_use, group.tenants)):
            shares.append((group_account(group.id), group.kv))
    return KvQuotas(
        tuple(KvQuota(keys[name], share.reservation, share.cap, share.borrow) for name, share in shares if name in keys)
    )


@dataclass(frozen=True, slots=True)
class AccountUse:
    """What an account has in one engine, for the operator; the engine's own words."""

    account: str
    use: KvUse


def named(usage: KvUsage, keys: Mapping[str, bytes]) -> list[AccountUse]:
    """An engine's report by account names; accounts without a known key are left out."""
    names = {key: name for name, key in keys.items()}
    return [AccountUse(shown(names[use.namespace]), use) for use in usage.uses if use.namespace in names]
