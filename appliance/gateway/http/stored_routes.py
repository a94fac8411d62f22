"""Routes of files and batches: OpenAI's ``/v1/files`` and ``/v1/batches`` over ``StoredWork``.

A file is read as it arrives and handed on piece by piece, so no more of it than one piece is in this process; who asks
and whether the policy lets the tenant have files is known before the first byte of it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from appliance.common.batches.values import MAX_FILE_BYTES, MAX_NAME_CHARS, OUTPUT_PURPOSE, PURPOSE, StoredFile
from appliance.common.errors import FeatureNotAllowedError, InvalidRequestError
from appliance.common.ids import new_request_id
from appliance.gateway.front.stored_builder import (
    IDLE_S,
    UNNAMED,
    UPLOAD_S,
    Pieces,
    file_too_large,
    key_of,
    known_id,
    upload_stopped,
)
from appliance.gateway.generate_request import Principal
from appliance.gateway.http import header_fields, stored_objects
from appliance.gateway.http.body import read_body
from appliance.gateway.http.exchange import Exchange
from appliance.gateway.http.multipart import MultipartReader, PartHead, boundary_of
from appliance.gateway.http.openai import document_of
from appliance.gateway.http.settings import HttpSettings
from appliance.gateway.stored_work import StoredWork

FILES, BATCHES = "/v1/files", "/v1/batches"
FILE_PATH, CONTENT_PATH = FILES + "/{file_id}", FILES + "/{file_id}/content"
BATCH_PATH, CANCEL_PATH = BATCHES + "/{batch_id}", BATCHES + "/{batch_id}/cancel"

MAX_DOCUMENT_BYTES = 64 << 10
"""Bytes of the body of a new batch: 16 texts of metadata, as escaped as can be."""

MAX_FIELD_BYTES = 4 << 10
"""Bytes of a field beside a file."""

MAX_FORM_BYTES = MAX_FILE_BYTES + (64 << 10)
"""Bytes of an upload's body: the largest file, with its boundaries and fields."""

CONTENT_TYPE, ANY_TYPE = "application/jsonl", "application/octet-stream"
"""Types of the files of batches, and of all others."""


@dataclass(slots=True)
class _Form:
    """An upload's form as far as it was read."""

    stored: StoredWork
    principal: Principal
    fields: dict[str, str] = field(default_factory=dict)
    pieces: Pieces | None = None
    _field: str | None = None
    """Name of the field that is being read; None: of the file, or of a part that is passed over."""
    _text: bytearray = field(default_factory=bytearray)
    _in_file: bool = False
    _lines: bool = True
    """Whether the file may be one that a batch reads."""

    async def take(self, event: PartHead | bytes) -> None:
        """Take a part's beginning or content.

        Raises:
            ApplianceError: for the caller.
        """
        if isinstance(event, PartHead):
            self._end_field()
            await self._begin(event)
        elif self._in_file:
            assert self.pieces is not None, "the file's part has begun"
            await self.pieces.add(event)
        elif self._field is not None:
            self._text += event
            if len(self._text) > MAX_FIELD_BYTES:
                raise InvalidRequestError(f"a field has more than {MAX_FIELD_BYTES} bytes", param="file")

    async def end(self) -> StoredFile:
        """Keep the file.

        Raises:
            ApplianceError: for the caller.
        """
        self._end_field()
        purpose = stored_objects.purpose_of(self.fields.get("purpose"))
        keep_s = stored_objects.keep_of(self.fields)
        if self.pieces is None:
            raise InvalidRequestError("file is required: a part with this name and a filename", param="file")
        return await self.pieces.end(keep_s, purpose)

    async def _begin(self, head: PartHead) -> None:
        self._in_file = head.name == "file"
        self._field = None if self._in_file else head.name
        if not self._in_file:
            if head.name in self.fields:
                raise InvalidRequestError("a field of the form is there twice", param="file")
            return
        if self.pieces is not None:
            raise InvalidRequestError("the form has two files; send one", param="file")
        if "purpose" in self.fields:
            # One that stands behind the file may be a batch's.
            self._lines = stored_objects.purpose_of(self.fields["purpose"]) == PURPOSE
        name = (unquote(head.filename or "") or UNNAMED)[:MAX_NAME_CHARS]
        self.pieces = Pieces(await self.stored.upload(self.principal, name, lines=self._lines))

    def _end_field(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._text.decode("utf-8", "replace")
        self._field = None
        self._text.clear()


class StoredRoutes:
    """Handlers of the routes."""

    def __init__(self, stored: StoredWork | None, settings: HttpSettings) -> None:
        """``stored``: None where the appliance keeps no files."""
        self._stored = stored
        self._settings = settings

    async def upload(self, exchange: Exchange, principal: Principal) -> None:
        """``POST /v1/files``."""
        stored, head = self._keeper(), exchange.head
        stored.check(principal)
        if any(value.lower() != "identity" for value in head.values("content-encoding")):
            raise InvalidRequestError("a compressed body is not taken; send it as it is", param="content-encoding")
        if head.length is not None and head.length > MAX_FORM_BYTES:
            raise file_too_large()
        types = head.values("content-type")
        reader = MultipartReader(boundary_of(types[0] if len(types) == 1 else ""))
        form = _Form(stored, principal)
        try:
            async with asyncio.timeout(UPLOAD_S):
                await _read_form(exchange, reader, form)
                one = await form.end()
        except TimeoutError:
            raise upload_stopped() from None
        finally:
            if form.pieces is not None:
                await form.pieces.upload.drop()
        await exchange.answer(200, stored_objects.file_object(one), new_request_id())

    async def list_files(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/files``."""
        page = stored_objects.files_page(stored_objects.query_of(exchange.head.query))
        found = await self._keeper().files(principal, page)
        document = stored_objects.page_object([stored_objects.file_object(one) for one in found.files], more=found.more)
        await exchange.answer(200, document, new_request_id())

    async def file(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/files/{file_id}``."""
        one = await self._keeper().file(principal, _id_in(exchange, FILES))
        await exchange.answer(200, stored_objects.file_object(one), new_request_id())

    async def content(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/files/{file_id}/content``."""
        file = _id_in(exchange, FILES)
        kept = await self._keeper().file(principal, file)
        pieces = self._keeper().content(principal, file)
        first = await anext(pieces, b"")
        lines = kept.purpose in (PURPOSE, OUTPUT_PURPOSE)
        await exchange.download(_from(first, pieces), CONTENT_TYPE if lines else ANY_TYPE, new_request_id())

    async def delete(self, exchange: Exchange, principal: Principal) -> None:
        """``DELETE /v1/files/{file_id}``."""
        file = _id_in(exchange, FILES)
        await self._keeper().delete(principal, file)
        await exchange.answer(200, stored_objects.file_deleted(file), new_request_id())

    async def create(self, exchange: Exchange, principal: Principal) -> None:
        """``POST /v1/batches``."""
        stored = self._keeper()
        stored.check(principal)
        body = await read_body(
            exchange.body,
            exchange.head,
            lambda _size: None,
            max_bytes=MAX_DOCUMENT_BYTES,
            timeout_s=self._settings.body_timeout_s,
        )
        exchange.body_pending = False
        document = document_of(body)
        keys = exchange.head.values("idempotency-key")
        key = key_of(keys[0] if len(keys) == 1 else ", ".join(keys))
        asked, keep_s = stored_objects.new_batch(document), stored_objects.output_keep_of(document)
        one = await stored.begin(principal, *asked, key, output_keep_s=keep_s)
        known = stored_objects.BATCH_FIELDS
        ignored = tuple(name for name, value in document.items() if value is not None and name not in known)
        rows = header_fields.ignored(ignored)
        await exchange.answer(200, stored_objects.batch_object(one), new_request_id(), rows)

    async def list_batches(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/batches``."""
        page = stored_objects.batches_page(stored_objects.query_of(exchange.head.query))
        found = await self._keeper().batches(principal, page)
        entries = [stored_objects.batch_object(one) for one in found.batches]
        await exchange.answer(200, stored_objects.page_object(entries, more=found.more), new_request_id())

    async def batch(self, exchange: Exchange, principal: Principal) -> None:
        """``GET /v1/batches/{batch_id}``."""
        one = await self._keeper().batch(principal, _id_in(exchange, BATCHES))
        await exchange.answer(200, stored_objects.batch_object(one), new_request_id())

    async def cancel(self, exchange: Exchange, principal: Principal) -> None:
        """``POST /v1/batches/{batch_id}/cancel``."""
        one = await self._keeper().cancel(principal, _id_in(exchange, BATCHES))
        await exchange.answer(200, stored_objects.batch_object(one), new_request_id())

    def _keeper(self) -> StoredWork:
        if self._stored is None:
            raise FeatureNotAllowedError("this appliance keeps no files and batches")
        return self._stored


def template_of(path: str) -> str:
    """Return the path of the route that a path with an id belongs to; the path itself where it has none."""
    for prefix, whole, below, word in (
        (FILES, FILE_PATH, CONTENT_PATH, "content"),
        (BATCHES, BATCH_PATH, CANCEL_PATH, "cancel"),
    ):
        name, slash, rest = path.removeprefix(prefix + "/").partition("/")
        if path.startswith(prefix + "/") and name:
            return whole if not slash else below if rest == word else path
    return path


def _id_in(exchange: Exchange, prefix: str) -> str:
    """Return the id in the path.

    Raises:
        StoredNotFoundError: it is none that anything here can have.
    """
    return known_id(exchange.head.path.removeprefix(prefix + "/").partition("/")[0])


async def _read_form(exchange: Exchange, reader: MultipartReader, form: _Form) -> None:
    """Read a form to its end.

    Raises:
        ApplianceError: for the caller.
        TimeoutError: nothing more comes.
        ClientGoneError: the caller left.
    """
    body, size = exchange.body, 0
    while True:
        async with asyncio.timeout(IDLE_S):
            data = await body.take()
        size += len(data)
        if size > MAX_FORM_BYTES:
            raise file_too_large()
        for event in reader.feed(data):
            await form.take(event)
        if body.complete and not body.data:
            exchange.body_pending = False
            if not reader.complete:
                raise InvalidRequestError("the body is no multipart/form-data: its end is missing", param="file")
            return


async def _from(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
