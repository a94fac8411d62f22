"""Keys of token issuers: from a file that is followed, or fetched from the one address that the operator wrote.

A fetch has a deadline for all of it, a bound of bytes, verified TLS and no redirects, and what it brings is used only
as a whole: while an address is silent, slow or talks nonsense, the keys fetched before stay in force. Strangers cannot
make the gateway fetch at will: an unknown key id asks for a refresh, which comes at most every ``UNKNOWN_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.strict_json import JsonError, parse_json
from appliance.common.token_config import IssuerConfig
from appliance.gateway.front.http_get import GetError, get
from appliance.gateway.front.key_file import Stamp, stamp_of

if TYPE_CHECKING:
    from isolation.keys.tokens import VerificationKey

LOOK_S = 1.0
"""Seconds between two looks at a file of keys."""

FETCH_S = 10.0
"""Seconds that a fetch may take, from the look-up of the name to the last byte."""

UNKNOWN_S = 30.0
"""Least seconds between two fetches, however many tokens name keys that are unknown, and after one that failed."""

MAX_BYTES = 256 << 10
"""Most bytes of a set of keys: 64 with their certificates."""

log = structlog.get_logger()


class FetchError(Exception):
    """The keys cannot be fetched; the message is for the operator."""


class IssuerKeys:
    """Keys of one issuer, by their id."""

    def __init__(self, config: IssuerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.keys: dict[str, VerificationKey] = {}
        """Keys in force; none until the first set has come."""
        self.thumbprints: frozenset[str] = frozenset()
        """Those of the keys in force."""
        self.problem = "its keys have not been read yet"
        """Why the newest set is not in force; empty where it is."""
        self.fetches = 0
        """Attempts so far."""
        self._clock = clock
        self._wanted = asyncio.Event()
        self._stamp: Stamp = ()

    def find(self, kid: str | None) -> VerificationKey | None:
        """Return the key with this id; without an id, the only one there is. One that is unknown asks for a refresh."""
        if kid is None:
            return next(iter(self.keys.values())) if len(self.keys) == 1 else None
        found = self.keys.get(kid)
        if found is None:
            self._wanted.set()
        return found

    async def run(self) -> None:
        """Keep the keys fresh until cancelled."""
        if self.config.keys_file is not None:
            await self._follow_file(self.config.keys_file)
        else:
            await self._follow_address()

    async def _follow_file(self, path: Path) -> None:
        while True:
            stamp = stamp_of(path)
            if stamp != self._stamp:
                self._stamp = stamp
                await self._take(lambda: asyncio.to_thread(_read, path))
            await aligned_sleep(LOOK_S)

    async def _follow_address(self) -> None:
        while True:
            began = self._clock()
            self._wanted.clear()
            good = await self._take(lambda: fetch(self.config.keys_url, self.config.keys_ca))
            rest_s = self.config.refresh_s if good else UNKNOWN_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._wanted.wait()
            await asyncio.sleep(max(0.0, began + UNKNOWN_S - self._clock()))

    async def _take(self, load: Callable[[], Awaitable[bytes]]) -> bool:
        """Load a set and put it in force; a problem changes nothing and is returned as False."""
        from isolation.keys.errors import KeysError  # 100 ms, where tokens are taken alone
        from isolation.keys.tokens import read_key_set

        self.fetches += 1
        try:
            data = await load()
            keys = read_key_set(parse_json(data, max_containers=1_024))
        except (FetchError, JsonError, KeysError, OSError) as error:
            problem = str(error) or type(error).__name__
            if problem != self.problem:
                log.error("the keys of a token issuer cannot be used", issuer=self.config.name, problem=problem)
            self.problem = problem
            return False
        thumbprints = frozenset(key.thumbprint for key in keys.values())
        if thumbprints != self.thumbprints:
            log.info("keys of a token issuer", issuer=self.config.name, keys=sorted(keys))
        self.keys, self.thumbprints, self.problem = keys, thumbprints, ""
        return True


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise FetchError(f"{path} has more than {MAX_BYTES} bytes")
    return data


async def fetch(url: str, authority: Path | None) -> bytes:
    """Return what an https address answers.

    Raises:
        FetchError: it does not answer in time, with a status other than 200, or with too much.
    """
    try:
        async with asyncio.timeout(FETCH_S):
            context = await asyncio.to_thread(ssl.create_default_context, cafile=authority)
            return await _exchange(url, context)
    except TimeoutError:
        raise FetchError(f"{url} did not answer within {FETCH_S:g} s") from None
    except (OSError, ValueError) as error:
        raise FetchError(f"cannot fetch {url}: {error}") from None


async def _exchange(url: str, context: ssl.SSLContext) -> bytes:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname or "", parts.port or 443, ssl=context)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return await get(reader, writer, parts.netloc, target, MAX_BYTES)
    except GetError as error:
        raise FetchError(f"the answer of {url} is not used: {error}") from None
    finally:
        writer.close()
