"""The supervisor's end of the gateway's socket for files and batches, and what is done for the store beside it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.batches.messages import LENGTHS, StoreFrame, check_lengths, decode_frame, encode_frame
from appliance.common.batches.values import PIECE_BYTES
from appliance.common.config import ApplianceConfig
from appliance.common.control import Control, OpenStore, StoreState, StoreUp
from appliance.common.errors import ControlError, StoreError
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.book import StoreRefusedError
from appliance.supervisor.batches.outbox import Outbox
from appliance.supervisor.batches.store import BatchStore, open_store
from appliance.supervisor.spill_service import Vault
from isolation.ipc.errors import SweepError
from isolation.ipc.sweeping import check_overwriting

log = structlog.get_logger()

T = TypeVar("T")

GROUP = 32
"""Most calls that are carried out before their answers are sent: results among them are forced to disk together."""

TIDY_S = 60.0
"""Seconds between two looks for files and batches whose time is over."""

TELL_S = 5.0
"""Seconds between two reports of figures to the gateway."""

Publish = Callable[[Control, tuple[int, ...]], bool]


class StorePort:
    """Serves the store to one gateway at a time; all methods run in one event loop."""

    def __init__(self, store: BatchStore, outbox: Outbox, publish: Publish) -> None:
        self._store = store
        self._outbox = outbox
        self._publish = publish
        self._serving: asyncio.Task[None] | None = None
        self._before: asyncio.Task[None] | None = None
        """Task of the last socket, which may still be ending."""

    def open(self, _message: OpenStore) -> None:
        """Hand the gateway a new socket, in place of an earlier one."""
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            ours.setblocking(False)
            if not self._publish(StoreUp(), (theirs.fileno(),)):
                ours.close()
                return
        self._serving = asyncio.create_task(self._serve(ours, self._before), name="files and batches")
        self._before = self._serving

    def gateway_left(self) -> None:
        """Close the socket; uploads that had begun are forgotten."""
        self._end()

    async def run(self) -> None:
        """Write entries to the audit log, remove what is too old, and tell figures, until cancelled."""
        try:
            await asyncio.gather(self._outbox.run(), self._tidy(), self._tell())
        finally:
            self._end()

    async def flush(self) -> bool:
        """Write all entries that wait, and overwrite them in the store's book; False where log or book fail."""
        if not await self._outbox.flush():
            return False
        try:
            await asyncio.to_thread(self._store.book.overwrite)
        except StoreRefusedError:
            return False
        return True

    async def close(self) -> None:
        """Close the socket, write the last entries, and close the store."""
        self._end()
        if self._before is not None:
            await asyncio.wait((self._before,))
        await self._outbox.flush()
        await asyncio.to_thread(self._store.close)

    def _end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None

    async def _serve(self, sock: socket.socket, before: asyncio.Task[None] | None) -> None:
        reader, writer = await asyncio.open_connection(sock=sock, limit=PIECE_BYTES)
        if before is not None:
            await asyncio.wait((before,))
        frames: asyncio.Queue[StoreFrame] = asyncio.Queue(GROUP)
        reading = asyncio.create_task(_read(reader, frames), name="calls of the store")
        try:
            while await self._answer_group(frames, reading, writer):
                await writer.drain()
        except ControlError as error:
            log.error("the gateway's socket for files and batches is closed", reason=error.message)
        except OSError:
            pass  # The gateway is gone, which the control socket tells.
        finally:
            reading.cancel()
            writer.close()
            with suppress(StoreRefusedError):
                await _to_end(asyncio.to_thread(self._store.gateway_left))

    async def _answer_group(
        self, frames: asyncio.Queue[StoreFrame], reading: asyncio.Task[None], writer: asyncio.StreamWriter
    ) -> bool:
        """Carry out the calls that wait, and send their answers; False where the other end is closed. A method of its
        own, so that nothing of calls and answers, which may be text of files, stays until the next calls come.

        Raises:
            ControlError: a call is none that a gateway sends.
        """
        group = await _next_group(frames, reading)
        if not group:
            return False
        # A call that has begun is carried out, whatever becomes of the gateway: two must not meet.
        for answer in await _to_end(asyncio.to_thread(self._store.answer, group)):
            writer.write(encode_frame(answer))
        self._outbox.wake()
        return True

    async def _tidy(self) -> None:
        while True:
            try:
                while await asyncio.to_thread(self._store.tidy):
                    self._outbox.wake()
                self._outbox.wake()
            except StoreRefusedError as error:
                log.error("the book of files and batches fails", problem=str(error.__cause__ or error))
            await asyncio.sleep(TIDY_S)

    async def _tell(self) -> None:
        while True:
            with suppress(StoreRefusedError):
                self._publish(StoreState(await asyncio.to_thread(self._store.figures)), ())
            await aligned_sleep(TELL_S)


def open_port(config: ApplianceConfig, vault: Vault | None, recorder: Recorder, publish: Publish) -> StorePort | None:
    """Open the store that the configuration asks for; None without one. What a crash left to be told to the audit log
    is compared with the log. Blocks.

    Raises:
        StartError: the store cannot be used.
    """
    batches, audit = config.batches, recorder.audit
    if batches is None:
        return None
    assert vault is not None, "the configuration was checked"
    assert audit is not None, "the configuration was checked"
    assert config.audit is not None, "the configuration was checked"
    store = open_store(batches.directory, vault.keyring, batches.max_bytes)
    vault.shred_files = store.shred
    outbox = Outbox(store.book, audit.name, recorder.append)
    try:
        known = outbox.reconcile(config.audit.directory, audit.size)
    except (StoreRefusedError, OSError) as error:
        raise StoreError(f"cannot compare {batches.directory} with the audit log: {error}") from error
    try:
        check_overwriting()
    except SweepError as error:
        log.warning("text of files that are deleted may stay in this process's memory", problem=str(error))
    log.info("files and batches", folder=str(batches.directory), unreadable=store.forgotten, logged=known)
    return StorePort(store, outbox, publish)


async def _read(reader: asyncio.StreamReader, frames: asyncio.Queue[StoreFrame]) -> None:
    """Read calls until the other end is closed.

    Raises:
        ControlError: one is none that a gateway sends.
    """
    try:
        while True:
            await frames.put(await _next_call(reader))
    except (asyncio.IncompleteReadError, OSError):
        return


async def _next_call(reader: asyncio.StreamReader) -> StoreFrame:
    """Read one call; a function of its own for the reason of ``StorePort._answer_group``.

    Raises:
        IncompleteReadError: the other end is closed.
        ControlError: it is none that a gateway sends.
    """
    header, payload = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    check_lengths(header, payload)
    return decode_frame(await reader.readexactly(header), await reader.readexactly(payload))


async def _next_group(frames: asyncio.Queue[StoreFrame], reading: asyncio.Task[None]) -> list[StoreFrame]:
    """Return the calls that wait, at least one; none where the other end is closed.

    Raises:
        ControlError: a call is none that a gateway sends.
    """
    if frames.empty():
        coming = asyncio.ensure_future(frames.get())
        await asyncio.wait((coming, reading), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            coming.cancel()
            await reading
            return []
        group = [coming.result()]
    else:
        group = [frames.get_nowait()]
    while len(group) < GROUP and not frames.empty():
        group.append(frames.get_nowait())
    return group


async def _to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work in a thread to its end, also where this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
