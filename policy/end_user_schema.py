"""Schema of the limits of a tenant's end users."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from policy.rate_schema import MAX_CONCURRENCY, MAX_REQUESTS, MAX_TOKENS


class EndUsersSchema(BaseModel):
    """Limits of each end user of the tenant, whom requests name by user or safety_identifier. All requests that name
    none count as one end user's."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=MAX_REQUESTS, description="Requests a minute, which is also the burst. Left out: none."
    )
    output_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS,
        description="Output tokens a minute, which is also the burst; reserved and settled as the tenant's. Left out: "
        "none.",
    )
    concurrency: int | None = Field(
        default=None, ge=1, le=MAX_CONCURRENCY, description="Requests admitted and not yet finished. Left out: none."
    )
