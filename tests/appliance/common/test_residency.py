"""Who is resident, who goes for whom: the rules of sandboxes of single tenants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.residency import (
    IDLE_S,
    TEXT_MEMORY_BYTES,
    Need,
    NoPlaceError,
    Residency,
    ResidentLimits,
    declared,
    need_of,
    total,
)
from policy.loader import Source, load_policy
from policy.model import IsolationClass, PolicySet

BOTH, TEXT = Need(1, 1), Need(0, 1)
POLICY = """
version: 1
tenants:
  s: {credentials: ["key:s"], models: ["m"]}
  t: {credentials: ["key:t"], models: ["m"], class: strict, kv: {reservation: 10%}}
  d: {credentials: ["key:d"], models: ["m-*"], class: dedicated}
"""


def limits(engines: int = 1, texts: int = 3, memory: int = 1 << 50) -> ResidentLimits:
    """Places; an engine has a gibibyte."""
    return ResidentLimits(engines=engines, texts=texts, memory_bytes=memory, engine_bytes=1 << 30)


def test_the_policy_declares_who_has_sandboxes_of_its_own() -> None:
    """By class, for models that it allows, and nobody else."""
    policy = load_policy([Source("p.yaml", POLICY)])
    keys = [("m", "s"), ("m", "t"), ("x", "t"), ("m", "d"), ("m-1", "d"), ("m", "nobody")]
    nothing = Need(0, 0)
    assert [declared(policy, key) for key in keys] == [nothing, TEXT, nothing, nothing, BOTH, nothing]
    assert [need_of(one) for one in IsolationClass] == [nothing, TEXT, BOTH]


def test_sandboxes_are_granted_for_models_that_an_alias_leads_to() -> None:
    """The supervisor boots what a tenant's route leads to, fallback included, and nothing else of it."""
    text = POLICY.replace('models: ["m-*"]', 'models: ["fast"]')
    routes = "routes: {fast: {to: [{model: x}], fallback: [y]}, slow: {to: [{model: z}]}}\n"
    policy = load_policy([Source("p.yaml", text + routes)])
    nothing = Need(0, 0)
    assert [declared(policy, (model, "d")) for model in ("x", "y", "z", "fast")] == [BOTH, BOTH, nothing, nothing]


def test_sandboxes_are_granted_for_a_model_of_which_a_tenant_has_an_adapter_alone() -> None:
    """Of each adapter the model, and no other."""
    policy = load_policy([Source("p.yaml", POLICY.replace('models: ["m-*"]', 'models: ["m-1"], adapters: ["m:x"]'))])
    assert [declared(policy, (model, "d")) for model in ("m", "m-1", "m:x")] == [BOTH, BOTH, Need(0, 0)]


def adapted(*adapters: str) -> PolicySet:
    """The policy, with adapters of both tenants that have sandboxes of their own."""
    text = POLICY.replace("class:", f"adapters: {json.dumps(adapters)}, class:")
    return load_policy([Source("p.yaml", text)])


def test_an_engine_that_lacks_a_new_adapter_goes_when_idle() -> None:
    """A tenant's own engine has the adapters that it began with, so a grant or an end of one ends it, at once or with
    its last request; what comes back before that ends nothing. An adapter of another model ends nothing, nor does one
    a text sandbox alone."""
    residency = Residency(limits(engines=3, texts=4))
    residency.reconsider(adapted("m-1:x"))
    for key, need in ((("m-1", "d"), BOTH), (("m-2", "d"), BOTH), (("m", "t"), TEXT)):
        residency.enter(key, need, 0)
    for key in (("m-2", "d"), ("m", "t")):
        residency.leave(key, 1)
    assert residency.reconsider(adapted("m-1:x", "m:z", "other:x")) == []
    assert residency.reconsider(adapted("m-1:x", "m-1:y")) == residency.reconsider(adapted("m-1:x")) == []
    assert not residency.leave(("m-1", "d"), 2)
    residency.enter(("m-1", "d"), BOTH, 3)
    assert residency.reconsider(adapted("m-1:x", "m-1:y")) == []
    assert residency.leave(("m-1", "d"), 4)
    residency.enter(("m-1", "d"), BOTH, 5)
    residency.leave(("m-1", "d"), 6)
    assert residency.reconsider(adapted("m-1:x", "m-1:y")) == [], "the new one has it"
    assert residency.reconsider(adapted("m-1:y")) == [("m-1", "d")]
    assert residency.keys == (("m-2", "d"), ("m", "t"))


def test_the_one_idle_longest_goes() -> None:
    """Of those that have been idle long enough the longest idle one makes room; a busy one never does."""
    residency = Residency(limits(engines=2, texts=2))
    for now, tenant in enumerate("ab"):
        assert residency.enter(("m", tenant), BOTH, now) == []
        residency.leave(("m", tenant), now)
    residency.enter(("m", "a"), BOTH, 2)
    assert residency.enter(("m", "c"), BOTH, 1 + IDLE_S) == [("m", "b")]
    with pytest.raises(NoPlaceError):
        residency.enter(("m", "d"), BOTH, 1_000)
    assert set(residency.keys) == {("m", "a"), ("m", "c")}


def test_two_tenants_do_not_take_each_others_place_at_once() -> None:
    """Idle sandboxes stay for a while, and who wants their place is told when it may have it."""
    residency = Residency(limits())
    residency.enter(("m", "a"), BOTH, 0)
    residency.leave(("m", "a"), 10)
    with pytest.raises(NoPlaceError) as caught:
        residency.enter(("m", "b"), BOTH, 15)
    assert caught.value.retry_after_s == IDLE_S - 5
    assert residency.enter(("m", "b"), BOTH, 10 + IDLE_S) == [("m", "a")]


def test_a_tenant_of_many_models_leaves_others_their_engine() -> None:
    """Two places and two such tenants: a second model of one takes the place of its own first, and is refused while
    that is busy, although a place is free."""
    residency = Residency(limits(engines=2, texts=9), tenants=2)
    residency.enter(("m", "a"), BOTH, 0)
    with pytest.raises(NoPlaceError):
        residency.enter(("n", "a"), BOTH, 1)
    residency.leave(("m", "a"), 1)
    assert residency.enter(("n", "a"), BOTH, 2) == [("m", "a")]
    assert residency.enter(("m", "b"), BOTH, 3) == []


def test_memory_bounds_them_too() -> None:
    """Each sandbox counts with its limit."""
    residency = Residency(limits(engines=9, texts=9, memory=(1 << 30) + 2 * TEXT_MEMORY_BYTES))
    residency.enter(("m", "a"), BOTH, 0)
    residency.enter(("m", "b"), TEXT, 0)
    with pytest.raises(NoPlaceError):
        residency.enter(("m", "c"), TEXT, 0)
    with pytest.raises(NoPlaceError, match="not set up"):
        Residency(limits(engines=0)).enter(("m", "a"), BOTH, 0)


def test_what_the_policy_grants_no_more_goes_when_idle() -> None:
    """At once where nobody is inside, else with the last request."""
    residency = Residency(limits(engines=2))
    residency.enter(("m-1", "d"), BOTH, 0)
    residency.enter(("m-2", "d"), TEXT, 0)
    residency.leave(("m-2", "d"), 1)
    assert residency.reconsider(load_policy([Source("p.yaml", POLICY)])) == [("m-2", "d")]
    assert residency.reconsider(load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")])) == []
    assert residency.leave(("m-1", "d"), 2)
    assert residency.keys == ()


@given(
    st.lists(st.tuples(st.sampled_from("mn"), st.sampled_from("abcd"), st.sampled_from([BOTH, TEXT]), st.booleans())),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_there_are_never_more_than_there_may_be(
    calls: list[tuple[str, str, Need, bool]], engines: int, texts: int
) -> None:
    """Whatever comes and goes: places are never exceeded, nobody who is inside loses his, and a refusal changes
    nothing."""
    bound = limits(engines=engines, texts=texts)
    residency = Residency(bound, tenants=3)
    inside: list[tuple[str, str]] = []
    for now, (model, tenant, need, leaves) in enumerate(calls):
        before = residency.keys
        try:
            going = residency.enter((model, tenant), need, now * 20)
        except NoPlaceError:
            assert residency.keys == before
            continue
        assert not set(going) & set(inside)
        inside.append((model, tenant))
        if leaves:
            residency.leave(inside.pop(0), now * 20)
        assert bound.hold(total(one.need for one in residency._residents.values()))
