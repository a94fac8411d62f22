"""Schema of a limit that is a number or a mapping: rates with their burst, and requests at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_REQUESTS = 1_000_000
"""Largest rate and burst of requests."""
MAX_TOKENS = 1_000_000_000
"""Largest rate and burst of tokens."""
MAX_CONCURRENCY = 4_096
MAX_KV_TOKENS = 1_000_000_000
"""Largest number of tokens whose KV a tenant's running requests may need at once."""
MAX_BURST_MINUTES = 60
"""Largest burst in minutes of its rate, so that no request is told to wait for longer than two hours, and the rounding
of times stays below ``policy.limits.ROUNDING_S``."""

NUMBER, MAPPING = "[number]", "[mapping]"
"""Marks of the two forms in the places of pydantic's errors; they are no keys of the file."""

Exceeded = Annotated[
    Literal["refuse", "queue", "downgrade"],
    Field(
        description="What becomes of a request beyond the limit. refuse: an error with the time to wait. queue: it "
        "waits, first come, first served, with end users by turns, within max_queued_requests and max_queue_s. "
        "downgrade: it is served with priority low, up to once the burst more; beyond that it is refused."
    ),
]
_BURST = "What a full bucket holds, at most 60 minutes of the rate. Left out: one minute."


def _form(value: object) -> str:
    return MAPPING if isinstance(value, dict | BaseModel) else NUMBER


class _RateSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    rate: int
    burst: int | None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.burst is not None and self.burst > self.rate * MAX_BURST_MINUTES:
            text = f"the burst is at most {MAX_BURST_MINUTES} minutes of the rate: {self.rate * MAX_BURST_MINUTES}"
            raise PydanticCustomError("policy", "{text}", {"text": text})
        return self


class RequestRateSchema(_RateSchema):
    """Rate of requests with its burst."""

    rate: int = Field(ge=1, le=MAX_REQUESTS, description="Requests a minute.")
    burst: int | None = Field(default=None, ge=1, le=MAX_REQUESTS, description=_BURST)
    exceeded: Exceeded = "refuse"


class TokenRateSchema(_RateSchema):
    """Rate of tokens with its burst; input_tokens_per_minute and output_tokens_per_minute take the same keys."""

    rate: int = Field(ge=1, le=MAX_TOKENS, description="Tokens a minute.")
    burst: int | None = Field(default=None, ge=1, le=MAX_TOKENS, description=_BURST)
    exceeded: Exceeded = "refuse"


class ConcurrencySchema(BaseModel):
    """Number of requests at once, with what becomes of others. Twice the number run at once if others are
    downgraded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    at_once: int = Field(ge=1, le=MAX_CONCURRENCY, description="Requests admitted and not yet finished.")
    exceeded: Exceeded = "refuse"


class KvTokensSchema(BaseModel):
    """Tokens of KV that running requests may need at once, with what becomes of others. Twice the number if others are
    downgraded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    at_once: int = Field(ge=1, le=MAX_KV_TOKENS, description="Tokens of running requests, prompts and most outputs.")
    exceeded: Exceeded = "refuse"


RequestRate = Annotated[
    Annotated[int, Field(ge=1, le=MAX_REQUESTS), Tag(NUMBER)] | Annotated[RequestRateSchema, Tag(MAPPING)],
    Discriminator(_form),
]
TokenRate = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS), Tag(NUMBER)] | Annotated[TokenRateSchema, Tag(MAPPING)],
    Discriminator(_form),
]
Concurrency = Annotated[
    Annotated[int, Field(ge=1, le=MAX_CONCURRENCY), Tag(NUMBER)] | Annotated[ConcurrencySchema, Tag(MAPPING)],
    Discriminator(_form),
]
KvTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_KV_TOKENS), Tag(NUMBER)] | Annotated[KvTokensSchema, Tag(MAPPING)],
    Discriminator(_form),
]

RATES = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "input_tokens_per_minute": "input_tokens",
    "output_tokens_per_minute": "output_tokens",
    "concurrency": "concurrency",
    "kv_tokens": "kv_tokens",
}
"""Keys that may have a mapping -> beginning of the names of its other values in ``policy.model.Limits``."""

KNOWN = {key: tuple(TokenRateSchema.model_fields) for key in RATES} | {
    "concurrency": tuple(ConcurrencySchema.model_fields),
    "kv_tokens": tuple(KvTokensSchema.model_fields),
}
"""Keys of the mapping at each of these keys."""


def without_marks(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the place of one of pydantic's errors as a path of the file."""
    return tuple(part for part in place if part not in (NUMBER, MAPPING))


def flattened(values: dict[str, Any]) -> dict[str, Any]:
    """Return limits as ``policy.model.Limits`` has them: a mapping as several values. A burst of one minute is none."""
    found = dict(values)
    for key, name in RATES.items():
        value = found[key]
        if not isinstance(value, dict):
            continue
        found[key] = value["at_once"] if "at_once" in value else value["rate"]
        found[f"{name}_exceeded"] = value["exceeded"]
        if value.get("burst") not in (None, found[key]):
            found[f"{name}_burst"] = value["burst"]
    return found
