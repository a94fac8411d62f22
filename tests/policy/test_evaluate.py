"""policy.evaluate and policy.explain: tables and properties of the decision."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.cases import found, load, load_cases, question
from policy.decision import Effect, Reason
from policy.evaluate import evaluate, principal, visible_models
from policy.explain import explain
from policy.feature import Feature
from policy.limits import Bucket, Rate, reserve
from policy.loader import Source, load_policy
from policy.model import IsolationClass, Retention
from policy.request import AccessRequest, Usage
from policy.simulate import decide

CASES = load_cases((Path(__file__).parent / "cases" / "evaluate.yaml").read_text(), "evaluate.yaml")
POLICY = load_policy([Source("p.yaml", CASES.content.policy)])
NOW = 1000.0
MODELS = ("athanor-mini", "qwen3-8b", "llama-3")


def access(
    tenant="alpha",
    model="athanor-mini",
    *,
    input=None,  # noqa: A002
    output=None,
    feature=None,
    **asked,
) -> AccessRequest:
    """What is asked, with the usual tenant and model."""
    asked["feature"] = None if feature is None else Feature(feature)
    return AccessRequest(tenant=tenant, model=model, input_tokens=input, max_output_tokens=output, **asked)


def usage(*, concurrency=0, requests=60, tokens=6000) -> Usage:
    """What is used; nothing and full buckets by default."""
    return Usage(
        concurrency=concurrency, request_bucket=Bucket(float(requests), NOW), token_bucket=Bucket(float(tokens), NOW)
    )


@pytest.mark.parametrize("case", CASES.content.cases, ids=lambda case: case.name)
def test_table(case) -> None:
    """Each row of cases/evaluate.yaml gives its decision, and no number that the row does not name."""
    decision = decide(POLICY, question(case.ask), load(case.use))
    told = {key: value for key, value in found(decision).items() if key != "namespace"}  # a word, of every allowance
    assert told == {key: getattr(case.expect, key) for key in told}
    assert decision.allowed == (case.expect.effect is Effect.ALLOW)
    assert decision.policy_digest == POLICY.digest


def test_obligations_carry_the_tenants_terms() -> None:
    """An allowance says what the server must honour."""
    obligations = evaluate(POLICY, access(), usage(), NOW).obligations
    assert obligations is not None
    assert obligations.retention is Retention.NONE
    assert obligations.isolation_class is IsolationClass.SHARED
    assert obligations.weight == 3


def test_a_request_larger_than_a_minute_is_told_to_shrink() -> None:
    """Where waiting can never help, no retry time is given and the message says what does help."""
    policy = load_policy(
        [
            Source(
                "p.yaml",
                "version: 1\ntenants: {a: {credentials: ['key:a'], models: ['*'], limits: {tokens_per_minute: 100}}}",
            )
        ]
    )
    decision = evaluate(policy, access("a", input=90, output=11), usage(tokens=100), NOW)
    assert (decision.reason, decision.retry_after_s) == (Reason.TOKEN_RATE, None)
    assert "fewer output tokens" in decision.message


@pytest.mark.parametrize(("uncounted", "words"), [(True, "need at least 802 tokens"), (False, "need 802 tokens")])
def test_only_an_exact_count_is_told_as_one(uncounted: bool, words: str) -> None:
    """A caller reads whether the number is the prompt's length, or only known to be exceeded."""
    assert words in evaluate(POLICY, access(input=801, uncounted=uncounted), usage(), NOW).message


def test_principals() -> None:
    """Known credentials lead to their tenant, any other to nobody; a tenant's id is no
    credential."""
    assert principal(POLICY, "key:alpha-1") == "alpha"
    assert principal(POLICY, "spiffe://athanor.local/tenant/alpha") == "alpha"
    assert principal(POLICY, "key:ALPHA-1") is None
    assert principal(POLICY, "alpha") is None


def test_visible_models() -> None:
    """A tenant sees the served models it may call, in their order; a stranger sees none."""
    assert visible_models(POLICY, "alpha", MODELS) == ("athanor-mini", "qwen3-8b")
    assert visible_models(POLICY, "beta", MODELS) == MODELS
    assert visible_models(POLICY, "gamma", MODELS) == ()


@pytest.mark.parametrize("numbers", [{"input": 0}, {"input": -1}, {"output": -1}])
def test_counts_below_one_are_a_callers_mistake(numbers) -> None:
    """An access request cannot be made with counts that mean nothing."""
    with pytest.raises(ValueError, match=r"at least one|not negative"):
        access(**numbers)


tokens = st.none() | st.integers(1, 10_000)


@given(st.text(max_size=20).filter(lambda name: name not in POLICY.tenants), tokens, tokens)
def test_an_unknown_tenant_is_always_denied(tenant, input_tokens, output) -> None:
    """Default deny: no numbers and no usage make a stranger pass."""
    decision = evaluate(POLICY, access(tenant, input=input_tokens, output=output), usage(), NOW)
    assert (decision.effect, decision.reason) == (Effect.DENY, Reason.UNKNOWN_CREDENTIAL)


@settings(max_examples=300)
@given(tokens, tokens, st.integers(0, 8), st.integers(-50, 60), st.integers(-9000, 6000))
def test_grants_stay_within_every_limit(input_tokens, output, concurrency, requests, left) -> None:
    """What is allowed fits the output cap, the context and, once counted, the token bucket."""
    state = usage(concurrency=concurrency, requests=requests, tokens=left)
    decision = evaluate(POLICY, access(input=input_tokens, output=output), state, NOW)
    limits = POLICY.tenants["alpha"].limits
    if decision.obligations is None:
        assert decision.effect is Effect.DENY
        assert decision.reason is not Reason.ALLOWED
        return
    granted = decision.obligations.max_output_tokens
    assert decision.retry_after_s is None
    assert 1 <= granted <= limits.max_output_tokens
    assert output is None or granted == output
    if input_tokens is None:
        assert concurrency < limits.concurrency
        assert requests >= 1
        assert left >= 0
    else:
        cost = input_tokens + granted
        assert cost <= limits.max_context_tokens
        assert reserve(state.token_bucket, Rate(limits.tokens_per_minute), cost, NOW) is not None


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 100), st.integers(-9000, 6000))
def test_who_waits_as_told_is_allowed(input_tokens, output, left) -> None:
    """After the retry time of a token denial the same request passes."""
    ask = access(input=input_tokens, output=output)
    decision = evaluate(POLICY, ask, usage(tokens=left), NOW)
    if decision.retry_after_s is not None:
        assert not decision.allowed
        later = evaluate(POLICY, ask, usage(tokens=left), NOW + decision.retry_after_s)
        assert later.allowed


def test_explanations_read_well() -> None:
    """An allowance, a wait and a refusal for good, as the operator sees them."""
    allowed = explain(evaluate(POLICY, access(input=10, output=5), usage(), NOW))
    assert allowed.splitlines()[:4] == [
        "allow: allowed",
        "  rule: tenants.alpha.models[0]",
        "  granted: 5 output tokens, weight 3, normal priority",
        "  isolation class: shared, retention: none",
    ]
    waiting = explain(evaluate(POLICY, access(), usage(concurrency=4), NOW))
    assert waiting.splitlines() == [
        "deny: 4 requests of this tenant are running; it may have 4 at once",
        "  rule: tenants.alpha.limits.concurrency",
        "  limit: 4, found: 4",
        "  retry after: 1.0 s",
        f"  policy: {POLICY.digest[:12]}",
    ]
    refused = explain(evaluate(POLICY, access("gamma"), usage(), NOW))
    assert "  retry: will not help until the request or the policy changes" in refused


def test_several_texts_without_output() -> None:
    """Embeddings ask for no output: their texts are held against the context one by one, and together against the
    rate of tokens; nothing of an output is granted."""
    most = POLICY.tenants["alpha"].limits.max_context_tokens

    def decide(total: int, longest: int | None, tokens: int = 6_000):
        asked = AccessRequest(
            tenant="alpha", model="athanor-mini", input_tokens=total, max_output_tokens=0, longest_input=longest
        )
        return evaluate(POLICY, asked, usage(tokens=tokens), NOW)

    allowed = decide(most, most)
    assert allowed.allowed
    assert allowed.obligations.max_output_tokens == 0
    assert decide(3 * most, most).allowed
    assert decide(3 * most, most, 3 * most - 1).reason is Reason.TOKEN_RATE
    assert decide(most + 1, most + 1).reason is Reason.CONTEXT_TOO_LONG
    assert decide(most + 1, None).reason is Reason.CONTEXT_TOO_LONG
