"""What the APIs of this front end have in common: a request to parse, a writer of the answer, a form of errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from appliance.common.errors import ApplianceError
from appliance.gateway.front.padding import Padding
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    PromptTokens,
    Started,
)


class AnswerWriter(Protocol):
    """Writes the answer to one request in the form of its API."""

    def record_bytes(self, padding: Padding) -> int:
        """Return the bytes of each record of the answer, where it is streamed and padded."""
        ...

    def opening(self, started: Started) -> bytes:
        """Return the events before any output."""
        ...

    def event(self, event: Event) -> bytes:
        """Return the events for an event of the session, but for its end; empty where there is nothing to tell."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """Return the events for new output; empty when there is nothing to show yet."""
        ...

    def closing(self, finished: Finished) -> list[bytes]:
        """Return the last events."""
        ...

    def collected(self, events: Sequence[PromptTokens | Delta | ChoiceFinished], finished: Finished) -> dict[str, Any]:
        """Return the whole answer as one object, in which ``Rows`` may stand for lists."""
        ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request, and what only the answer's form depends on."""

    request: GenerateRequest
    make_writer: Callable[[GenerateRequest, int], AnswerWriter]
    """Makes the writer of the answer to the request, whose model is known by then; the answer says that it was made at
    this time, in Unix seconds."""
    ignored: tuple[str, ...]
    """Names of fields that had a value and no effect."""
    others: tuple[GenerateRequest, ...] = ()
    """Requests for the prompts behind the first, where there are several; they differ in prompt and id alone."""
    items: bytes | None = None
    """JSON of the items that the answer follows, where it is to be kept."""
    background: bool = False
    """Whether the request goes on without its client."""


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API writes an error; the text is the request's id."""

    document: Callable[[ApplianceError, str], dict[str, Any]]
    """Makes the body of an answer."""
    event: Callable[[ApplianceError, str], bytes]
    """Makes the last event of a stream that fails."""
