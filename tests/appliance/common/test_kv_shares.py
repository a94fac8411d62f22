"""From the policy's shares to what each engine is told, in the order in which it hears it."""

from __future__ import annotations

from appliance.common.kv_shares import account_names, named, quotas_of
from appliance.gateway.request.ledger import Ledger
from isolation.ipc.kv import KvQuota, KvUsage, KvUse
from policy.loader import Source, load_policy

TEXT = """
version: 1
tenants:
  a: {credentials: ["key:a"], models: ["m"], kv: {reservation: 20%, cap: 50%}}
  b: {credentials: ["key:b"], models: ["m", "n"], kv: {reservation: 12.5%, borrow: false}}
  c: {credentials: ["key:c"], models: ["n"]}
  d: {credentials: ["key:d"], models: ["n"]}
  e: {credentials: ["key:e"], models: ["*"]}
sharing_groups:
  two: {tenants: [c, d], kv: {reservation: 10%}}
"""
POLICY = load_policy([Source("p.yaml", TEXT)])
KEYS = {name: bytes([number]) * 32 for number, name in enumerate(account_names(POLICY), 1)}


def test_each_engine_hears_of_those_who_may_use_its_model() -> None:
    """Parts of the pool by key; who has no share is not in the table, a partition does not lend."""
    a, b, two = (KEYS[name] for name in ("a", "b", "group/two"))
    assert quotas_of(POLICY, KEYS, "m").quotas == (KvQuota(a, 2_000, 5_000), KvQuota(b, 1_250, 1_250, False))
    assert quotas_of(POLICY, KEYS, "n").quotas == (KvQuota(b, 1_250, 1_250, False), KvQuota(two, 1_000, 10_000))
    assert quotas_of(POLICY, {}, "n").quotas == ()


def test_an_engine_hears_of_those_who_come_by_an_alias() -> None:
    """A tenant that a route leads to a model has its share there, and in no model that it does not lead to; a model
    whose name a route has is reached by nobody."""
    text = TEXT.replace('["key:a"], models: ["m"]', '["key:a"], models: ["fast"]')
    routes = "routes:\n  fast: {to: [{model: x}], fallback: [y]}\n  m: {to: [{model: y}]}\n"
    policy = load_policy([Source("p.yaml", text + routes)])
    a, b = KvQuota(KEYS["a"], 2_000, 5_000), KvQuota(KEYS["b"], 1_250, 1_250, False)
    assert {name: quotas_of(policy, KEYS, name).quotas for name in "xym"} == {"x": (a,), "y": (a, b), "m": ()}


def test_an_engine_hears_of_those_who_have_an_adapter_alone() -> None:
    """By the adapter's name and by a route that leads to it; control: a tenant whose adapter is another model's."""
    text = TEXT.replace('["key:a"], models: ["m"]', '["key:a"], models: ["x"], adapters: ["m:fit"]')
    text = text.replace('["key:b"], models: ["m", "n"]', '["key:b"], models: ["help"], adapters: ["n:fit"]')
    policy = load_policy([Source("p.yaml", text + "routes:\n  help: {to: [{model: n:fit}]}\n")])
    a, b = KvQuota(KEYS["a"], 2_000, 5_000), KvQuota(KEYS["b"], 1_250, 1_250, False)
    assert quotas_of(policy, KEYS, "m").quotas == (a,)
    assert quotas_of(policy, KEYS, "n").quotas == (b, KvQuota(KEYS["group/two"], 1_000, 10_000))


def test_a_member_runs_under_its_own_key_for_service_and_the_groups_for_blocks() -> None:
    """The ledger gives both; a tenant outside has no group."""
    ledger = Ledger(POLICY, KEYS)
    member, other = ledger.admit("c", "n", 1), ledger.admit("a", "m", 1)
    assert (member.namespace, member.group) == (KEYS["c"], KEYS["group/two"])
    assert (other.namespace, other.group) == (KEYS["a"], b"")


def test_a_report_of_an_account_that_is_gone_is_left_out() -> None:
    """Names come from the keys of today; what has no name is nobody's business."""
    uses = tuple(KvUse(key, 1, 1, 0, 9, 0, 0, 0) for key in (KEYS["a"], b"x" * 32))
    assert [view.account for view in named(KvUsage(uses), KEYS)] == ["a"]
