"""Routes of stored responses, and of those that go on without their client."""

from __future__ import annotations

import asyncio
import json

from appliance.common.errors import FeatureNotAllowedError, InvalidRequestError, StoredNotFoundError
from appliance.common.ids import new_request_id
from appliance.gateway.generate_request import Principal
from appliance.gateway.http import stored_objects
from appliance.gateway.http.background import LAST_EVENT_ID, Background, first_wanted
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.parsing import INLINE_BYTES, and_forget
from appliance.gateway.http.response_items import KeptResponse, check_response_id, items_page
from appliance.gateway.stored_work import ResponseKeeper

RESPONSES = "/v1/responses"
RESPONSE_PATH, ITEMS_PATH = RESPONSES + "/{response_id}", RESPONSES + "/{response_id}/input_items"

INPUT_TOKENS = "input_tokens"
"""Word below the routes that is no id."""


class ResponseRoutes:
    """Handlers of the routes."""

    def __init__(self, stored: ResponseKeeper | None, background: Background) -> None:
        """``stored``: None where the appliance keeps nothing."""
        self._stored = stored
        self._background = background

    async def response(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/responses/{response_id}``."""
        query = stored_objects.query_of(exchange.head.query)
        streamed = query.get("stream", "false") != "false"
        # The stream of a tenant whose answers are padded by now would show its moments and sizes.
        looked = streamed and exchange.padding is None
        if looked and (run := self._background.find(principal, _id_in(exchange))) is not None:
            first = first_wanted(run.window, query, exchange.head.values(LAST_EVENT_ID))
            await self._background.follow(exchange, run, first, [])
            return
        kept = await self._read(exchange, principal)
        if streamed:
            raise InvalidRequestError("the response is not streamed any more; leave stream out", param="stream")
        await exchange.answer(200, kept.response, new_request_id())

    async def items(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/responses/{response_id}/input_items``."""
        page = stored_objects.items_query(stored_objects.query_of(exchange.head.query))
        kept = await self._read(exchange, principal)
        large = len(kept.items) > INLINE_BYTES
        items = await asyncio.to_thread(and_forget, json.loads, kept.items) if large else json.loads(kept.items)
        found, more = items_page(items, page.after, page.limit, ascending=page.ascending)
        await exchange.answer(200, stored_objects.page_object(found, more=more), new_request_id())

    async def delete(self, exchange: Exchange, principal: Principal) -> None:
        """``DELETE /v1/responses/{response_id}``."""
        stored, response = self._keeper(), _id_in(exchange)
        dropped = self._background.drop(principal, response)
        try:
            await stored.delete(principal, response)
        except StoredNotFoundError:
            if not dropped:
                raise
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
