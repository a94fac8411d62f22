"""Socket on which the operator orders a running supervisor to destroy, renew or rewrap keys, or to release spend.

It is not the gateway's business: a gateway that was taken over must not be able to destroy what others have. The
socket has mode 0600, and the kernel is asked who is at the other end (SO_PEERCRED, unix(7)): root or the supervisor's
own user. (In a demo both host processes have one user, and there this wall is none.)

A request is one line of JSON, ``{"do": "shred", "tenant": "alpha"}``, likewise with ``rotate`` or ``release``, or
``{"do": "rewrap", "root": HEX}``; the answer is one line, with ``ok`` and either what was done or ``problem``. Whatever
was understood is in the audit log, whether it could be done or not. ``{"do": "record", "what": "pull", ...}`` makes an
entry and nothing else: the command tells what it had the downloader do. So does ``{"do": "called", ...}``, by which the
operator's API tells of its calls.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from appliance.common.audit.entry import Entry, entry
from appliance.common.control import Control, Namespaces
from appliance.common.errors import AuditNamesError
from appliance.common.paths import identity
from appliance.common.usage.book import Released, UsageAccessError
from appliance.supervisor.spill_service import Vault
from isolation.keys.errors import KeyringError, KeysError

log = structlog.get_logger()

MAX_LINE_BYTES = 4_096
"""Most bytes of a request: a word and a tenant's name."""

READ_TIMEOUT_S = 5.0
"""Seconds after which a connection without a request is closed."""

_UCRED = struct.Struct("3i")

_FIELDS = {"shred": "tenant", "rotate": "tenant", "release": "tenant", "rewrap": "root"}
"""What an order is about."""

_COUNTED = {"shred": "objects", "rotate": "objects", "release": "requests", "rewrap": "keys"}
"""Number in an order's answer that its entry in the audit log has."""

_RECORDED = {"what": str, "model": str, "model_digest": str, "source": str, "outcome": str, "count": int}
"""Fields of an order of which only an entry is made, and their types."""

_CALLED = {
    "method": str,
    "user": int,
    "roles": str,
    "subject": str,
    "request": str,
    "outcome": str,
    "tenant": str,
    "caller": str,
    "reason": str,
}
"""Fields of what the operator's API tells of a call, and their types; ``user`` or ``caller`` is who called it."""

RECORDED = ("pull", "remove", "add", "stop")
"""Commands about models of which an entry is made."""


NOTHING_KEPT = (
    "this appliance keeps nothing of tenants: athanor.yaml has no `sandbox: spill` and no `batches`, "
    "and so no tenant has a key"
)


NO_BOOK = "this appliance keeps no audit log, and so no usage book: nothing is reserved"


class OperatorSocket:
    """Server of the operator's orders; all methods run in one event loop."""

    def __init__(
        self,
        path: Path,
        vault: Vault | None,
        publish: Callable[[Control, tuple[int, ...]], bool],
        record: Callable[[Entry], None],
        accounts: Callable[[str], list[str]] = lambda tenant: [tenant],
        unlink: Callable[[str], Awaitable[str]] | None = None,
        release: Callable[[str], Released] | None = None,
    ) -> None:
        """``record``: takes entries for the audit log; ``accounts``: the names under whose keys engines have what a
        tenant sent, may block; ``unlink``: makes the audit log's pseudonyms of a tenant lead to it no more, and returns
        the tenant's; ``release``: releases a tenant's spend of requests that ended with an earlier boot, blocks; None
        where no usage book is kept."""
        self._path = path
        self._vault = vault
        self._publish = publish
        self._record = record
        self._accounts = accounts
        self._unlink = unlink
        self._release = release
        self._server: asyncio.AbstractServer | None = None
        self._turn = asyncio.Lock()
        self._identity: tuple[int, int] | None = None
        """Device and inode of the socket's file."""

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
        self._identity = identity(self._path)

    async def mend(self) -> None:
        """Listen anew where the socket's file was removed. To be called now and then; a failure is tried again."""
        if self._server is None or identity(self._path) == self._identity:
            return
        earlier = self._server
        try:
            await self.open()
        except OSError as error:
            log.error("the operator's socket was removed and cannot be made again", problem=str(error))
            return
        earlier.close()
        log.warning("the operator's socket was removed, and is there again")

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            user = _user(writer.get_extra_info("socket"))
            if _admissible(user):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    line = await reader.readline()
                answer = await self._answer(line, user)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, OSError) as error:
            log.warning("an operator's command was not heard to its end", problem=str(error))
        finally:
            writer.close()

    async def _answer(self, line: bytes, user: int) -> dict[str, Any]:
        try:
            wish = json.loads(line)
        except (ValueError, RecursionError):
            wish = None
        what = wish.get("do") if isinstance(wish, dict) else None
        if isinstance(wish, dict) and what == "record":
            return self._record_model(wish, user)
        if isinstance(wish, dict) and what == "called":
            return self._record_call(wish)
        if not isinstance(what, str) or what not in _FIELDS or wish.keys() != {"do", _FIELDS[what]}:
            return {"ok": False, "problem": "not a command of this release"}
        value = wish[_FIELDS[what]]
        if not isinstance(value, str):
            return {"ok": False, "problem": "not a command of this release"}
        tenant = value if _FIELDS[what] == "tenant" else ""
        async with self._turn:
            try:
                answer = await self._do(what, value)
            except (KeysError, AuditNamesError, UsageAccessError) as error:
                log.error("an operator's order failed", what=what, tenant=tenant[:64], problem=str(error))
                self._record(entry("order", what=what, tenant=tenant, user=user, outcome="FAILED", count=0))
                return {"ok": False, "problem": str(error)}
        pseudonym = answer.pop("pseudonym", "")
        count = answer[_COUNTED[what]]
        # Neither the log nor the journal may say whose pseudonym it was.
        log.warning("an operator's order was carried out", what=what, tenant=pseudonym or tenant, count=count)
        self._record(entry("order", what=what, tenant=pseudonym or tenant, user=user, outcome="OK", count=count))
        return {"ok": True, **answer}

    def _record_model(self, wish: dict[str, Any], user: int) -> dict[str, Any]:
        fields = {name: value for name, value in wish.items() if name != "do"}
        kinds = _RECORDED.items()
        if fields.keys() != _RECORDED.keys() or not all(type(fields[name]) is kind for name, kind in kinds):
            return {"ok": False, "problem": "not a command of this release"}
        if fields["what"] not in RECORDED:
            return {"ok": False, "problem": "not a command of this release"}
        self._record(entry("model", user=user, reason="", tenant="", model_signer="", **fields))
        return {"ok": True}

    def _record_call(self, wish: dict[str, Any]) -> dict[str, Any]:
        # A process of the API that is older than this one, until its restart, tells of no callers elsewhere.
        fields = {"caller": "", "reason": "", **{name: value for name, value in wish.items() if name != "do"}}
        kinds = _CALLED.items()
        if fields.keys() != _CALLED.keys() or not all(type(fields[name]) is kind for name, kind in kinds):
            return {"ok": False, "problem": "not a command of this release"}
        self._record(entry("call", **fields))
        return {"ok": True}

    async def _do(self, what: str, value: str) -> dict[str, Any]:
        """Carry out an order.

        Raises:
            KeysError, AuditNamesError, UsageAccessError: it cannot be.
        """
        if what == "release":
            if self._release is None:
                raise UsageAccessError(NO_BOOK)
            return {"tenant": value, **asdict(await asyncio.to_thread(self._release, value))}
        vault = self._vault
        if vault is None and what != "shred":
            raise KeyringError(NOTHING_KEPT)
        if vault is not None and what == "rewrap":
            try:
                root = bytes.fromhex(value)
            except ValueError:
                raise KeyringError("the new root key is no number in hexadecimal digits") from None
            return {"keys": await asyncio.to_thread(vault.rewrap, root)}
        done = await self._destroy(vault, what, value) if vault is not None else {"objects": 0, "had_key": False}
        pseudonym = await self._unlink(value) if what == "shred" and self._unlink is not None else ""
        if vault is None and not pseudonym:
            raise KeyringError(NOTHING_KEPT)
        unlinked = {"unlinked": True, "pseudonym": pseudonym} if pseudonym else {}
        return {"tenant": value, **done, **unlinked}

    async def _destroy(self, vault: Vault, what: str, tenant: str) -> dict[str, Any]:
        """Destroy a tenant's key, and draw another where it is to be renewed.

        Raises:
            KeysError: it cannot be.
        """
        # First the names of what is to come, so that nothing new joins what is being destroyed.
        accounts = await asyncio.to_thread(self._accounts, tenant)
        renewed = {name: key for name in accounts if (key := vault.renew(name)) is not None}
        if renewed:
            self._publish(Namespaces(renewed), ())
        # What the tenant sent as a member of a sharing group was sealed under the group's key.
        destroy = vault.shred if what == "shred" else vault.rotate
        done = [await asyncio.to_thread(destroy, name) for name in accounts]
        fleet = {"fleet": True} if any(one.ordered for one in done) else {}
        return {"objects": sum(one.objects for one in done), "had_key": any(one.had_key for one in done), **fleet}


def _user(peer: socket.socket) -> int:
    """User id of the process at the other end, from the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(credentials)
    return int(uid)


def _admissible(user: int) -> bool:
    if user not in (0, os.geteuid()):
        log.warning("refused an operator's command of another user", uid=user)
        return False
    return True
