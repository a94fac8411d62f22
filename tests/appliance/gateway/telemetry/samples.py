"""Stored traces with fixed ids and times, for tests of what is made from them."""

from __future__ import annotations

from dataclasses import replace

from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.store import StoredSpan, StoredTrace, TraceSummary

START_NS = 1_795_263_146_000_000_000
"""2026-11-21 12:12:26 UTC."""

_MS = 1_000_000

SUMMARY = TraceSummary(
    request_id="req_7f3a9c01de5544aa90b1c2d3",
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    route="POST /v1/chat/completions",
    outcome="ok",
    started_ns=START_NS,
    duration_s=0.842,
    tenant="alpha",
    model="athanor-mini",
    input_tokens=412,
    cached_tokens=384,
    output_tokens=64,
    ttft_s=0.113,
    token_s=0.0113,
    finish_reason="stop",
    policy_rule="tenants.alpha",
    sandbox="gvisor-systrap",
)


def span(number: int, parent: int | None, name: str, start_ms: float, end_ms: float) -> StoredSpan:
    """A span of the sample request; times in milliseconds after its start."""
    return StoredSpan(
        span_id=f"{number:016x}",
        parent_id=None if parent is None else f"{parent:016x}",
        name=name,
        start_ns=START_NS + int(start_ms * _MS),
        end_ns=START_NS + int(end_ms * _MS),
    )


def answered() -> StoredTrace:
    """A chat that went well, with all phases."""
    generation = replace(
        span(2, 1, "chat athanor-mini", 0.4, 842),
        attributes={names.OPERATION: "chat", names.POLICY_DIGEST: "9f86d081884c7d65" * 4},
    )
    return StoredTrace(
        SUMMARY,
        (
            span(1, None, "POST /v1/chat/completions", 0, 842),
            generation,
            span(3, 2, "athanor.policy", 0.5, 0.71),
            span(4, 2, "athanor.text", 0.8, 4.9),
            span(5, 2, "athanor.queue", 5, 17),
            span(6, 2, "athanor.prefill", 17, 113),
            span(7, 2, "athanor.decode", 113, 842),
        ),
    )


def refused() -> StoredTrace:
    """A request over its rate limit: it ends in the policy phase."""
    summary = replace(
        SUMMARY,
        request_id="req_00c0ffee00c0ffee00c0ffee",
        outcome="refused",
        error="rate_limited",
        duration_s=0.0011,
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        ttft_s=None,
        token_s=None,
        finish_reason=None,
        sandbox=None,
    )
    return StoredTrace(
        summary,
        (
            replace(span(1, None, "POST /v1/chat/completions", 0, 1.1), error="rate_limited"),
            replace(
                span(2, 1, "chat athanor-mini", 0.3, 1.1), attributes={names.OPERATION: "chat"}, error="rate_limited"
            ),
            span(3, 2, "athanor.policy", 0.4, 0.9),
        ),
    )


def failed() -> StoredTrace:
    """A request whose engine died while it decoded."""
    good = answered()
    spans = tuple(replace(one, error="unavailable") if one.span_id.endswith("2") else one for one in good.spans)
    summary = replace(good.summary, outcome="failed", error="unavailable", finish_reason=None)
    return StoredTrace(replace(summary, request_id="req_dead00000000000000000001"), spans)
