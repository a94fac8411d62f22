"""policy.simulate and properties of decisions that no table shows."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.decision import Effect, Reason
from policy.errors import PolicySchemaError
from policy.evaluate import evaluate
from policy.explain import explain
from policy.limits import Bucket
from policy.loader import Source, load_policy
from policy.model import Exceeded, Limits, PolicySet, Priority
from policy.prices import BILLIONTHS, amount_text
from policy.rates import TREATMENTS, request_rate, token_rate
from policy.request import AccessRequest, EndUserUsage, Spend, Usage
from policy.simulate import DAY_S, MONTH_S, Load, Question, chosen, decide
from tests.policy.drawn_policies import documents, loaded, loads, questions

REQUIRED = ("requests_per_minute", "tokens_per_minute", "concurrency", "max_context_tokens", "max_output_tokens")
LIMITS = {
    "requests_per_minute": 60,
    "tokens_per_minute": 6_000,
    "concurrency": 4,
    "max_context_tokens": 400,
    "max_output_tokens": 100,
    "input_tokens_per_minute": 500,
    "output_tokens_per_minute": 300,
    "kv_tokens": 450,
    "max_queued_requests": 1,
    "max_queue_s": 2,
}
BURSTS = {"requests_burst": 60, "tokens_burst": 6_000, "input_tokens_burst": 500, "output_tokens_burst": 300}
"""Bursts of ``POLICY``: one minute's units, which its loader has as None."""
POLICY = loaded(
    {"version": 1, "tenants": {"alpha": {"credentials": ["key:alpha-1"], "models": ["m*"], "limits": LIMITS}}}
)
RANKS = (Effect.DENY, Effect.WAIT, Effect.ALLOW)


def with_limits(**limits: Any) -> PolicySet:
    """POLICY with other limits of its tenant."""
    tenant = POLICY.tenants["alpha"]
    wider = replace(tenant, limits=replace(tenant.limits, **limits))
    return PolicySet({"alpha": wider}, POLICY.principals, POLICY.digest, {}, {})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"tenant": "alpha"}, Reason.ALLOWED),
        ({"credential": "key:alpha-1"}, Reason.ALLOWED),
        ({"credential": "key:other"}, Reason.UNKNOWN_CREDENTIAL),
        ({"tenant": "other"}, Reason.UNKNOWN_CREDENTIAL),
    ],
)
def test_callers(asked: dict, reason: Reason) -> None:
    """A tenant by its id or by its credential; strangers are denied either way."""
    assert decide(POLICY, Question(model="m", **asked)).reason is reason


def test_questions_that_mean_nothing() -> None:
    """Two callers, none, or an admitted request without a count are mistakes of the caller."""
    for asked in ({}, {"tenant": "alpha", "credential": "key:alpha-1"}, {"tenant": "alpha", "admitted": True}):
        with pytest.raises(ValueError):
            Question(model="m", **asked)


def test_both_decisions_are_taken() -> None:
    """With a count the first decision still refuses what it would; of an admitted request only the second is taken."""
    ask = {"tenant": "alpha", "model": "m", "input_tokens": 10}
    assert decide(POLICY, Question(**ask), Load(running=4)).reason is Reason.CONCURRENCY
    assert decide(POLICY, Question(**ask, admitted=True), Load(running=4)).allowed
    assert decide(POLICY, Question(**ask | {"input_tokens": 400})).reason is Reason.CONTEXT_TOO_LONG
    assert decide(POLICY, Question(tenant="alpha", model="m")).allowed


def left(used: dict, name: str) -> Bucket | None:
    """A bucket with what is left of a rate; None: full."""
    return Bucket(float(used[name]), 0.0) if name in used else None


@settings(max_examples=80, deadline=None)
@given(documents, questions, loads)
def test_an_explanation_is_the_decision(document: dict, asked: dict, used: dict) -> None:
    """An explanation is what the evaluator decides, called by hand as the gateway calls it: effect, rule, numbers."""
    policy = loaded(document)
    decision = decide(policy, Question(**asked), Load(**used))
    tenant = policy.tenants.get(asked["tenant"])
    limits = tenant.limits if tenant else Limits(**dict.fromkeys(REQUIRED, 1))
    usage = Usage(
        concurrency=used.get("running", 0),
        request_bucket=Bucket(float(used.get("requests_left", request_rate(limits).capacity)), 0.0),
        token_bucket=Bucket(float(used.get("tokens_left", token_rate(limits).capacity)), 0.0),
        input_bucket=Bucket(float(used["input_tokens_left"]), 0.0) if "input_tokens_left" in used else None,
        output_bucket=Bucket(float(used["output_tokens_left"]), 0.0) if "output_tokens_left" in used else None,
        queued=used.get("queued", 0),
        kv_tokens=used.get("kv_tokens_held", 0),
        end_user=EndUserUsage(
            concurrency=used.get("end_user_running", 0),
            request_bucket=left(used, "end_user_requests_left"),
            output_bucket=left(used, "end_user_output_tokens_left"),
        ),
        spend=Spend(
            day=round(used.get("spent_today", 0.0) * BILLIONTHS),
            month=round(used.get("spent_this_month", 0.0) * BILLIONTHS),
            day_left_s=DAY_S,
            month_left_s=MONTH_S,
        ),
    )
    choice = chosen(policy, Question(**asked), Load(**used))
    names = {"model": asked["model"]} if choice is None else {"model": choice.model, "alias": asked["model"]}
    steps = [None] if "input_tokens" not in asked else [None, asked["input_tokens"]]
    found = None
    for count in steps:
        access = AccessRequest(
            tenant=asked["tenant"],
            **names,
            input_tokens=count,
            max_output_tokens=asked.get("max_tokens"),
            choices=asked.get("choices", 1),
            feature=asked.get("feature"),
            content=asked.get("content"),
            region=asked.get("region"),
            asleep=count is None and names["model"] in used.get("asleep", ()),
        )
        found = evaluate(policy, access, usage, 0.0)
        if not found.allowed:
            break
    assert found == decision
    lines = explain(decision).splitlines()
    assert lines[0] == f"{decision.effect.value}: {decision.message}"
    assert f"  rule: {decision.rule}" in lines
    number = amount_text if decision.reason is Reason.SPEND else str
    numbers = [] if decision.limit is None else [f"  limit: {number(decision.limit)}, found: {number(decision.actual)}"]
    assert [line for line in lines if line.startswith("  limit:")] == numbers


def one_decision(asked: dict) -> Question:
    """A question about the first decision, or about the second where the prompt is counted."""
    return Question(**asked | {"model": "m", "tenant": "alpha", "admitted": "input_tokens" in asked})


treatments = st.fixed_dictionaries({name: st.sampled_from(list(Exceeded)) for name in TREATMENTS})
"""Treatments of requests beyond each limit."""


@settings(max_examples=600)
@given(questions, loads, st.sampled_from(sorted(LIMITS | BURSTS)), st.integers(1, 10_000), treatments)
def test_widening_a_limit_never_denies_more(asked: dict, used: dict, name: str, more: int, treated: dict) -> None:
    """A request that named its output tokens and was allowed is allowed under any larger limit or burst, and one that
    waited waits or is allowed, whatever becomes of requests beyond each limit. One that named none may need more tokens
    of its rates or of KV then, since more are granted: that alone can refuse it, or make it wait."""
    question, load = one_decision(asked), Load(**used)
    wider = with_limits(**treated, **{name: (LIMITS | BURSTS)[name] + more})
    before, after = decide(with_limits(**treated), question, load), decide(wider, question, load)
    if RANKS.index(after.effect) < RANKS.index(before.effect):
        assert question.max_tokens is None
        assert name in ("max_context_tokens", "max_output_tokens")
        assert after.reason in (Reason.TOKEN_RATE, Reason.KV_TOKENS)


def test_a_wider_output_cap_can_refuse_a_request_that_names_none() -> None:
    """The exception of the property above is real: the cap is what such a request reserves."""
    question, load = Question(tenant="alpha", model="m", input_tokens=10), Load(tokens_left=110)
    assert decide(POLICY, question, load).allowed
    assert decide(with_limits(max_output_tokens=200), question, load).reason is Reason.TOKEN_RATE
    assert decide(with_limits(max_output_tokens=200), replace(question, max_tokens=100), load).allowed


@settings(max_examples=300)
@given(questions, loads, treatments, st.sampled_from(sorted(TREATMENTS)))
def test_waiting_and_downgrading_deny_no_more_than_refusing(asked: dict, used: dict, treated: dict, name: str) -> None:
    """A request is denied by a limit that makes requests wait, or downgrades them, only where it is denied by the same
    limit that refuses them; one that is downgraded is served with low priority, and no other is."""
    question, load = one_decision(asked), Load(**used)
    refusing = decide(with_limits(**treated | {name: Exceeded.REFUSE}), question, load)
    decision = decide(with_limits(**treated), question, load)
    assert RANKS.index(decision.effect) >= RANKS.index(refusing.effect)
    if decision.obligations is not None:
        assert bool(decision.obligations.downgraded) == (decision.obligations.priority is Priority.LOW)


@settings(max_examples=40, deadline=None)
@given(documents, st.randoms(use_true_random=False))
def test_the_order_of_files_does_not_matter(document: dict, random) -> None:
    """A policy split into one file for each tenant is the same in any order of the files and under any names. Control:
    a tenant in two files is refused in every order."""
    parts = [{"version": 1, "tenants": {name: one}} for name, one in document["tenants"].items()]
    parts[0] |= {key: document[key] for key in document if key not in ("version", "tenants")}
    texts = [json.dumps(part) for part in parts]
    digests = set()
    for order in itertools.permutations(texts):
        names = random.sample([f"{n}.yaml" for n in range(10)], len(order))
        digests.add(load_policy([Source(name, text) for name, text in zip(names, order, strict=True)]).digest)
    assert digests == {loaded(document).digest}
    with pytest.raises(PolicySchemaError, match="stands in"):
        load_policy([Source("a.yaml", texts[0]), Source("b.yaml", texts[0])])
