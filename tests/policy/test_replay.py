"""policy.replay: logged requests under another policy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import replay as module
from policy.change_wording import KEYS
from policy.changes import changes
from policy.model import ContentRules, EndUserLimits, Features, Limits, PolicySet
from policy.replay import AllowedEntry, DeniedEntry, Finding, not_replayed, replay, sentences
from tests.policy.drawn_policies import loaded

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "tenants": {
        "alpha": {"credentials": ["key:a-1"], "models": ["*"]},
        "beta": {"credentials": ["key:b-1", "key:b-2"], "models": ["m", "n"]},
    },
}


def policy(**values: Any) -> PolicySet:
    """DOCUMENT with other values of beta."""
    document = copy.deepcopy(DOCUMENT)
    document["tenants"]["beta"] |= values
    return loaded(document)


OLD = policy()


def allowed(time_s: float = 0.0, **values: Any) -> AllowedEntry:
    """One logged request of beta."""
    usual = {
        "tenant": "beta",
        "credential": "key:b-1",
        "model": "m",
        "operation": "chat",
        "policy": OLD.digest,
        "input_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 5,
        "day": 0,
        "month": 0,
    }
    return AllowedEntry(time_s=time_s, **usual | values)


def denied(rule: str, count: int = 1, **values: Any) -> DeniedEntry:
    """Denied requests of beta."""
    return DeniedEntry(
        **{"tenant": "beta", "credential": "key:b-1", "model": "m", "rule": rule, "count": count} | values
    )


def refused(new: PolicySet, *entries: AllowedEntry | DeniedEntry) -> list[Finding]:
    """What the new policy would have refused."""
    return replay(OLD, new, entries).refused


BETA = "tenants.beta"


@pytest.mark.parametrize(
    ("values", "entry", "rule"),
    [
        ({"models": ["n"]}, {}, f"{BETA}.models"),
        ({"credentials": ["key:b-2"]}, {}, f"{BETA}.credentials"),
        ({"limits": {"max_context_tokens": 10}}, {}, f"{BETA}.limits.max_context_tokens"),
        ({"limits": {"tokens_per_minute": 14}}, {}, f"{BETA}.limits.tokens_per_minute"),
        ({"features": {"tokenize": False}}, {"operation": "tokenize", "output_tokens": 0}, f"{BETA}.features.tokenize"),
        (
            {"features": {"embeddings": False}},
            {"operation": "embeddings", "output_tokens": 0},
            f"{BETA}.features.embeddings",
        ),
        ({"features": {"rerank": False}}, {"operation": "rerank", "output_tokens": 0}, f"{BETA}.features.rerank"),
        ({"features": {"rerank": False}}, {"operation": "classify", "output_tokens": 0}, f"{BETA}.features.rerank"),
        (
            {"features": {"tokenize": False}},
            {"operation": "detokenize", "input_tokens": 0},
            f"{BETA}.features.tokenize",
        ),
    ],
)
def test_rules_that_refuse_a_request(values: dict, entry: dict, rule: str) -> None:
    """One request, one narrower rule: this rule would have refused it. Control: the old policy refuses none."""
    assert refused(policy(**values), allowed(**entry)) == [Finding("beta", rule, 1)]
    assert refused(OLD, allowed(**entry)) == []


def test_a_tenant_that_is_gone() -> None:
    """Its requests would be refused for want of a tenant; others' are not touched."""
    document = {"version": 1, "tenants": {"alpha": DOCUMENT["tenants"]["alpha"]}}
    found = replay(OLD, loaded(document), [allowed(), allowed(tenant="alpha", credential="key:a-1")])
    assert found.refused == [Finding("beta", "tenants.beta", 1)]
    assert found.requests == {"alpha": 1, "beta": 1}


def test_a_credential_that_moved() -> None:
    """A request is decided for the tenant to which its credential belongs under the new policy."""
    document = copy.deepcopy(DOCUMENT)
    document["tenants"]["beta"]["credentials"] = ["key:b-1"]
    document["tenants"]["alpha"] |= {"credentials": ["key:a-1", "key:b-2"], "models": ["n"]}
    entries = [allowed(credential="key:b-2"), allowed(credential="key:b-2", model="n")]
    assert refused(loaded(document), *entries) == [Finding("beta", "tenants.alpha.models", 1)]


def test_a_credential_too_long_for_the_log() -> None:
    """The log cuts a long SPIFFE ID; its tenant stands for it."""
    long = "spiffe://example.org/" + "x" * 300
    new = policy(credentials=[long], models=["n"])
    assert refused(new, allowed(credential=long[: module.CUT_CREDENTIAL])) == [Finding("beta", f"{BETA}.models", 1)]


def test_answers_that_are_too_long_are_cut_or_refused() -> None:
    """The log does not say how many tokens were asked for: more output than allowed, or than the context leaves, may
    have been cut short instead. A prompt that leaves no token of it is refused for sure."""
    new = policy(limits={"max_output_tokens": 4, "max_context_tokens": 100})
    whole, long_answer = allowed(output_tokens=4), allowed(output_tokens=5)
    long_both, long_prompt = allowed(input_tokens=99, output_tokens=2), allowed(input_tokens=100, output_tokens=5)
    found = replay(OLD, new, [whole, long_answer, long_both, long_prompt])
    assert found.refused == [Finding("beta", f"{BETA}.limits.max_context_tokens", 1)]
    assert found.shortened == [
        Finding("beta", f"{BETA}.limits.max_context_tokens", 1, sure=False),
        Finding("beta", f"{BETA}.limits.max_output_tokens", 1, sure=False),
    ]


def test_rates_fill_with_the_times_of_the_log() -> None:
    """Sixty a minute: sixty at once pass, ten more do not; a second later one more passes. Tokens likewise."""
    new = policy(limits={"requests_per_minute": 60})
    at_once = [allowed(0.0)] * 70
    assert refused(new, *at_once, allowed(1.0), allowed(1.0)) == [
        Finding("beta", f"{BETA}.limits.requests_per_minute", 11)
    ]
    assert refused(new, *(allowed(float(second)) for second in range(100))) == []
    new = policy(limits={"tokens_per_minute": 60})
    assert refused(new, *[allowed(0.0)] * 5) == [Finding("beta", f"{BETA}.limits.tokens_per_minute", 1)]
    assert refused(new, *(allowed(15.0 * number) for number in range(9))) == []


def test_spend_adds_up_within_a_day_and_a_month() -> None:
    """A request costs 0.002 here: five fit a limit of 0.01 a day, a sixth does not; the next day five do again, and
    then the month is spent. Cached tokens cost less, and a model without a price is denied to whom a limit is set."""
    prices = {"currency": "EUR", "rules": [{"models": ["m"], "input": 1, "cached_input": 0.5, "output": 2}]}
    old, new = copy.deepcopy(DOCUMENT) | {"prices": prices}, copy.deepcopy(DOCUMENT) | {"prices": prices}
    new["tenants"]["beta"]["limits"] = {"spend_per_day": 0.01, "spend_per_month": 0.02}
    old, new = loaded(old), loaded(new)
    one = allowed(input_tokens=1_000, output_tokens=500)
    days = [replace(one, day=number) for number in range(2) for _ in range(6)]
    rule, month = f"{BETA}.limits.spend_per_day", f"{BETA}.limits.spend_per_month"
    assert replay(old, new, days).refused == [Finding("beta", rule, 2)]
    later = [replace(one, day=2), replace(one, day=2, month=1)]
    assert replay(old, new, [*days, *later]).refused == [Finding("beta", rule, 2), Finding("beta", month, 1)]
    cached = [replace(one, cached_tokens=1_000)] * 6
    assert replay(old, new, cached).refused == []
    assert replay(old, new, [*cached, one]).refused == [Finding("beta", rule, 1)]
    assert replay(old, new, [allowed(model="n")]).refused == [Finding("beta", "prices.rules", 1)]


def test_embeddings_are_not_held_against_the_context() -> None:
    """The log has the sum of several texts; their tokens count for the rate all the same."""
    entry = allowed(operation="embeddings", input_tokens=500, output_tokens=0)
    assert refused(policy(limits={"max_context_tokens": 100}), entry) == []
    assert refused(policy(limits={"max_context_tokens": 100}), allowed(input_tokens=500)) != []
    rate = f"{BETA}.limits.tokens_per_minute"
    assert refused(policy(limits={"tokens_per_minute": 499}), entry) == [Finding("beta", rate, 1)]


def test_requests_that_the_old_policy_refuses_too_are_left_out() -> None:
    """The replay is inexact where it refuses, under the policy that decided, what was allowed: such requests count
    nowhere. So do those that ended before their prompt was counted, for rules of tokens."""
    old, new = policy(limits={"max_context_tokens": 9}), policy(limits={"max_context_tokens": 8})
    found = replay(old, new, [allowed(), allowed(input_tokens=0, output_tokens=0)])
    assert (found.refused, found.inexact, found.foreign) == ([], 1, 2)


def test_denied_requests_that_would_pass() -> None:
    """A model or a feature that is granted now lets its denials pass; a larger limit might; one that stays the same, or
    a model that is not served, does not."""
    new = policy(models=["m", "n", "x"], limits={"concurrency": 128}, features={"tools": True})
    old = policy(features={"tools": False})
    entries = [
        denied(f"{BETA}.models", 3, model="x"),
        denied(f"{BETA}.models", 5, model="y"),
        denied(f"{BETA}.models", 7, model=""),
        denied(f"{BETA}.features.tools", 2),
        denied(f"{BETA}.limits.concurrency", 11),
        denied(f"{BETA}.limits.requests_per_minute", 13),
        denied("", 17),
        denied("tenants", 19, tenant="", credential=""),
    ]
    found = replay(old, new, entries)
    assert found.lifted == [
        Finding("beta", f"{BETA}.features.tools", 2),
        Finding("beta", f"{BETA}.limits.concurrency", 11, sure=False),
        Finding("beta", f"{BETA}.models", 3),
    ]
    assert replay(new, new, entries).lifted == []


def test_sentences() -> None:
    """Findings as an operator reads them."""
    new = policy(limits={"max_context_tokens": 1_024, "max_output_tokens": 100, "concurrency": 65})
    entries = [allowed(input_tokens=2_000)] * 2 + [allowed(output_tokens=101)] + [allowed()] * 1_000
    lines = sentences(replay(OLD, new, [*entries, denied(f"{BETA}.limits.concurrency")]))
    assert lines == [
        "2 of 1,003 requests of beta would have been refused, by tenants.beta.limits.max_context_tokens",
        "1 of 1,003 requests of beta might have been refused or cut short, by tenants.beta.limits.max_output_tokens",
        "1 denied request of beta might have passed tenants.beta.limits.concurrency",
    ]


def test_rules_that_are_not_replayed_are_named() -> None:
    """Each rule that became narrower and is not in the log is named with its reason; one that is replayed, one that
    refuses nothing, and one that became wider, is not."""
    new = policy(
        limits={"concurrency": 1, "requests_per_minute": 1},
        features={"tools": False, "structured_output": False, "reasoning": False},
        retention="none",
    )
    named = not_replayed(changes(OLD, new))
    assert [path for path, _ in named] == [
        f"{BETA}.limits.concurrency",
        f"{BETA}.features.structured_output",
        f"{BETA}.features.tools",
    ]
    assert named[0][1] == "entries do not say how many requests ran at once"
    assert not_replayed(changes(new, OLD)) == []


def test_every_limit_and_feature_is_sorted() -> None:
    """A limit or feature that is added is noticed here until somebody says whether the log can replay it."""
    keys = {f"limits.{KEYS[Limits].get(name, name)}" for name in Limits.__dataclass_fields__}
    keys |= {f"features.{name}" for name in Features.__dataclass_fields__} | {"networks", "hours"}
    keys |= {"regions", "model_regions", "external"}
    keys |= {f"content.{name}" for name in ContentRules.__dataclass_fields__}
    keys |= {f"end_users.{name}" for name in EndUserLimits.__dataclass_fields__}
    assert keys == module.REPLAYED | set(module.NOT_REPLAYED) | module.NEVER_REFUSES


entries = st.lists(
    st.builds(
        allowed,
        st.floats(0, 600, allow_nan=False),
        input_tokens=st.integers(0, 5_000),
        output_tokens=st.integers(0, 1_100),
        model=st.sampled_from(["m", "n"]),
        operation=st.sampled_from(["chat", "embeddings", "tokenize"]),
    ),
    max_size=30,
)
ASKED = ("requests_per_minute", "tokens_per_minute", "concurrency", "max_context_tokens", "max_output_tokens")
small = st.builds(
    Limits,
    requests_per_minute=st.integers(1, 700),
    tokens_per_minute=st.integers(1, 300_000),
    concurrency=st.just(64),
    max_context_tokens=st.integers(2, 5_000),
    max_output_tokens=st.integers(1, 1_100),
)


@settings(max_examples=100)
@given(entries, small)
def test_a_policy_beside_itself_refuses_nothing(found: list[AllowedEntry], limits: Limits) -> None:
    """Whatever the traffic, the same policy decides the same; and under any other, no more requests are counted than
    there are."""
    ordered = sorted(found, key=lambda one: one.time_s)
    new = policy(limits={name: getattr(limits, name) for name in ASKED})
    same = replay(new, new, ordered)
    assert (same.refused, same.shortened) == ([], [])
    other = replay(OLD, new, ordered)
    counted = sum(one.requests for one in other.refused + other.shortened)
    assert counted + other.inexact <= len(ordered) == other.requests.total()


def routed(*models: str, **values: Any) -> PolicySet:
    """DOCUMENT in which beta may use the route ``fast`` alone, which leads to these models."""
    document = copy.deepcopy(DOCUMENT)
    document["tenants"]["beta"]["models"] = ["fast"]
    document["tenants"]["beta"] |= values
    document["routes"] = {"fast": {"to": [{"model": name, "weight": 10 - at} for at, name in enumerate(models)]}}
    document["prices"] = {
        "currency": "EUR",
        "rules": [{"models": ["dear"], "input": 1_000, "output": 1_000}, {"models": ["*"], "input": 1, "output": 1}],
    }
    return loaded(document)


def against(old: PolicySet, new: PolicySet, *entries: AllowedEntry | DeniedEntry) -> list[Finding]:
    """What the new policy would have refused of what the old one served."""
    return replay(old, new, entries).refused


def test_requests_by_an_alias() -> None:
    """The log has both names: the alias is what must be allowed, and the model is what is priced and counted."""
    old, entry = routed("m", "n"), allowed(alias="fast", model="n")
    assert against(old, routed("m", "n"), entry) == []
    assert against(old, routed("m", "n", models=["n"]), entry) == [Finding("beta", f"{BETA}.models", 1)]
    by_name = allowed(model="n")
    assert replay(old, old, [by_name]).inexact == 1, "control: the model by its own name is not allowed"


def test_a_route_that_is_gone_refuses_its_requests() -> None:
    """Even where a pattern matches its name: no model is known to have it."""
    assert against(routed("m"), policy(models=["*"]), allowed(alias="fast")) == [Finding("beta", "routes.fast", 1)]


def test_a_route_that_leads_elsewhere_is_replayed_there() -> None:
    """The model that served stays for as long as the route leads to it; else the likeliest takes its place, with its
    price."""
    old, entry = routed("m"), allowed(alias="fast", model="m")
    poor = {"limits": {"spend_per_day": 0.01}}
    assert against(old, routed("dear", "m", **poor), entry) == []
    assert against(old, routed("dear", **poor), entry) == [Finding("beta", f"{BETA}.limits.spend_per_day", 1)]
    assert against(old, routed("n", **poor), entry) == []


def test_a_name_that_becomes_a_route() -> None:
    """A request for a model whose name is a route's by now is replayed by the route."""
    document = copy.deepcopy(DOCUMENT)
    document["routes"] = {"m": {"to": [{"model": "athanor-mini"}]}}
    assert refused(loaded(document), allowed()) == []
    document["tenants"]["beta"]["models"] = ["n"]
    assert refused(loaded(document), allowed()) == [Finding("beta", f"{BETA}.models", 1)]


def test_denials_of_an_alias() -> None:
    """A tenant that is given the alias would have passed; a pattern for the target (control) changes nothing."""
    entry = denied(f"{BETA}.models", 3, model="", alias="fast")
    assert replay(OLD, routed("m"), [entry]).lifted == [Finding("beta", f"{BETA}.models", 3)]
    assert replay(OLD, routed("m", models=["m"]), [entry]).lifted == []
