"""A tenant's limits and usage -> messages of ``athanor.usage.v1``; pure."""

from __future__ import annotations

from typing import Protocol, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.padding import Padding
from appliance.gateway.grpc.generated import usage_pb2 as pb
from appliance.gateway.tenant_account import (
    LimitState,
    LimitUnit,
    ModelUse,
    PeriodUse,
    TenantLimits,
    TenantUsed,
    UserUse,
)

DEFAULT_INTERVAL_S = 5
MAX_INTERVAL_S = 300
"""Seconds between two messages of a watch. Longer ones would look like a connection that is broken."""

LENGTH_BYTES = 3
"""Bytes of the padding's tag and length, where it has 128 bytes or more and under 16,384."""

SHORTEST_PADDING = 128


class Padded(Protocol):
    """A message with room for padding."""

    padding: bytes

    def ByteSize(self) -> int:
        """Return the bytes of the message."""
        ...


M = TypeVar("M", bound=Padded)

_UNITS = {
    LimitUnit.REQUESTS: pb.UNIT_REQUESTS,
    LimitUnit.TOKENS: pb.UNIT_TOKENS,
    LimitUnit.BILLIONTHS: pb.UNIT_BILLIONTHS,
}
_EXCEEDED = {"refuse": pb.EXCEEDED_REFUSE, "queue": pb.EXCEEDED_QUEUE, "downgrade": pb.EXCEEDED_DOWNGRADE}


def to_limits(found: TenantLimits) -> pb.Limits:
    """The message for a tenant's limits."""
    return pb.Limits(
        tenant=found.tenant,
        limits=[_limit(one) for one in found.limits],
        running_requests=found.running,
        waiting_requests=found.waiting,
        max_context_tokens=found.max_context_tokens,
        max_output_tokens=found.max_output_tokens,
        currency=found.currency,
    )


def to_usage(found: TenantUsed) -> pb.Usage:
    """The message for what a tenant has used."""
    return pb.Usage(tenant=found.tenant, day=_period(found.day), month=_period(found.month), currency=found.currency)


def interval_of(message: pb.WatchUsageRequest) -> int:
    """Seconds between two messages of a watch.

    Raises:
        InvalidRequestError: they are too few or too many.
    """
    found: int = message.interval_seconds if message.HasField("interval_seconds") else DEFAULT_INTERVAL_S
    if not 1 <= found <= MAX_INTERVAL_S:
        raise InvalidRequestError(f"interval_seconds must be 1 to {MAX_INTERVAL_S}", param="interval_seconds")
    return found


def fill(message: M, padding: Padding) -> M:
    """Fill a message up to one of the few lengths that padded answers have; returns it."""
    size = message.ByteSize() + LENGTH_BYTES + SHORTEST_PADDING
    message.padding = bytes(padding.answer_bytes(size) - size + SHORTEST_PADDING)
    return message


def _limit(one: LimitState) -> pb.Limit:
    return pb.Limit(
        name=one.name,
        unit=_UNITS[one.unit],
        limit=one.limit,
        most=one.most,
        left=one.left,
        full_in_seconds=one.full_in_s,
        exceeded=_EXCEEDED[one.exceeded],
    )


def _period(period: PeriodUse) -> pb.PeriodUsage:
    return pb.PeriodUsage(
        begins_at=Timestamp(seconds=period.begins_at),
        ends_at=Timestamp(seconds=period.ends_at),
        models=[_model(one) for one in period.models],
        end_users=[_user(one) for one in period.users],
    )


def _model(one: ModelUse) -> pb.ModelUsage:
    return pb.ModelUsage(
        model=one.model,
        requests=one.requests,
        input_tokens=one.input_tokens,
        cached_tokens=one.cached_tokens,
        output_tokens=one.output_tokens,
        cost=one.cost,
        reasoning_tokens=one.reasoning_tokens,
    )


def _user(one: UserUse) -> pb.EndUserUsage:
    return pb.EndUserUsage(
        end_user=one.user,
        requests=one.requests,
        input_tokens=one.input_tokens,
        cached_tokens=one.cached_tokens,
        output_tokens=one.output_tokens,
        cost=one.cost,
        reasoning_tokens=one.reasoning_tokens,
    )
