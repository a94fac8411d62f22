"""Calls and results of a conversation, as a format's chat templates take them.

Clients send ids that any server made, and a conversation may have begun with another model. Templates of one family
insist on ids of one length, those of another on one call in a message, and many read the name of the tool from its
result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.output.format import CallFormat

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Message = Mapping[str, Any]


def fit_calls(messages: Sequence[Message], form: CallFormat | None) -> Sequence[Message]:
    """Return the messages with their calls as the format has them; messages without calls stay as they are."""
    if not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return messages
    fitted = _named(messages)
    if form is not None and form.id_length:
        fitted = [_with_ids(message, form.id_length) for message in fitted]
    return _parted(fitted) if form is not None and form.one_call else fitted


def _named(messages: Sequence[Message]) -> list[Message]:
    """Give results the names of the tools that were called."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message = {**message, "name": name}
        found.append(message)
    return found


def _with_ids(message: Message, length: int) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _fitted(message["tool_call_id"], length)
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": _fitted(call.get("id", ""), length)} for call in message["tool_calls"]]
    return changed


def _fitted(call_id: object, length: int) -> str:
    """Return an id of the length; another id gives another, and an id that fits stays."""
    text = str(call_id)
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest())
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def _parted(messages: Sequence[Message]) -> list[Message]:
    """Part messages with several calls into one for each, with its result behind it."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results: dict[object, Message] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results[messages[at].get("tool_call_id")] = messages[at]
            at += 1
        for number, call in enumerate(calls):
            # What was said before the calls is said once.
            found.append({**message, "content": message.get("content", "") if not number else "", "tool_calls": [call]})
            result = results.pop(call.get("id"), None)
            if result is not None:
                found.append(result)
        found.extend(results.values())
    return found
