"""What the operator may tell a running supervisor: destroy or renew a tenant's key. A socket of its own.

It is not the gateway's business: a gateway that was taken over must not be able to destroy what others have. The
socket has mode 0600, and the kernel is asked who is at the other end (SO_PEERCRED, unix(7)): root or the supervisor's
own user. (In a demo both host processes have one user, and there this wall is none.)

A request is one line of JSON, ``{"do": "shred", "tenant": "alpha"}``; the answer is one line, with ``ok`` and either
what was done or ``problem``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from appliance.control import Control, Namespaces
from appliance.supervisor.vault import Vault
from isolation.keys.errors import KeysError

log = structlog.get_logger()

MAX_LINE_BYTES = 4_096
"""Bytes of a request: a word and a tenant's name."""

READ_TIMEOUT_S = 5.0
"""A command that says nothing is let go."""

_UCRED = struct.Struct("3i")


class OperatorSocket:
    """Listens for the operator; all methods run in one event loop."""

    def __init__(
        self, path: Path, vault: Vault | None, publish: Callable[[Control, tuple[int, ...]], bool]
    ) -> None:
        self._path = path
        self._vault = vault
        self._publish = publish
        self._server: asyncio.AbstractServer | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the path cannot be used.
        """
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_LINE_BYTES)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _admissible(writer.get_extra_info("socket")):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    line = await reader.readline()
                answer = await self._answer(line)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, OSError) as error:
            log.warning("an operator's command was not heard to its end", problem=str(error))
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            wish = json.loads(line)
        except (ValueError, RecursionError):
            wish = None
        known = isinstance(wish, dict) and wish.keys() == {"do", "tenant"} and isinstance(wish["tenant"], str)
        if not known or wish["do"] not in ("shred",):
            return {"ok": False, "problem": "not a command of this release"}
        if self._vault is None:
            return {"ok": False, "problem": "this appliance keeps no KV outside of its engines"}
        async with self._turn:
            return await self._shred(self._vault, wish["tenant"])

    async def _shred(self, vault: Vault, tenant: str) -> dict[str, Any]:
        # First the name of what is to come, so that nothing new joins what is being destroyed.
        renewed = vault.renew(tenant)
        if renewed is not None:
            self._publish(Namespaces({tenant: renewed}), ())
        try:
            done = await asyncio.to_thread(vault.shred, tenant)
        except KeysError as error:
            log.error("a tenant's key was not destroyed", tenant=tenant[:64], problem=str(error))
            return {"ok": False, "problem": str(error)}
        log.warning("a tenant's key was destroyed", tenant=tenant, objects=done.objects)
        return {"ok": True, "tenant": tenant, "objects": done.objects, "had_key": done.had_key}


def _admissible(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    if uid not in (0, os.geteuid()):
        log.warning("refused an operator's command of another user", uid=uid)
        return False
    return True
