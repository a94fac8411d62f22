"""Content rules: what a tenant's requests may hold, by bytes, by fields and by roles of messages. Pure.

A field is named as the policy names it, whatever the API calls it, and counts where it asks for something:
``logprobs: false`` asks for nothing. A prompt that is no conversation has no roles; since a text may be written as the
model's own template writes a conversation, it has the role ``plain``, so that a list of roles means something.

The module imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policy.decision import Decision, Effect, Reason
from policy.model import PolicySet, Tenant
from policy.request import Content
from policy.wording import counted

REQUEST_FIELDS: Mapping[str, str] = {
    "temperature": "",
    "top_k": "",
    "top_p": "",
    "min_p": "",
    "typical_p": "",
    "repetition_penalty": "",
    "presence_penalty": "",
    "frequency_penalty": "",
    "seed": "",
    "stop": "also stop_sequences and stop_token_ids",
    "ignore_eos": "",
    "logit_bias": "",
    "logprobs": "also top_logprobs",
    "prompt_logprobs": "",
    "echo": "",
    "n": "more than one output; also choices",
    "stream": "an answer in parts; Generate over gRPC always is one",
    "deterministic": "",
    "prompt_cache_key": "",
    "service_tier": "also priority",
    "response_format": "also text.format, structured_outputs, guided_json and their like",
    "tools": "",
    "reasoning_effort": "also reasoning and thinking",
    "chat_template_kwargs": "also template_arguments",
    "name": "a speaker's name in a message",
    "dimensions": "of embeddings",
}
"""Field of requests that can be denied -> other names that it has, or what it is."""

PLAIN = "plain"
"""Role of a prompt that is no conversation."""

ROLES = ("system", "user", "assistant", "tool", PLAIN)
"""Roles of messages."""


def content_denial(policy: PolicySet, tenant: Tenant, content: Content) -> Decision | None:
    """Return the denial of a content that the tenant may not send; None where it may."""
    rules = tenant.content
    limit = rules.max_request_bytes
    if limit is not None and content.bytes > limit:
        size = counted(content.bytes, "byte", grouped=False)
        message = f"this request has {size} of content; this tenant may send at most {limit}"
        found = _denied(policy, tenant, Reason.CONTENT_TOO_LARGE, "max_request_bytes", message, "prompt")
        return replace(found, limit=limit, actual=content.bytes)
    for index, field in enumerate(rules.denied_fields):
        if field in content.fields:
            message = f"this tenant may not use the field {field}"
            return _denied(policy, tenant, Reason.FIELD_NOT_ALLOWED, f"denied_fields[{index}]", message, field)
    refused = sorted(content.roles.difference(rules.roles)) if rules.roles else []
    if not refused:
        return None
    what = "prompts that are no conversations" if refused[0] == PLAIN else f"messages of the role {refused[0]}"
    message = f"this tenant may not send {what}"
    return _denied(policy, tenant, Reason.ROLE_NOT_ALLOWED, "roles", message, "prompt")


def _denied(policy: PolicySet, tenant: Tenant, reason: Reason, key: str, message: str, param: str) -> Decision:
    return Decision(
        effect=Effect.DENY,
        reason=reason,
        rule=f"tenants.{tenant.id}.content.{key}",
        message=message,
        policy_digest=policy.digest,
        param=param,
    )
