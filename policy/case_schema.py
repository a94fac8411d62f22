"""Schema of a file of policy cases: questions to a policy and the decisions that are expected."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from policy.content_schema import RequestField, Role
from policy.decision import Effect, Reason
from policy.feature import Feature
from policy.model import Namespace
from policy.route_schema import MODEL_NAME, ModelName
from policy.schema import Credential, RegionName, TenantId
from policy.simulate import DAY_S, MONTH_S

MAX_CASES = 10_000
"""Largest number of cases in one file."""


def _checked_moment(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        message = "must be a time such as 2026-11-25T03:00Z"
        raise PydanticCustomError("policy", "{text}", {"text": message}) from None
    return value


Moment = Annotated[str, AfterValidator(_checked_moment)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class AskSchema(_Strict):
    """Request to decide on; exactly one of tenant and credential names the caller."""

    tenant: TenantId | None = Field(default=None, description="Tenant that asks.")
    credential: Credential | None = Field(default=None, description="Credential that the request comes with.")
    model: Annotated[str, StringConstraints(pattern=MODEL_NAME)] = Field(
        description="Name of the served model, or of a route."
    )
    input_tokens: int | None = Field(
        default=None, ge=1, description="Prompt tokens. Left out: only the decision before tokenising is taken."
    )
    longest_input: int | None = Field(default=None, ge=1, description="Tokens of the longest of several texts.")
    max_tokens: int | None = Field(
        default=None, ge=0, description="Output tokens asked for, for each choice. Left out: as many as allowed."
    )
    choices: int = Field(default=1, ge=1, description="Outputs asked for (n).")
    feature: Feature | None = Field(
        default=None, strict=False, description="What the request uses that can be withheld."
    )
    content_bytes: int = Field(default=0, ge=0, description="Bytes of its content.")
    fields: list[RequestField] = Field(default_factory=list, description="Fields that it uses and that can be denied.")
    roles: list[Role] = Field(default_factory=list, description="Roles of its messages; plain: it is no conversation.")
    address: str | None = Field(default=None, description="Address of the caller. Left out: not asked about.")
    region: Literal[""] | RegionName | None = Field(
        default=None, description="Region of the appliance, empty for none. Left out: not asked about."
    )
    at: Moment | None = Field(
        default=None, description="Time of the request, such as 2026-11-25T03:00Z; UTC. Left out: not asked about."
    )
    uncounted: bool = Field(default=False, description="Whether the prompt has input_tokens or more.")
    admitted: bool = Field(
        default=False, description="Whether the decision before tokenising was taken already; needs input_tokens."
    )
    served: ModelName | None = Field(
        default=None,
        description="Model that the route chose when the request was admitted, before this policy; needs admitted.",
    )
    draw: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Where the request falls among the shares of a route, from 0 on: 0.96 is beyond 95 of 100.",
    )


class UseSchema(_Strict):
    """What the tenant uses just before the request."""

    running: int = Field(default=0, ge=0, description="Requests admitted and not yet finished.")
    requests_left: int | None = Field(default=None, description="Requests left in this minute. Left out: all.")
    tokens_left: int | None = Field(
        default=None, description="Tokens left in this minute; below 0 is debt. Left out: all."
    )
    input_tokens_left: int | None = Field(
        default=None, description="Prompt tokens left of input_tokens_per_minute. Left out: all."
    )
    output_tokens_left: int | None = Field(
        default=None, description="Output tokens left of output_tokens_per_minute. Left out: all."
    )
    queued: int = Field(default=0, ge=0, description="Requests that wait for a limit.")
    kv_tokens_held: int = Field(default=0, ge=0, description="Tokens of KV that running requests may need.")
    end_user_running: int = Field(default=0, ge=0, description="Requests of the end user that run.")
    end_user_requests_left: int | None = Field(
        default=None, description="Requests left of the end user's requests_per_minute. Left out: all."
    )
    end_user_output_tokens_left: int | None = Field(
        default=None, description="Output tokens left of the end user's output_tokens_per_minute. Left out: all."
    )
    spent_today: float = Field(default=0.0, ge=0, description="Spent since midnight UTC, in units of the currency.")
    spent_this_month: float = Field(default=0.0, ge=0, description="Spent since the first of the month.")
    day_left_s: float = Field(default=DAY_S, ge=0, description="Seconds until the next day begins.")
    month_left_s: float = Field(default=MONTH_S, ge=0, description="Seconds until the next month begins.")
    unready: list[ModelName] = Field(default_factory=list, description="Models that cannot serve. Left out: all can.")
    busy: list[ModelName] = Field(default_factory=list, description="Models in which requests wait.")
    asleep: list[ModelName] = Field(default_factory=list, description="Models that sleep and can be woken.")
    external: list[ModelName] = Field(
        default_factory=list, description="Models that are computed outside of the appliance."
    )


class ExpectSchema(_Strict):
    """Decision that is expected; what is left out is not compared."""

    effect: Effect = Field(strict=False, description="allow, wait or deny.")
    reason: Reason | None = Field(default=None, strict=False, description="Reason of the decision.")
    rule: str | None = Field(default=None, description="Path of the rule that decides.")
    limit: int | None = Field(default=None, description="Limit of the rule; of spend in billionths.")
    actual: int | None = Field(default=None, description="Number that is compared with the limit.")
    retry_after_s: float | None = Field(default=None, description="Seconds after which the request may pass.")
    granted: int | None = Field(default=None, description="Output tokens granted for each choice.")
    downgraded: str | None = Field(
        default=None, description="Key of the limit for which it is served with priority low; null for none."
    )
    namespace: Namespace | None = Field(
        default=None, strict=False, description="Who finds the KV blocks that the request leaves: tenant or user."
    )
    model: ModelName | None = Field(default=None, description="Model that serves, where a route is asked for.")


def _expanded(value: object) -> object:
    return {"effect": value} if isinstance(value, str) else value


class CaseSchema(_Strict):
    """One question and the expected decision."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(description="What the case shows.")
    ask: AskSchema = Field(description="Request to decide on.")
    use: UseSchema = Field(default_factory=UseSchema, description="Load of the tenant; nothing by default.")
    expect: Annotated[
        ExpectSchema, BeforeValidator(_expanded, json_schema_input_type=Literal["allow", "wait", "deny"] | ExpectSchema)
    ] = Field(description="Expected decision: allow, wait, deny, or a mapping with more of it.")


class CaseFileSchema(_Strict):
    """Cases of one policy. The policy is written here, named by its path, or given on the command line."""

    policy: str | None = Field(default=None, description="Text of the policy.")
    policy_file: str | None = Field(
        default=None, min_length=1, description="Path of the policy, from this file's folder."
    )
    cases: list[CaseSchema] = Field(min_length=1, max_length=MAX_CASES, description="Cases, in any order.")


def case_schema_text() -> str:
    """Return the JSON Schema (draft 2020-12) of a file of cases, as published for editors."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **CaseFileSchema.model_json_schema(by_alias=True),
    }
    return json.dumps(schema, indent=2) + "\n"
