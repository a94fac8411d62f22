"""One connection to a Valkey or Redis that keeps sealed objects, over RESP2, with blocking calls and deadlines.

Three commands are spoken, ``SET``, ``GET`` and ``UNLINK``, after ``AUTH`` where there is a password. The store need not
be trusted: the length of a value is known before it is asked for, a reply that announces another is not read, and what
no store says closes the connection. No client library is used: one takes whatever length a reply announces.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence

from appliance.common.carrier_wire import ObjectStatus, left
from appliance.common.kv_store_config import KvStoreConfig

CONNECT_S = 1.0
"""Seconds for a connection with its handshake and password."""

EXCHANGE_S = 2.0
"""Seconds for all commands and replies of one request: 8 MiB at 4 MiB/s. A store that trickles ends there."""

RETRY_S = 1.0
"""Seconds after a failure in which no connection is tried: what is asked for meanwhile is answered at once."""

MAX_LINE_BYTES = 512
"""Longest line of a reply: a length or an error."""

READ_BYTES = 64 << 10
"""Bytes of one read that looks for a line."""

MAX_PASSWORD_BYTES = 4_096

KEY_PREFIX = b"athanor:kv:"
"""Beginning of every key, for the store's access list."""


class ObjectStoreError(Exception):
    """The store is away, or says what no such store says."""


class _NotTriedError(ObjectStoreError):
    """The store was away a moment ago, and was not asked."""


class _OtherLengthError(ObjectStoreError):
    """A value has another length than what is asked for: it is not read, which ends the connection and no more. Each
    engine that may write for a tenant could have one, and each that asks for it could keep all others from the store.
    """


class ObjectStore:
    """The connection, made at need. Calls come one at a time; none raises for what the store does."""

    def __init__(self, config: KvStoreConfig) -> None:
        self._config = config
        self._peer: socket.socket | None = None
        self._buffer = bytearray()
        self._until = 0.0
        self._not_before = 0.0
        self.problem = ""
        """What was wrong when the store was last away; empty while it serves."""

    def put(self, objects: Iterable[tuple[bytes, bytearray]], count: int, seconds: int) -> list[ObjectStatus]:
        """Keep objects, by name, for so many seconds; gives what became of each. All of ``objects`` is consumed, also
        where the store is away."""
        self._begin()
        sent = 0
        for name, body in objects:
            if sent < 0:
                continue
            try:
                head = b"*5\r\n$3\r\nSET\r\n%b$%d\r\n" % (_word(_key(name)), len(body))
                self._send(head, body, b"\r\n$2\r\nEX\r\n" + _word(b"%d" % seconds))
                sent += 1
            except (OSError, ValueError, ObjectStoreError) as error:
                self._fail(error)
                sent = -1
        return self._statuses(max(sent, 0), count)

    def get(self, names: Sequence[bytes], sizes: Sequence[int]) -> Iterator[tuple[ObjectStatus, bytes | bytearray]]:
        """Yield each object, in order, as it comes."""
        self._begin()
        given = 0
        try:
            self._send(b"".join(b"*2\r\n$3\r\nGET\r\n" + _word(_key(name)) for name in names))
            for size in sizes:
                found = self._value(size)
                given += 1
                yield found
                if found[0] is ObjectStatus.OTHER_LENGTH:
                    raise _OtherLengthError
        except (OSError, ValueError, ObjectStoreError) as error:
            self._fail(error)
        for _ in range(given, len(names)):
            yield ObjectStatus.AWAY, b""

    def drop(self, names: Sequence[bytes]) -> list[ObjectStatus]:
        """Have the store forget objects; gives what became of each."""
        self._begin()
        try:
            self._send(b"".join(b"*2\r\n$6\r\nUNLINK\r\n" + _word(_key(name)) for name in names))
        except (OSError, ValueError, ObjectStoreError) as error:
            self._fail(error)
            return [ObjectStatus.AWAY] * len(names)
        return self._statuses(len(names), len(names))

    def close(self) -> None:
        """Close the connection."""
        peer, self._peer = self._peer, None
        self._buffer.clear()
        if peer is not None:
            peer.close()

    def _begin(self) -> None:
        self._until = time.monotonic() + EXCHANGE_S
        if self._peer is not None:
            self.problem = ""

    def _statuses(self, sent: int, count: int) -> list[ObjectStatus]:
        """Read a reply for each command that was sent."""
        found: list[ObjectStatus] = []
        try:
            while len(found) < sent and self._peer is not None:
                line = self._line()
                if line == b"+OK" or (line[:1] == b":" and line[1:].isdigit()):
                    found.append(ObjectStatus.OK)
                elif line[:1] == b"-":
                    found.append(ObjectStatus.REFUSED)
                    self.problem = _told(line)
                else:
                    raise ObjectStoreError("a reply is none that a store gives here")
        except (OSError, ValueError, ObjectStoreError) as error:
            self._fail(error)
        return found + [ObjectStatus.AWAY] * (count - len(found))

    def _value(self, size: int) -> tuple[ObjectStatus, bytes | bytearray]:
        line = self._line()
        if line == b"$-1":
            return ObjectStatus.ABSENT, b""
        if line[:1] == b"-":
            self.problem = _told(line)
            return ObjectStatus.REFUSED, b""
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ObjectStoreError("a reply is none that a store gives here")
        if int(line[1:]) != size:
            return ObjectStatus.OTHER_LENGTH, b""
        body = self._exactly(size)
        if self._exactly(2) != b"\r\n":
            raise ObjectStoreError("a value does not end where its length says")
        return ObjectStatus.OK, body

    def _send(self, *parts: bytes | bytearray) -> None:
        peer = self._connected()
        for part in parts:
            peer.settimeout(left(self._until))
            peer.sendall(part)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", 0, MAX_LINE_BYTES)) < 0:
            if len(self._buffer) >= MAX_LINE_BYTES:
                raise ObjectStoreError("a line of a reply is longer than any")
            self._fill()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _exactly(self, size: int) -> bytearray:
        """Read so many bytes: what the buffer has, and the rest in place."""
        body = bytearray(size)
        at = min(size, len(self._buffer))
        body[:at] = self._buffer[:at]
        del self._buffer[:at]
        view = memoryview(body)
        while at < size:
            peer = self._connected()
            peer.settimeout(left(self._until))
            read = peer.recv_into(view[at:])
            if read == 0:
                raise ObjectStoreError("it closed the connection")
            at += read
        return body

    def _fill(self) -> None:
        peer = self._connected()
        peer.settimeout(left(self._until))
        data = peer.recv(READ_BYTES)
        if not data:
            raise ObjectStoreError("it closed the connection")
        self._buffer += data

    def _connected(self) -> socket.socket:
        if self._peer is not None:
            return self._peer
        if time.monotonic() < self._not_before:
            raise _NotTriedError
        config = self._config
        if config.socket_path:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            peer = socket.create_connection(config.address, timeout=CONNECT_S)
        try:
            peer.settimeout(CONNECT_S)
            if config.socket_path:
                peer.connect(config.socket_path)
            else:
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if config.store_ca is not None:
                context = ssl.create_default_context(cafile=config.store_ca)
                if config.store_certificate is not None:
                    context.load_cert_chain(config.store_certificate, config.store_key)
                peer = context.wrap_socket(peer, server_hostname=config.address[0])
            self._peer = peer
            self._sign_in(peer)
        except BaseException:
            peer.close()
            self._peer = None
            raise
        return peer

    def _sign_in(self, peer: socket.socket) -> None:
        config = self._config
        if config.store_password is None:
            self.problem = ""
            return
        # The file is small and local; it is read anew, so that a rotated password is found.
        password = config.store_password.read_bytes()[:MAX_PASSWORD_BYTES].strip()
        words = [b"AUTH", *([config.store_user.encode()] if config.store_user else []), password]
        peer.sendall(b"*%d\r\n" % len(words) + b"".join(map(_word, words)))
        line = self._line()
        if line != b"+OK":
            raise ObjectStoreError(_told(line))
        self.problem = ""

    def _fail(self, error: Exception) -> None:
        self.close()
        if isinstance(error, _NotTriedError | _OtherLengthError):
            return  # Or who asks more than once in that time would never have a connection tried again.
        self.problem = str(error) or type(error).__name__
        self._not_before = time.monotonic() + RETRY_S


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _key(name: bytes) -> bytes:
    return KEY_PREFIX + name.hex().encode()


def _told(line: bytes) -> str:
    """Return the store's words of an error: bounded, and printable."""
    said = line[1:101].decode("ascii", "replace") if line[:1] == b"-" else "what is no reply"
    return "it says: " + "".join(char if char.isprintable() else "?" for char in said)
