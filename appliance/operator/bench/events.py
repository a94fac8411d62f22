"""Server-sent events of a completion stream, told apart at the least cost for each token; pure.

Only the first events (until one has text) and the last few are read as JSON; of those between, it is checked that they
are one JSON object by their first and last byte. So a token costs about a microsecond, and yet the time of the first
token, the finish reason, the usage and an error in the stream are read and not guessed.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from typing import Any

TAIL = 4
"""Last events that are kept to be read: finish reason, usage, and what some servers put between them."""

HEAD = 8
"""First events that are read to find the first with text."""

MAX_EVENT_BYTES = 1 << 20
"""Bytes without an end of event after which the stream is malformed."""


class MalformedStreamError(Exception):
    """The stream is not the event stream of a completion."""


class EventReader:
    """Reads one stream; ``feed`` is called with whatever bytes came, ``finish`` at the end."""

    __slots__ = ("_begun", "_count", "_rest", "_tail", "arrivals", "done", "error", "finish_reason", "usage")

    def __init__(self, arrivals: array[float]) -> None:
        self.arrivals = arrivals
        self.done = False
        """OpenAI's end mark has come."""
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self._rest = b""
        self._tail: deque[tuple[bytes, bool]] = deque(maxlen=TAIL)
        self._begun = False
        self._count = 0

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at ``now``.

        Raises:
            MalformedStreamError: an event that no completion stream has.
        """
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedStreamError("an event has no end")
        for event in events:
            self._event(event, now)

    def finish(self) -> None:
        """Read the last events; call once, when the stream has ended.

        Raises:
            MalformedStreamError: the stream ended inside an event, or its last events are no JSON.
        """
        if self._rest.strip():
            raise MalformedStreamError("the stream ended inside an event")
        early = self.usage
        self.usage = None
        timed = len(self.arrivals)
        # From the end: events without text lose their time, up to the last one with text.
        for payload, has_time in reversed(self._tail):
            text = self._read(payload)
            if has_time:
                timed -= 1
                if not text:
                    del self.arrivals[timed]
        # A server may repeat its counts in every event: the last ones hold.
        if self.usage is None:
            self.usage = early

    def _event(self, event: bytes, now: float) -> None:
        payload = event[5:].strip() if event.startswith(b"data:") else _payload(event)
        if payload is None:
            return
        if payload == b"[DONE]":
            self.done = True
            return
        if not payload.startswith(b"{") or not payload.endswith(b"}"):
            raise MalformedStreamError("an event is not a JSON object")
        if self._begun:
            self.arrivals.append(now)
            self._tail.append((payload, True))
            return
        self._count += 1
        self._begun = self._read(payload)
        if self._begun or self._count > HEAD:
            self._begun = True
            self.arrivals.append(now)

    def _read(self, payload: bytes) -> bool:
        """Take what an event says about the answer; tells whether it holds text."""
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise MalformedStreamError("an event is not JSON") from error
        if isinstance(event.get("error"), dict):
            self.error = event["error"]
        if isinstance(event.get("usage"), dict) and self.usage is None:
            self.usage = event["usage"]
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return False
        choice = choices[0]
        if isinstance(choice.get("finish_reason"), str) and self.finish_reason is None:
            self.finish_reason = choice["finish_reason"]
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        return bool(text)


def _payload(event: bytes) -> bytes | None:
    """The data of an event that does not begin with it; None for comments and events without data."""
    lines = [line for line in event.split(b"\n") if line]
    data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    if not data and any(not line.startswith((b":", b"event:", b"id:", b"retry:")) for line in lines):
        raise MalformedStreamError("a line is no event stream's")
    return b"\n".join(data) if data else None
