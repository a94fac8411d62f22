"""Routes of stored responses, and the keeping of answers that are made."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from appliance.common.errors import FeatureNotAllowedError, InvalidRequestError
from appliance.common.ids import new_request_id
from appliance.gateway.generate_request import Finished, Principal
from appliance.gateway.http import stored_objects
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.openai_objects import pieces_of
from appliance.gateway.http.parsing import INLINE_BYTES
from appliance.gateway.http.response_items import KeptResponse, check_response_id, items_page
from appliance.gateway.stored_work import ResponseKeeper

RESPONSES = "/v1/responses"
RESPONSE_PATH, ITEMS_PATH = RESPONSES + "/{response_id}", RESPONSES + "/{response_id}/input_items"

INPUT_TOKENS = "input_tokens"
"""Word below the routes that is no id."""


class KeptWriter(Protocol):
    """Writes an answer that may be kept."""

    response_id: str

    def whole(self, finished: Finished) -> dict[str, Any]:
        """Return the whole answer, once all of it was written."""
        ...

    def note_kept(self, *, kept: bool) -> None:
        """Say in the answer whether it is kept."""
        ...


class Keeping:
    """Keeps the answer to one request."""

    def __init__(self, stored: ResponseKeeper, principal: Principal, writer: KeptWriter, items: bytes) -> None:
        """``items``: JSON of what it answers."""
        self._stored = stored
        self._principal = principal
        self._writer = writer
        self._items = items

    async def keep(self, response: bytes) -> bool:
        """Keep the JSON of the answer; False where it cannot be kept."""
        document = KeptResponse(self._items, response).packed()
        return await self._stored.keep(self._principal, self._writer.response_id, document)

    async def keep_streamed(self, finished: Finished) -> None:
        """Keep the answer that was streamed, before its last event, which says whether it is kept."""
        response = b"".join(pieces_of(self._writer.whole(finished)))
        self._writer.note_kept(kept=await self.keep(response))


class ResponseRoutes:
    """Handlers of the routes."""

    def __init__(self, stored: ResponseKeeper | None) -> None:
        """``stored``: None where the appliance keeps nothing."""
        self._stored = stored

    async def response(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/responses/{response_id}``."""
        query = stored_objects.query_of(exchange.head.query)
        if query.get("stream", "false") != "false":
            raise InvalidRequestError("a stored response is not streamed; leave stream out", param="stream")
        kept = await self._read(exchange, principal)
        await exchange.answer(200, kept.response, new_request_id())

    async def items(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/responses/{response_id}/input_items``."""
        page = stored_objects.items_query(stored_objects.query_of(exchange.head.query))
        kept = await self._read(exchange, principal)
        large = len(kept.items) > INLINE_BYTES
        items = await asyncio.to_thread(json.loads, kept.items) if large else json.loads(kept.items)
        found, more = items_page(items, page.after, page.limit, ascending=page.ascending)
        await exchange.answer(200, stored_objects.page_object(found, more=more), new_request_id())

    async def delete(self, exchange: Exchange, principal: Principal) -> None:
        """``DELETE /v1/responses/{response_id}``."""
        stored, response = self._keeper(), _id_in(exchange)
        await stored.delete(principal, response)
        await exchange.answer(200, {"id": response, "object": "response", "deleted": True}, new_request_id())

    async def _read(self, exchange: Exchange, principal: Principal) -> KeptResponse:
        return KeptResponse.unpacked(await self._keeper().read(principal, _id_in(exchange)))

    def _keeper(self) -> ResponseKeeper:
        if self._stored is None:
            raise FeatureNotAllowedError("this appliance keeps no responses")
        return self._stored


def response_template(path: str) -> str:
    """Return the path of the route of one response that a path belongs to; the path itself where it is of none."""
    name, slash, rest = path.removeprefix(RESPONSES + "/").partition("/")
    if not path.startswith(RESPONSES + "/") or not name or name == INPUT_TOKENS:
        return path
    return RESPONSE_PATH if not slash else ITEMS_PATH if rest == "input_items" else path


def _id_in(exchange: Exchange) -> str:
    """Return the id in the path.

    Raises:
        StoredNotFoundError: it is none that a response can have.
    """
    return check_response_id(exchange.head.path.removeprefix(RESPONSES + "/").partition("/")[0], "id")
