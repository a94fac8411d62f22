"""Schema of content rules: what requests may hold."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from policy.content import REQUEST_FIELDS, ROLES

MAX_CONTENT_BYTES = 64 << 20
"""Largest limit of a request's content: no front end takes more."""

SHOWN_CHARACTERS = 64
"""Characters of a wrong name that a message repeats."""


def _checked_field(value: str) -> str:
    if value not in REQUEST_FIELDS:
        close = difflib.get_close_matches(value, REQUEST_FIELDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(REQUEST_FIELDS)}"
        text = f"{value[:SHOWN_CHARACTERS]!r} is no field of requests that can be denied; {hint}"
        raise PydanticCustomError("policy", "{text}", {"text": text})
    return value


RequestField = Annotated[
    str, AfterValidator(_checked_field), WithJsonSchema({"type": "string", "enum": [*REQUEST_FIELDS]})
]
Role = Literal["system", "user", "assistant", "tool", "plain"]


class ContentSchema(BaseModel):
    """What requests may hold."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    max_request_bytes: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CONTENT_BYTES,
        description="Bytes of one request's content: of the conversation with its tools as compact JSON, or of the "
        "text, or four for each token id; the grammar counts too. Left out: no limit of their own.",
    )
    denied_fields: list[RequestField] = Field(
        default_factory=list,
        max_length=len(REQUEST_FIELDS),
        description="Fields that are refused by name, over each API under the name that it has there. A field that "
        "asks for nothing, such as logprobs: false or n: 1, is not refused.",
    )
    roles: list[Role] = Field(
        default_factory=list,
        max_length=len(ROLES),
        description="Roles of messages that are taken; instructions of any API are messages of the role system. plain "
        "is a prompt that is no conversation, in which any role can be written. Left out: all.",
    )
