"""Messages between hosts of a fleet as a store keeps them: a proof under the fleet's key, then JSON.

The proof is checked before anything is parsed, so the store can only give back what a host has written, at any time and
in any place. Tenants stand there by tags under the key: the store learns how many run short, and of what.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

from appliance.gateway.fleet.lending import KINDS, MAX_AMOUNTS, LimitAmount, LoanAnswer, LoanQuestion, Message

MAX_BYTES = 64 << 10
"""Longest message: 16 answers of 64 amounts take 50 kB."""

MAX_AMOUNT = 1 << 53
"""Bound of numbers, which every JSON reader has exactly."""

TAG_CHARS = 24
"""Hex digits of a tenant's tag: 96 bits, so that no two tenants share one."""

FLEET_CHARS = 12
PROOF_CHARS = 64
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode


class MessageError(ValueError):
    """The bytes are no message of a host with this fleet's key."""


class Sealer:
    """Writes and reads the messages of one fleet."""

    def __init__(self, fleet_key: bytes) -> None:
        """``fleet_key`` is that of ``listen.fleet_key``; what is used here is made of it for this purpose alone."""
        self._key = hmac.new(fleet_key, b"athanor limits", hashlib.sha256).digest()
        self.fleet = hmac.new(self._key, b"fleet", hashlib.sha256).hexdigest()[:FLEET_CHARS]
        """Names the fleet in a store that several use."""

    def tag(self, tenant: str) -> str:
        """Return the tag of a tenant."""
        return hmac.new(self._key, b"tenant " + tenant.encode(), hashlib.sha256).hexdigest()[:TAG_CHARS]

    def write(self, message: Message) -> bytes:
        """Return a message's bytes."""
        question = message.question
        document = {
            "from": message.sender,
            "asks": None if question is None else [question.life, question.count, self._rows(question.amounts)],
            "answers": {
                name: [one.life, one.count, one.day, self._rows(one.amounts)] for name, one in message.answers.items()
            },
        }
        text = _COMPACT(document).encode()
        return self._proof(text) + text

    def read(self, data: bytes, sender: str, tenant_of: Callable[[str], str | None]) -> Message:
        """Return the message that ``sender`` wrote; amounts of tenants that are not known here are left out.

        Raises:
            MessageError: it is none, or another host's.
        """
        if len(data) > MAX_BYTES:
            raise MessageError("longer than a message can be")
        proof, text = data[:PROOF_CHARS], data[PROOF_CHARS:]
        if not hmac.compare_digest(proof, self._proof(text)):
            raise MessageError("written without this fleet's key")
        try:
            document = json.loads(text)
            found = _message(document, tenant_of)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MessageError(f"written by a host of another version: {error}") from error
        if found.sender != sender:
            raise MessageError("another host's")
        return found

    def _proof(self, text: bytes) -> bytes:
        return hmac.new(self._key, b"message " + text, hashlib.sha256).hexdigest().encode()

    def _rows(self, amounts: tuple[LimitAmount, ...]) -> list[list[Any]]:
        return [[self.tag(one.tenant), one.kind, one.amount] for one in amounts]


def _message(document: Mapping[str, Any], tenant_of: Callable[[str], str | None]) -> Message:
    asks = document["asks"]
    question = None
    if asks is not None:
        life, count, rows = asks
        question = LoanQuestion(_text(life), _number(count), _amounts(rows, tenant_of))
    answers = {}
    for name, (life, count, day, rows) in document["answers"].items():
        answers[name] = LoanAnswer(_text(life), _number(count), _amounts(rows, tenant_of), _number(day))
    return Message(_text(document["from"]), question, answers)


def _amounts(rows: list[Any], tenant_of: Callable[[str], str | None]) -> tuple[LimitAmount, ...]:
    found = []
    for tag, kind, amount in rows[:MAX_AMOUNTS]:
        if kind in KINDS and (tenant := tenant_of(_text(tag))) is not None:
            found.append(LimitAmount(tenant, kind, _number(amount)))
    return tuple(found)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a number where a text belongs")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_AMOUNT:
        raise ValueError("not a whole number in its bounds")
    return value
