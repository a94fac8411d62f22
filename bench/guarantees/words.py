"""What a caller could write to pass for somebody else: names of fields, headers and queries, and what to put there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.guarantees.scripted_gateway import EMBED_MODEL, MODEL

_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}

BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _TEXT,
    "/v1/embeddings": {"model": EMBED_MODEL, "input": ["hi"]},
}
"""A good body of every route that takes one."""

FIELDS = (
    "tenant", "tenant_id", "namespace", "namespace_key", "cache_salt", "cache_namespace", "prompt_cache_key",
    "prompt_cache_retention", "salt", "user", "safety_identifier", "metadata", "organization", "project", "account",
    "principal", "identity", "credential", "api_key", "key", "key_id", "session_id", "conversation_id", "request_id",
    "id", "previous_response_id", "lora", "lora_name", "adapter", "adapter_id", "mm_hash", "kv_transfer_params",
    "cache_control", "cached_tokens", "extra_body", "extra_headers", "extra_args", "vllm_xargs", "nvext", "isolation",
    "class", "priority", "service_tier", "retain", "retention", "store", "deterministic", "seed", "epoch", "group",
    "sharing_group", "public_prefix", "prefix", "grant", "weight", "deadline", "trace_id", "traceparent", "region",
    "response_format", "guided_regex", "stream_options", "logprobs", "n", "echo", "stop", "model", "prompt", "input",
    "__proto__", "constructor", "$ref",
)  # fmt: skip
"""Those of this API, of other servers' salts and ids, and of what somebody might have added."""

HEADERS = (
    "x-tenant", "x-tenant-id", "x-athanor-tenant", "x-athanor-namespace", "x-namespace", "x-cache-salt", "cache-salt",
    "x-user", "x-user-id", "x-forwarded-user", "x-forwarded-for", "x-forwarded-client-cert", "x-forwarded-host",
    "forwarded", "x-real-ip", "x-remote-user", "remote-user", "x-authenticated-user", "x-auth-request-user",
    "x-client-cert", "ssl-client-cert", "x-ssl-client-s-dn", "x-spiffe-id", "x-api-key", "api-key", "x-goog-api-key",
    "proxy-authorization", "cookie", "openai-organization", "openai-project", "anthropic-version", "x-request-id",
    "x-correlation-id", "x-session-id", "x-session-affinity", "x-amz-security-token", "x-lora", "x-adapter",
    "traceparent", "tracestate", "baggage", "b3", "via", "from", "referer", "origin", "host", "user-agent", "te",
    "x-http-method-override", "x-original-url", "x-rewrite-url", "idempotency-key", "x-priority", "x-deadline",
)  # fmt: skip

QUERIES = ("tenant", "namespace", "cache_salt", "api_key", "key", "user", "model", "token", "access_token", "seed")


def values_for(tenant: str, key: str, namespace: bytes) -> list[Any]:
    """What to write there to become this tenant, and values of other kinds."""
    return [
        tenant, key, namespace.hex(), f"key:{tenant}-1", f"spiffe://athanor.test/tenant/{tenant}", 1, -1, 2**63, 0.5,
        True, None, [], {}, [tenant], {"tenant": tenant, "namespace": namespace.hex()}, "", "\u0000", "a" * 300,
    ]  # fmt: skip
