"""What a tenant may see of its own account: limits with what is left of them, and what it has used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LimitUnit(StrEnum):
    """LimitUnit of a limit's numbers."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    BILLIONTHS = "billionths"
    """Parts of one unit of the policy's currency."""


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit of a tenant, and what is left of it now."""

    name: str
    """Its key in the policy, as ``requests_per_minute``."""
    unit: LimitUnit
    limit: int
    most: int
    """What can be left at most: the burst of a rate, and the limit itself elsewhere."""
    left: int
    """At least 0."""
    full_in_s: float | None
    """Seconds until ``most`` is left again if nothing is used meanwhile; None where time alone gives nothing back."""
    exceeded: str
    """``refuse``, ``queue`` or ``downgrade``: what becomes of a request beyond the limit."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant now."""

    tenant: str
    limits: tuple[LimitState, ...]
    running: int
    """Requests admitted and not yet finished; each choice counts."""
    waiting: int
    """Requests that wait in the gateway for a limit."""
    max_context_tokens: int
    max_output_tokens: int
    currency: str
    """As the policy has it; empty where it names none."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What a tenant has used of one model."""

    model: str
    """Empty in the row of all models that are not listed."""
    requests: int
    input_tokens: int
    cached_tokens: int
    """Tokens of the input that were found in the cache."""
    output_tokens: int
    cost: int
    """Billionths of the currency's unit, at the prices of their time."""
    reasoning_tokens: int = 0
    """Output tokens that are reasoning, a part of ``output_tokens``."""


@dataclass(frozen=True, slots=True)
class UserUse:
    """What requests of a tenant that name one end user have used; numbers are those of ``ModelUse``."""

    user: str
    """Pseudonym (``appliance.common.usage.pseudonyms``); empty in the row of all end users that are not listed."""
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PeriodUse:
    """What a tenant has used in a day or a month, in UTC, by model and end user: those with the most tokens first."""

    begins_at: int
    """Unix time."""
    ends_at: int
    """Unix time at which the next one begins."""
    models: tuple[ModelUse, ...]
    users: tuple[UserUse, ...] = ()
    """Requests that name no end user are in none of them."""


@dataclass(frozen=True, slots=True)
class TenantUsed:
    """What a tenant has used; requests that still run are in no sum."""

    tenant: str
    day: PeriodUse
    month: PeriodUse
    currency: str
