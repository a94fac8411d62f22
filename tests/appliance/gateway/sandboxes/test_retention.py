"""What the supervisor is told of each account: where the policy lets its KV be kept."""

from __future__ import annotations

from appliance.gateway.sandboxes.namespace_keys import retention_of
from policy.loader import Source, load_policy

POLICY = """\
version: 1
tenants:
  plain: {credentials: ["key:a"], models: ["*"]}
  leaves: {credentials: ["key:b"], models: ["*"], kv_export: true}
  shares: {credentials: ["key:c"], models: ["*"], kv_export: true, kv_fleet: true}
  half: {credentials: ["key:d"], models: ["*"], kv_fleet: true}
  shy: {credentials: ["key:e"], models: ["*"], retention: none, kv_export: true, kv_fleet: true}
sharing_groups:
  mixed: {tenants: [shares, leaves]}
"""


def test_the_fleet_uses_what_both_words_allow() -> None:
    """Both words are needed; without retention neither counts; a group has what all its members have."""
    found = retention_of(load_policy([Source("p", POLICY)]))
    assert found == {"plain": 1, "leaves": 2, "shares": 3, "half": 1, "shy": 0, "group/mixed": 2}
