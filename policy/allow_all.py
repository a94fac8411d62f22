"""``unsafe_allow_all``: what the key stands for, and what may not stand beside it. Pure.

A tenant that has it has the widest value of every limit, feature, content rule and model pattern, written out when the
file is read. So inheritance, decisions and comparisons know nothing of it, ``defaults`` narrow none of it, and a value
that a later version adds has to be named here (a test goes over all fields of the schema).

What the key does not touch is how a tenant is kept: class, retention, namespace, priority, weight and KV share. Models
outside of the appliance stay as ``external`` has them, since that is what the class promises, and no pattern stands for
an adapter. Limits of spend are left out, and a model without a price costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policy.content_schema import ContentSchema
from policy.end_user_schema import EndUsersSchema
from policy.errors import Problem
from policy.positions import Path
from policy.rate_schema import MAX_CONCURRENCY, MAX_REQUESTS, MAX_TOKENS
from policy.schema import (
    MAX_CONTEXT_TOKENS,
    MAX_QUEUE_S,
    MAX_QUEUED_REQUESTS,
    MAX_STORED_BYTES,
    FeaturesSchema,
    LimitsSchema,
    PolicySchema,
    TenantSchema,
)
from policy.written import WrittenFile

KEY = "unsafe_allow_all"

BESIDE = frozenset(
    {
        *("credentials", KEY, "isolation_class", "retention", "namespace", "weight", "priority", "freeze_idle"),
        *("external", "adapters", "kv", "kv_export", "kv_fleet"),
    }
)
"""Fields of a tenant that may stand beside the key; every other one is a rule that it replaces."""

WIDEST: dict[str, Any] = {
    "models": ["*"],
    "limits": LimitsSchema(
        requests_per_minute=MAX_REQUESTS,
        tokens_per_minute=MAX_TOKENS,
        input_tokens_per_minute=None,
        output_tokens_per_minute=None,
        concurrency=MAX_CONCURRENCY,
        kv_tokens=None,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_output_tokens=MAX_CONTEXT_TOKENS,
        spend_per_day=None,
        spend_per_month=None,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        max_queue_s=MAX_QUEUE_S,
        max_stored_bytes=MAX_STORED_BYTES,
    ),
    "features": FeaturesSchema(**dict.fromkeys(FeaturesSchema.model_fields, True)),
    "content": ContentSchema(max_request_bytes=None, denied_fields=[], roles=[]),
    "end_users": EndUsersSchema(requests_per_minute=None, output_tokens_per_minute=None, concurrency=None),
    "deterministic": "allowed",
    "networks": [],
    "regions": [],
    "model_regions": [],
    "hours": [],
}
"""Field of a tenant -> its widest value, with every key of a section written, so that nothing is inherited."""


def expanded(content: PolicySchema) -> PolicySchema:
    """Return the content of a file in which every tenant with the key has all that it stands for; the content itself
    where none has it."""
    wide = {name: _widened(one) for name, one in content.tenants.items() if one.unsafe_allow_all}
    return content.model_copy(update={"tenants": {**content.tenants, **wide}}) if wide else content


def _widened(tenant: TenantSchema) -> TenantSchema:
    """Return a tenant with the widest values; a copy counts what it was given as written."""
    return tenant.model_copy(update=WIDEST)


def contradictions(file: WrittenFile, written: PolicySchema) -> Iterator[Problem]:
    """Find what stands beside the key and would have no effect.

    Args:
        file: the file, for places.
        written: its content before ``expanded``.
    """
    for name, tenant in written.tenants.items():
        if not tenant.unsafe_allow_all:
            continue
        for field in sorted(tenant.model_fields_set - BESIDE):
            path: Path = ("tenants", name, field)
            message = f"{KEY} allows everything, so this has no effect: leave one of the two out"
            yield file.problem(path, message, at_key=True)


def allowed_all(tenant: TenantSchema, field: str) -> bool:
    """Return whether the value of a tenant's field is there because of the key."""
    return tenant.unsafe_allow_all and field in WIDEST
