"""Requests as a session would trace them, for the telemetry tests."""

from __future__ import annotations

from appliance.common.errors import ApplianceError
from appliance.gateway.generate_request import CallContext, GenerateRequest, Operation, TextPrompt
from appliance.gateway.telemetry.request_trace import Phase
from appliance.gateway.telemetry.tracer import OtelTelemetry, TelemetrySettings
from isolation.ipc.sampling import Sampling

SETTINGS = TelemetrySettings(version="0.0.test")

HTTP = CallContext("POST /v1/chat/completions", "http")

CONTENT = "the-secret-plan-for-tuesday"
"""Stands for everything a tenant says; must be found nowhere."""


def request(model: str = "mini", request_id: str = "req_000000000000000000000001") -> GenerateRequest:
    """A chat request full of content."""
    return GenerateRequest(
        request_id=request_id,
        operation=Operation.CHAT,
        model=model,
        prompt=TextPrompt(f"{CONTENT} prompt"),
        sampling=Sampling(temperature=0.5, top_k=40, seed=7, presence_penalty=0.25),
        max_tokens=64,
        stop=(f"{CONTENT} stop",),
        stream=True,
    )


def serve(
    telemetry: OtelTelemetry,
    context: CallContext = HTTP,
    *,
    asked: GenerateRequest | None = None,
    tenant: str | None = "alpha",
    error: ApplianceError | None = None,
) -> str:
    """Trace one request from start to end; gives its trace id."""
    asked = asked or request()
    trace = telemetry.start(context, asked.request_id, tenant)
    trace.describe(asked)
    for phase in (Phase.POLICY, Phase.TEXT, Phase.QUEUE, Phase.PREFILL):
        trace.begin(phase)
        trace.end(phase)
    trace.annotate(policy_rule="tenants.alpha", policy_digest="9f86", sandbox="gvisor-systrap")
    trace.first_token()
    trace.begin(Phase.DECODE)
    trace.finish(
        error=error,
        input_tokens=12,
        cached_tokens=8,
        output_tokens=5,
        reasoning_tokens=3,
        finish_reason=None if error else "stop",
    )
    return trace.trace_id
