"""Input of the evaluator: the requested access, and the tenant's current usage."""

from __future__ import annotations

from dataclasses import dataclass

from policy.feature import Feature
from policy.limits import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What content rules look at (``policy.content``)."""

    bytes: int = 0
    """Bytes of the conversation with its tools as compact JSON, or of the text, or four for each token id; and of the
    grammar, if there is one."""
    fields: frozenset[str] = frozenset()
    """Fields that ask for something, by the names of ``policy.content.REQUEST_FIELDS``."""
    roles: frozenset[str] = frozenset()
    """Roles of its messages, or ``plain``; none where it asks for no output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRequest:
    """The properties of one request that the policy evaluates."""

    tenant: str
    """Tenant id returned by ``policy.evaluate.principal`` for the caller's credential."""
    model: str
    """Name of the served model."""
    input_tokens: int | None
    """Exact number of prompt tokens, or None before the prompt is tokenised."""
    max_output_tokens: int | None
    """Output tokens requested for each choice: None for as many as allowed, 0 for none (embeddings)."""
    longest_input: int | None = None
    """Tokens of the longest text when there are several, each of which must fit the context; None for a single
    prompt."""
    feature: Feature | None = None
    """What the request asks for that can be withheld."""
    content: Content | None = None
    """What the request holds; None where it was looked at already, or there is none."""
    choices: int = 1
    """Number of outputs for the one prompt."""
    uncounted: bool = False
    """Whether the prompt has ``input_tokens`` or more, and nobody counted further."""
    address: str | None = None
    """Address of the caller; None where it is not asked about. The gateway compares it before there is a request."""
    region: str | None = None
    """Region of the appliance, empty for none; None where it is not asked about."""
    unix_s: float | None = None
    """Unix time of the request; None where it is not asked about."""
    alias: str = ""
    """Route by which the caller asked for the model; empty: by the model's own name."""
    adapter: str = ""
    """Whole name of the adapter with which the model serves it; empty: without one."""
    end_user: str = ""
    """Pseudonym of the tenant's user for whom it is; empty: not named."""
    asleep: bool = False
    """Whether the model sleeps, so that the request would wake it."""
    external: bool = False
    """Whether the model is computed outside of the appliance."""
    batch: bool = False
    """Whether it is a line of a batch: it has a price of its own, and the tenant must be allowed batches."""

    def __post_init__(self) -> None:
        if self.input_tokens is not None and self.input_tokens < 1:
            raise ValueError("a prompt has at least one token")
        if self.max_output_tokens is not None and self.max_output_tokens < 0:
            raise ValueError("a number of output tokens is not negative")
        if self.choices < 1:
            raise ValueError("at least one choice must be asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Spend of a tenant in the day and the month of a request, in billionths of the currency's unit: settled costs and
    reservations."""

    day: int
    month: int
    day_left_s: float
    """Seconds until the next day begins, UTC."""
    month_left_s: float
    """Seconds until the next month begins, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUserUsage:
    """Usage of one end user just before the request is admitted; a bucket of None counts as full."""

    concurrency: int = 0
    """Number of requests admitted and not yet finished."""
    request_bucket: Bucket | None = None
    output_bucket: Bucket | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of a tenant just before the request is admitted."""

    concurrency: int
    """Number of requests admitted and not yet finished."""
    request_bucket: Bucket
    token_bucket: Bucket
    input_bucket: Bucket | None = None
    """Bucket of prompt tokens, where these have a rate of their own; None counts as full."""
    output_bucket: Bucket | None = None
    """Bucket of output tokens likewise."""
    queued: int = 0
    """Number of the tenant's requests that wait for a limit."""
    kv_tokens: int = 0
    """Tokens of its running requests whose prompts are counted: prompts and most outputs."""
    end_user: EndUserUsage | None = None
    """Usage of the end user for whom the request is; None where these have no limits."""
    spend: Spend | None = None
    """Spend of a tenant that has a limit of it; None counts as nothing spent."""
