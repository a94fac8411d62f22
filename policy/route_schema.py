"""Schema of the policy's routes: names that lead to one of several models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_ROUTES = 256
"""Routes of all files together."""
MAX_TARGETS = 16
"""Models that one route chooses from, and as many in its fallback: a request looks at the state of each."""
MAX_WEIGHT = 1_000
"""Largest weight of a target; the smallest is 1, so that a share of a canary can be a thousandth."""
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"

ModelName = Annotated[str, StringConstraints(pattern=MODEL_NAME)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class TargetSchema(_Strict):
    """Model that a route chooses from."""

    model: ModelName = Field(description="The served model; no other route.")
    weight: int = Field(
        default=1, ge=1, le=MAX_WEIGHT, description="Share of the requests, relative to the other targets."
    )


class RouteSchema(_Strict):
    """Models that a name leads to which clients send as a model's: an alias. A tenant whose models match the alias may
    use them by it, and by it alone."""

    to: list[TargetSchema] = Field(
        min_length=1, max_length=MAX_TARGETS, description="Models that each request is given to one of."
    )
    choose: Literal["weight", "cheapest"] = Field(
        default="weight",
        description="weight: by shares; requests of a tenant with the same prompt_cache_key go to the same model. "
        "cheapest: by the sum of the prices of prompt and output tokens for the tenant's class; models without a price "
        "come last. When the cheapest cannot serve, the next one does.",
    )
    fallback: list[ModelName] = Field(
        default=[],
        max_length=MAX_TARGETS,
        description="Models that are tried in this order when the chosen one cannot serve.",
    )
    fall_back_when: list[Literal["unready", "busy", "asleep"]] = Field(
        default=["unready"],
        min_length=1,
        max_length=3,
        description="When a model is passed over. unready: it is starting, hangs, or is not served. busy: many "
        "requests wait in it, or its KV is full; never for a tenant of class strict. asleep: it sleeps or is just "
        "waking. It then wakes behind the request, if the tenant may wake models and no other has to sleep for it. "
        "Where asleep is left out, a sleeping model wakes for the request, which waits.",
    )
