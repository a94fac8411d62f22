"""What came back of one request, in one word: right, or a documented error, or something that must not be. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from appliance.common import errors

MOST_APART = 1.5e-4
"""Difference in a number of a vector that rounding explains: one in the last digit that is kept. With bfloat16 dot
products the last bits of a row's sums depend on the rows beside it."""

RIGHT = "right"
LEFT = "left"
"""We went away ourselves, as planned."""
CUT = "cut"
"""The connection ended, or was refused, without a word: what a client sees of a process that died."""
WRONG = "wrong"
"""Another answer than the reference's: the worst there is."""
UNTYPED = "untyped"
"""An error that the documents do not name, or an answer that is no answer."""

BREACHES = frozenset({WRONG, UNTYPED})
"""Never excused by any fault."""

AWAY = frozenset({"unavailable", "deadline_exceeded", CUT})
"""What requests may meet while a part of the appliance is dead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``kind``: one of the words above, or the reason of a documented error in lower case."""

    kind: str
    text: str = ""
    """Of the answer, or what was odd about it."""


def _wires(base: type[errors.ApplianceError]) -> Iterator[errors.Wire]:
    for child in base.__subclasses__():
        yield child.wire
        yield from _wires(child)


BY_HTTP = {(wire.http, wire.kind, wire.code): wire.reason.lower() for wire in _wires(errors.ApplianceError)}
"""Status, type and code to reason: all that HTTP may answer."""

BY_CODE = {(wire.kind, wire.code): wire.reason.lower() for wire in _wires(errors.ApplianceError)}
"""Type and code to reason: an error in the middle of a stream has no status any more."""

BY_GRPC = {(wire.grpc, wire.reason): wire.reason.lower() for wire in _wires(errors.ApplianceError)}


def of_error(status: int | None, body: bytes) -> Answer:
    """The answer that an error's body makes; ``status`` is None in the middle of a stream."""
    try:
        told = json.loads(body)["error"]
        key = told["type"], told["code"]
        message = str(told["message"])
    except (ValueError, KeyError, TypeError):
        return Answer(UNTYPED, f"{status}: {body[:120]!r}")
    reason = BY_CODE.get(key) if status is None else BY_HTTP.get((status, *key))
    if reason is None:
        return Answer(UNTYPED, f"{status} {key[0]} {key[1]}: {message[:120]}")
    if reason == "internal":
        # Documented, and a defect all the same.
        return Answer(UNTYPED, f"internal error: {message[:120]}")
    return Answer(reason, message[:120])


def of_stream(body: bytes) -> Answer:
    """The answer in a stream of events, read to its end; one that does not say its end was cut."""
    text, done = "", False
    for line in body.split(b"\n"):
        data = line.removeprefix(b"data: ").strip() if line.startswith(b"data: ") else b""
        if data == b"[DONE]":
            done = True
        elif data:
            try:
                event = json.loads(data)
            except ValueError:
                # Half an event is what a cut leaves.
                break
            if "error" in event:
                return of_error(None, data)
            text += "".join(_piece(choice) for choice in event["choices"])
    return Answer(RIGHT, text) if done else Answer(CUT, text)


def _piece(choice: dict[str, Any]) -> str:
    said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return said + (f"|{choice['finish_reason']}" if choice.get("finish_reason") else "")


def of_document(body: bytes) -> Answer:
    """The answer in a collected completion, chat completion or list of vectors."""
    try:
        found = json.loads(body)
        if "data" in found:
            return Answer(RIGHT, json.dumps([[round(x, 4) for x in row["embedding"]] for row in found["data"]]))
        parts = []
        for choice in found["choices"]:
            said = choice["text"] if "text" in choice else choice["message"]["content"]
            parts.append(f"{said}|{choice['finish_reason']}")
        return Answer(RIGHT, "".join(parts))
    except (ValueError, KeyError, TypeError) as error:
        return Answer(UNTYPED, f"no answer: {error}: {body[:120]!r}")


def _apart(told: str, right: str) -> float:
    """Return the largest difference between numbers of two lists of vectors; infinite for anything else."""
    if not (told.startswith("[[") and right.startswith("[[")):
        return inf
    try:
        ours, theirs = json.loads(told), json.loads(right)
    except ValueError:
        return inf
    if list(map(len, ours)) != list(map(len, theirs)):
        return inf
    return max(abs(a - b) for mine, yours in zip(ours, theirs, strict=True) for a, b in zip(mine, yours, strict=True))


def compare(answer: Answer, right: str) -> Answer:
    """Return the answer, or ``WRONG``: one that came to its end must be the reference's, and one that was cut its
    beginning. Vectors may differ by rounding."""
    if answer.kind == RIGHT and answer.text != right:
        apart = _apart(answer.text, right)
        if apart <= MOST_APART:
            return answer
        return Answer(WRONG, f"{answer.text[:160]!r} in place of {right[:160]!r}, {apart:g} apart")
    if answer.kind == CUT and not right.startswith(answer.text):
        return Answer(WRONG, f"{answer.text[:160]!r} before a cut, in place of {right[:160]!r}")
    return answer
