"""policy.digest: the digest is of one JSON text, whatever is remembered while it is written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from hypothesis import given

from policy.loader import Source, load_policy
from policy.model import PolicySet, Tenant
from tests.policy.drawn_policies import documents, loaded

UNORDERED = ("credentials", "models", "networks", "regions", "hours", "adapters")

PINNED = "1ca1fe3f04740bf07d5ca515e96f9337f394fa847aac123ebd6fedfc67d68d62"
"""Digest of ``TEXT``: audit logs and signed histories of earlier releases have it."""

TEXT = """\
version: 1
tenants:
  alpha: {credentials: ["key:a", "key:b"], models: ["m", "*-large"], limits: {concurrency: 3}}
  beta: {credentials: ["key:c"], models: ["*"], class: strict, kv: {reservation: 20%}}
"""


def _values(tenant: Tenant) -> dict[str, Any]:
    values = asdict(tenant) | {name: sorted(getattr(tenant, name)) for name in UNORDERED}
    values["model_regions"] = sorted([one.models, one.regions] for one in tenant.model_regions)
    values["content"]["denied_fields"] = sorted({*tenant.content.denied_fields})
    return values


def _plainly(policy: PolicySet) -> str:
    """Hash the whole text at once."""
    groups = {name: asdict(group) | {"tenants": sorted(group.tenants)} for name, group in policy.groups.items()}
    whole = [
        "athanor policy 11",
        {name: _values(tenant) for name, tenant in policy.tenants.items()},
        groups,
        {name: asdict(prefix) for name, prefix in policy.public.items()},
        [policy.currency, [asdict(rule) for rule in policy.prices]],
        {name: asdict(route) for name, route in policy.routes.items()},
    ]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@given(documents)
def test_the_digest_is_the_hash_of_one_text(document: dict[str, Any]) -> None:
    """Values that tenants share are written once, and the digest is that of the text written at once."""
    policy = loaded(document)
    assert policy.digest == _plainly(policy)


def test_the_digest_of_a_policy_stays() -> None:
    """A digest of today is in audit logs: an unchanged policy keeps it. The control: another number has another."""
    assert load_policy([Source("p", TEXT)]).digest == PINNED
    assert load_policy([Source("p", TEXT.replace("3", "4"))]).digest != PINNED
