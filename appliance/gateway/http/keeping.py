"""Keeping of responses that are made."""

from __future__ import annotations

from typing import Any, Protocol

from appliance.gateway.generate_request import Finished, Principal
from appliance.gateway.http.openai_objects import pieces_of
from appliance.gateway.http.response_items import KeptResponse
from appliance.gateway.stored_work import ResponseKeeper


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

    @property
    def response_id(self) -> str:
        """Id of the response."""
        return self._writer.response_id

    async def keep(self, response: bytes) -> bool:
        """Keep the JSON of the answer; False where it cannot be kept."""
        document = KeptResponse(self._items, response).packed()
        return await self._stored.keep(self._principal, self._writer.response_id, document)

    async def keep_streamed(self, finished: Finished) -> None:
        """Keep the answer that was streamed, before its last event, which says whether it is kept."""
        response = b"".join(pieces_of(self._writer.whole(finished)))
        self._writer.note_kept(kept=await self.keep(response))
