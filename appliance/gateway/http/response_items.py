"""Items of the Responses API as they are kept: an input as a list of items with ids, and what is kept of a response;
pure. Source of the shapes: OpenAI's API specification of 2026-08."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.common.batches.values import MAX_RESPONSE_ID_CHARS
from appliance.common.errors import ApplianceError, InvalidRequestError, StoredNotFoundError
from appliance.gateway.front.request_builder import Stamp, compact_json
from appliance.gateway.front.stored_builder import is_id

NOTHING_KEPT = "nothing is kept between requests here; send the whole conversation as input"

Withheld = Callable[[str], ApplianceError | None]
"""Error for a caller that asks by a field, which is named, that something is kept; None where it may."""

_LENGTH = struct.Struct(">Q")
_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


class EarlierNeededError(Exception):
    """A request continues a response that has to be fetched; ``again`` parses it with what is kept of that."""

    def __init__(self, response: str, again: Callable[[bytes, Stamp, bytes], Any]) -> None:
        super().__init__(response)
        self.response, self.again = response, again


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """What is kept of a response."""

    items: bytes
    """JSON of the list of items that it answers, those of earlier responses included."""
    response: bytes
    """JSON of the response."""

    def packed(self) -> bytes:
        """Return both in one."""
        return b"".join((_LENGTH.pack(len(self.items)), self.items, self.response))

    @classmethod
    def unpacked(cls, data: bytes) -> KeptResponse:
        """Return both of what ``packed`` gave."""
        (size,) = _LENGTH.unpack_from(data)
        middle = _LENGTH.size + size
        return cls(data[_LENGTH.size : middle], data[middle:])

    def conversation(self) -> list[dict[str, Any]]:
        """Return the items of the conversation as far as it went. A call that was cut off is none."""
        items: list[dict[str, Any]] = json.loads(self.items)
        output: list[dict[str, Any]] = json.loads(self.response)["output"]
        cut = ("function_call", "incomplete")
        return items + [item for item in output if (item["type"], item.get("status")) != cut]


def nothing_kept(param: str) -> ApplianceError:
    """Return the error of a caller for whom nothing is kept."""
    return InvalidRequestError(f"{param} is not supported; {NOTHING_KEPT}", param=param)


def check_response_id(name: str, param: str) -> str:
    """Return an id that a response can have.

    Raises:
        StoredNotFoundError: it is none.
    """
    if len(name) > MAX_RESPONSE_ID_CHARS or not is_id(name):
        raise StoredNotFoundError("there is no response of this id, or none that is yours", param=param)
    return name


def items_of(value: str | Sequence[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return a request's input, which was checked, as items with ids; ``key`` is the request's."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_item(item, f"{key}_i{place}") for place, item in enumerate(value)]


def _item(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    made = {"type": kind, **item}
    if not isinstance(made.get("id"), str) or not is_id(made["id"]):
        made["id"] = f"{_PREFIXES[kind]}{name}"
    if kind != "message":
        return made
    made.setdefault("status", "completed")
    if not isinstance(made.get("content"), list):
        text = made.get("content") or ""
        assistant = made["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if assistant else {"type": "input_text"}
        made["content"] = [{**part, "text": text}]
    return made


def items_json(items: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the JSON of items."""
    return compact_json(items).encode("utf-8", "surrogatepass")


def items_page(items: list[dict[str, Any]], after: str, limit: int, *, ascending: bool) -> tuple[list[Any], bool]:
    """Return the items of a page, and whether there are more.

    Raises:
        StoredNotFoundError: there is no item to begin behind.
    """
    ordered = items if ascending else items[::-1]
    if after:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise StoredNotFoundError("there is no item of this id in the response", param="after")
        ordered = ordered[places[0] + 1 :]
    return ordered[:limit], len(ordered) > limit
