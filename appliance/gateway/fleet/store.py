"""A store in which each host of a fleet keeps one value: Valkey or Redis, over RESP2.

Two commands are spoken, ``SET`` and ``MGET``, after ``AUTH`` where there is a password. The store need not be trusted:
replies are bounded before they are read, what is none that these commands have closes the connection, and what the
values say is checked by their proofs. That is why no client library is used: one takes whatever length a reply
announces, and two commands need nothing else of it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

from appliance.common.fleet_config import FleetConfig
from appliance.gateway.fleet.message import MAX_BYTES

TIMEOUT_S = 1.0
"""Seconds for a connection, and for the replies to one exchange."""

KEPT_MS = 5_000
"""Milliseconds for which the store keeps a value: longer than an answer is taken (``lending.FRESH_S``)."""

MAX_LINE_BYTES = 512
"""Longest line of a reply: a number, a length or an error."""

MAX_PASSWORD_BYTES = 4_096


class FleetStoreError(Exception):
    """The store is away, refuses, or says what no such store says."""


class Store:
    """One connection, made at need; one call at a time."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, key: bytes, value: bytes, others: Sequence[bytes]) -> list[bytes | None]:
        """Keep a value, and return those of the other keys; None for one that is not there.

        Raises:
            FleetStoreError: it did not, and the connection is closed.
        """
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._streams is None:
                    await self._connect()
                assert self._streams is not None, "it was connected"
                reader, writer = self._streams
                asked = _command(b"MGET", *others) if others else b""
                writer.write(_command(b"SET", key, value, b"PX", b"%d" % KEPT_MS) + asked)
                await writer.drain()
                await _expect(reader, b"+OK")
                return await _values(reader, len(others))
        except TimeoutError as error:
            await self.close()
            raise FleetStoreError(f"it does not answer within {TIMEOUT_S:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            await self.close()
            raise FleetStoreError(str(error)) from error
        except FleetStoreError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connection."""
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()

    async def _connect(self) -> None:
        config = self._config
        context = None if config.store_ca is None else ssl.create_default_context(cafile=config.store_ca)
        if config.socket_path:
            self._streams = await asyncio.open_unix_connection(config.socket_path, limit=MAX_LINE_BYTES)
        else:
            host, port = config.address
            self._streams = await asyncio.open_connection(host, port, ssl=context, limit=MAX_LINE_BYTES)
        reader, writer = self._streams
        if config.store_password is not None:
            # The file is small and local; it is read anew, so that a rotated password is found.
            password = config.store_password.read_bytes()[:MAX_PASSWORD_BYTES].strip()
            user = config.store_user.encode()
            writer.write(_command(b"AUTH", *([user] if user else []), password))
            await _expect(reader, b"+OK")


def _command(*words: bytes) -> bytes:
    """Return a command as the protocol has it: an array of byte strings."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return one line of a reply, without its end; ``ValueError`` where it is longer than a line may be."""
    line = await reader.readuntil(b"\r\n")
    return line[:-2]


async def _expect(reader: asyncio.StreamReader, wanted: bytes) -> None:
    line = await _line(reader)
    if line != wanted:
        said = line[:100].decode("ascii", "replace") if line.startswith(b"-") else "what is no reply"
        raise FleetStoreError(f"it says: {said}")


async def _values(reader: asyncio.StreamReader, count: int) -> list[bytes | None]:
    """Return so many byte strings; what is longer than a message is refused before it is read."""
    if count == 0:
        return []
    if await _line(reader) != b"*%d" % count:
        raise FleetStoreError("it gives another number of values")
    values: list[bytes | None] = []
    for _ in range(count):
        line = await _line(reader)
        length = int(line[1:]) if line.startswith(b"$") and line[1:].lstrip(b"-").isdigit() else -2
        if length == -1:
            values.append(None)
        elif 0 <= length <= MAX_BYTES:
            values.append(await reader.readexactly(length))
            if await reader.readexactly(2) != b"\r\n":
                raise FleetStoreError("a value does not end where its length says")
        else:
            raise FleetStoreError("a value is longer than a host writes")
    return values
