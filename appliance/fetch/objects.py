"""Sources that are reached over a network: the only importer of ``obstore``.

Its own retries are off: a range is asked for again by ``appliance.fetch.download``, which knows what of it has come.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from appliance.common.addresses import is_loopback
from appliance.common.errors import ModelSourceError, SourceUnavailableError
from appliance.common.model_cache.manifest import MAX_LISTED_FILES, ManifestFile, is_name
from appliance.fetch.access import SourceAccess
from appliance.fetch.address import Address
from appliance.fetch.source import CHUNK_BYTES

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

CONNECT_S = 10
"""Seconds until a connection is there."""

SILENCE_S = 30.0
"""Longest time without a byte of an answer, in seconds; then the request counts as failed."""

REQUEST_S = 24 * 3600
"""Seconds of one request; only the silence in it is bounded, since a bandwidth limit may make it last."""

MAX_WORDS = 240
"""Most characters that are repeated of what a source says."""

_ADDRESS = re.compile(r"https?://[^\s\"']+")


class ObjectSource:
    """A folder of an object store, or below a web address."""

    def __init__(self, store: ObjectStore, where: str, folder: str = "", *, listed: bool = True) -> None:
        """Take a store.

        Args:
            store: to read from.
            where: address, for messages.
            folder: of the model in the store.
            listed: whether the store can list files.
        """
        self._store, self._where, self._listed = store, where, listed
        self._prefix = f"{folder}/" if folder else ""

    async def read(self, name: str, limit: int) -> bytes | None:
        """Read a small file."""
        data = bytearray()
        try:
            with self._translated(name):
                async for chunk in self._chunks(name, None):
                    data += chunk
                    if len(data) > limit:
                        break
        except FileNotFoundError:
            return None
        return bytes(data[:limit])

    async def files(self) -> tuple[ManifestFile, ...]:
        """List the folder."""
        import obstore

        if not self._listed:
            raise ModelSourceError(
                f"{self._where}: there is no athanor-model.json, and https:// lists no files; put a manifest there "
                f"(athanor model manifest DIR)"
            )
        found: list[ManifestFile] = []
        seen = 0
        with self._translated(""):
            listing = obstore.list(self._store, self._prefix or None, chunk_size=MAX_LISTED_FILES)
            async for rows in listing:
                seen += len(rows)
                if seen > MAX_LISTED_FILES:
                    raise ModelSourceError(
                        f"{self._where}: more than {MAX_LISTED_FILES} files; name one model's folder"
                    )
                for row in rows:
                    name = row["path"].removeprefix(self._prefix)
                    if is_name(name):
                        found.append(ManifestFile(name, row["size"], tag=row["e_tag"] or ""))
        return tuple(found)

    async def stream(self, file: ManifestFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Ask for a range."""
        got = start
        try:
            with self._translated(file.name):
                async for chunk in self._chunks(file.name, (start, end), file.tag):
                    if got + len(chunk) > end:
                        raise SourceUnavailableError(f"{self._where}: {file.name}: more bytes came than were asked for")
                    got += len(chunk)
                    yield chunk
        except FileNotFoundError:
            raise ModelSourceError(f"{self._where}: {file.name} is not there; the source is not complete") from None
        if got != end:
            raise SourceUnavailableError(f"{self._where}: {file.name}: the answer broke off")

    async def _chunks(self, name: str, part: tuple[int, int] | None, tag: str = "") -> AsyncGenerator[bytes, None]:
        import obstore

        options: dict[str, Any] = {"range": part} if part is not None else {}
        if tag:
            options["if_match"] = tag
        answer = await asyncio.wait_for(
            obstore.get_async(self._store, self._prefix + name, options=cast("Any", options)), SILENCE_S + CONNECT_S
        )
        if part is not None and tuple(answer.range) != part:
            raise SourceUnavailableError(f"{self._where}: {name}: another range came than was asked for")
        chunks = answer.stream(min_chunk_size=CHUNK_BYTES).__aiter__()
        while True:
            try:
                yield await asyncio.wait_for(chunks.__anext__(), SILENCE_S)
            except StopAsyncIteration:
                return

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Turn the library's errors into ours; FileNotFoundError stays."""
        from obstore import exceptions

        what = f"{self._where}: {name}" if name else self._where
        try:
            yield
        except exceptions.PreconditionError:
            raise ModelSourceError(f"{what} was changed at the source during the pull; pull it again") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise ModelSourceError(
                f"{what}: the source refuses the credentials, or asks for some; give them in the file that "
                f"model_cache.sources names"
            ) from None
        except (exceptions.NotSupportedError, exceptions.InvalidPathError) as error:
            raise ModelSourceError(f"{what}: the source cannot do this: {words(error)}") from None
        except TimeoutError:
            raise SourceUnavailableError(f"{what}: no byte for {SILENCE_S:g} s") from None
        except exceptions.BaseError as error:
            raise SourceUnavailableError(f"{what}: {words(error)}") from None


def words(error: Exception) -> str:
    """What a source's error says, in one short line without addresses and documents: both may hold credentials."""
    text = " ".join(str(error).partition("\n")[0].partition("<")[0].partition("Debug source")[0].split())
    text = _ADDRESS.sub(lambda match: match[0].partition("?")[0], text)
    return "".join(char if char.isprintable() else "?" for char in text)[:MAX_WORDS] or "it failed"


def open_store(address: Address, access: SourceAccess) -> ObjectSource:
    """The source at an address.

    Raises:
        ModelSourceError: endpoint or credentials cannot be used.
    """
    from obstore import store

    retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=SILENCE_S)}
    options = client_options(address, access)
    common: Any = {"client_options": options, "retry_config": retries}
    try:
        match address.scheme:
            case "s3":
                config: Any = {"endpoint": access.endpoint, "region": access.region or "us-east-1"}
                config |= {"access_key_id": access.access_key_id}
                config |= {"secret_access_key": access.secret_access_key.get_secret_value()}
                config |= {"session_token": access.session_token.get_secret_value()}
                config |= {"skip_signature": access.anonymous}
                opened: Any = store.S3Store(address.host, config=_given(config), **common)
            case "gs":
                config = {"service_account_path": access.service_account and str(access.service_account)}
                config |= {"base_url": access.endpoint, "skip_signature": access.anonymous}
                opened = store.GCSStore(address.host, config=_given(config), **common)
            case "az":
                config = {"account_name": access.account_name, "endpoint": access.endpoint}
                config |= {"account_key": access.account_key.get_secret_value()}
                config |= {"skip_signature": access.anonymous}
                opened = store.AzureStore(address.host, config=_given(config), **common)
            case _:
                root = f"{address.scheme}://{address.host}"
                opened = store.HTTPStore(root, **common)
    except (ValueError, OSError, store_errors()) as error:
        raise ModelSourceError(f"{address.text}: {words(error)}") from None
    return ObjectSource(opened, address.text, address.path, listed=address.scheme in ("s3", "gs", "az"))


def store_errors() -> type[Exception]:
    """The base of the library's errors."""
    from obstore import exceptions

    return exceptions.BaseError


def client_options(address: Address, access: SourceAccess) -> ClientConfig:
    """How connections are made. Plain HTTP stays on this machine, unless the operator says otherwise.

    Raises:
        ModelSourceError: the endpoint is http:// on another machine.
    """
    endpoint = access.endpoint or (address.text if address.scheme in ("http", "https") else "")
    parts = urlsplit(endpoint)
    plain = parts.scheme == "http"
    if plain and not access.plain_http and not is_loopback(parts.hostname or ""):
        raise ModelSourceError(
            f"{address.text}: http:// shows bytes and credentials to the network; use https://, or say "
            f"plain_http: true for this prefix in the file that model_cache.sources names"
        )
    options: ClientConfig = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "user_agent": "athanor-fetch",
    }
    if token := access.token.get_secret_value():
        options["default_headers"] = {"authorization": f"Bearer {token}"}
    return options


def _given(config: dict[str, Any]) -> Any:
    """Settings with a value: what is left out is looked for in the environment."""
    return {name: value for name, value in config.items() if value}
