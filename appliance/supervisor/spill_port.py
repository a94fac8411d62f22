"""Supervisor's end of one engine's spill channel: a thread that seals blocks that come and returns those asked for.

The engine is hostile: it names a namespace by its key, and the supervisor, which drew the key, knows the tenant.
Unknown keys, and those of a tenant whose blocks may not be kept, are passed over. What one life of an engine sent is
never given to another: its epoch is part of every object's name, and ends with it. So an engine that was taken over
cannot leave anything behind for its successor.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.store_tier import BATCH_OBJECTS
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.doorbell import ThreadBell
from isolation.ipc.errors import PeerGoneError, ProtocolError, RingFull
from isolation.ipc.messages import Hello
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep
from isolation.keys.seal import Binding

log = structlog.get_logger()

EPOCH_BYTES = 16

WAIT_S = 60.0
"""Seconds of the longest sleep without a message: the engine, ``forget`` and ``close`` wake the thread."""

READ_BATCH = 16
"""Most messages taken at a time: with the largest blocks, 80 MiB of memory."""

SEND_PATIENCE_S = 1.0
"""Seconds for which a fetch waits for room in the engine's ring before it is given up."""

MAX_FORGETS = 1_024
"""Most namespaces that wait to be sent to the engine; a shred is rare."""


class SpillPort:
    """Thread for one engine; ``close`` ends it and forgets what that engine sent."""

    def __init__(
        self, channel: Channel, model_digest: str, store: SpillStore, owner: Callable[[bytes], str | None], name: str
    ) -> None:
        """``model_digest``: of the engine's model, to which its blocks are bound; ``owner``: tenant of a namespace key,
        if its blocks may be kept."""
        self.epoch = secrets.token_bytes(EPOCH_BYTES)
        self._channel = channel
        self._model_digest = model_digest
        self._store = store
        self._owner = owner
        self._name = name
        self._forgets: deque[bytes] = deque(maxlen=MAX_FORGETS)
        self._closing = threading.Event()
        self._bell: ThreadBell | None = None
        """Wakes the thread; None before ``start``."""
        self._thread = threading.Thread(target=self._run, name=f"spill {name}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._bell = ThreadBell()
        self._thread.start()

    def forget(self, namespace: bytes) -> None:
        """Ask the engine to forget a namespace; sent by the thread."""
        self._forgets.append(namespace)
        if self._bell is not None:
            self._bell.ring()

    def close(self) -> None:
        """End the thread and forget what came over this channel; blocks for at most a second or two."""
        self._closing.set()
        if self._bell is not None:
            self._bell.ring()
            if self._thread.is_alive():
                self._thread.join()
            self._bell.close()
        self._channel.close()
        self._store.drop_epoch(self.epoch)

    def _run(self) -> None:
        assert self._bell is not None, "the thread was started"
        try:
            while True:
                self._bell.drain()  # Before the looks at what it was rung for: no ring is lost.
                if self._closing.is_set():
                    return
                while self._forgets:
                    self._send(Forget(self._forgets.popleft()))
                began = time.thread_time()
                messages = self._channel.receive(READ_BATCH)
                for message in messages:
                    if self._closing.is_set():
                        return
                    self.serve(message)
                if not messages:
                    self._channel.wait(WAIT_S, self._bell.fileno())
                elif len(messages) == READ_BATCH:
                    # An engine that sends without end has half a core of ours, not the interpreter.
                    self._closing.wait(time.thread_time() - began)
        except PeerGoneError:
            log.debug("an engine has closed its spill channel", sandbox=self._name)
        except ProtocolError as error:
            log.warning("an engine broke the protocol on its spill channel", sandbox=self._name, problem=str(error))

    def serve(self, message: Message) -> None:
        """Serve one message."""
        if isinstance(message, Hello):
            return
        assert isinstance(message, Keep | Fetch), "the channel has refused everything else"
        tenant = self._owner(message.namespace)
        if isinstance(message, Keep):
            if tenant is not None:
                self._store.put(self._binding(tenant, message.block), message.content)
            return
        count = 0
        while tenant is not None and count < len(message.blocks):
            blocks = message.blocks[count : count + BATCH_OBJECTS]
            before = count
            for content, tier in self._store.find_many([self._binding(tenant, block) for block in blocks]):
                if not self._send(Fetched(message.request, count, content, tier)):
                    return
                count += 1
            if count < before + len(blocks):
                break
        if count < len(message.blocks):
            self._send(Fetched(message.request, count, b""))

    def _binding(self, tenant: str, block: bytes) -> Binding:
        return Binding(tenant, self._model_digest, block, self.epoch)

    def _send(self, message: Fetched | Forget) -> bool:
        """Send, waiting a little for room; False when there came none."""
        deadline = time.monotonic() + SEND_PATIENCE_S
        while not self._closing.is_set():
            try:
                self._channel.send(message)
            except RingFull:
                if time.monotonic() > deadline:
                    return False
                # The engine looks at its ring every step, or every few milliseconds, and rings when it has read.
                self._closing.wait(0.001)
            else:
                return True
        return False
