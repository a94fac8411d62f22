"""The supervisor's end of one engine's spill channel: a thread that seals what comes and gives back what is asked for.

The engine is hostile: it names a namespace by its key, and the supervisor, who drew the key, says whose it is. Keys of
nobody, or of a tenant that wants nothing kept, are passed over. What one life of an engine sent is never given to
another: its epoch is part of every object's name, and ends with it. So an engine that was taken over cannot leave
anything behind for its successor.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from appliance.supervisor.spill_store import SpillStore
from isolation.ipc.channel import Channel
from isolation.ipc.errors import PeerGoneError, ProtocolError, RingFull
from isolation.ipc.messages import Hello, Message
from isolation.ipc.spill_messages import Fetch, Fetched, Forget, Keep
from isolation.keys.seal import Binding

log = structlog.get_logger()

EPOCH_BYTES = 16

WAIT_S = 0.5
"""Longest sleep without a message; whoever wants to end the thread waits no longer than this."""

READ_BATCH = 16
"""Messages taken at a time: with the largest blocks, 80 MiB in our hands."""

SEND_PATIENCE_S = 1.0
"""How long an engine may leave its ring full before a fetch is given up: it has done so long before."""

MAX_FORGETS = 1_024
"""Namespaces that wait to be told to the engine; a shred is rare."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """What the blocks of one engine are bound to."""

    digest: str
    dtype: str = ""


class SpillPort:
    """One engine's thread; ``close`` ends it and forgets what that engine sent."""

    def __init__(
        self, channel: Channel, model: ModelName, store: SpillStore, owner: Callable[[bytes], str | None], name: str
    ) -> None:
        """``owner``: whose namespace key this is, of those whose blocks may be kept."""
        self.epoch = secrets.token_bytes(EPOCH_BYTES)
        self._channel = channel
        self._model = model
        self._store = store
        self._owner = owner
        self._name = name
        self._forgets: deque[bytes] = deque(maxlen=MAX_FORGETS)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spill {name}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def forget(self, namespace: bytes) -> None:
        """Have the engine forget a namespace, soon."""
        self._forgets.append(namespace)

    def close(self) -> None:
        """End the thread and forget what came over this channel; blocks for at most a second or two."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._channel.close()
        self._store.drop_epoch(self.epoch)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                while self._forgets:
                    self._send(Forget(self._forgets.popleft()))
                began = time.thread_time()
                messages = self._channel.receive(READ_BATCH)
                for message in messages:
                    self.serve(message)
                if not messages:
                    self._channel.wait(WAIT_S)
                elif len(messages) == READ_BATCH:
                    # An engine that sends without end has half a core of ours, not the interpreter.
                    self._closing.wait(time.thread_time() - began)
        except PeerGoneError:
            log.debug("an engine has closed its spill channel", sandbox=self._name)
        except ProtocolError as error:
            log.warning("an engine broke the protocol on its spill channel", sandbox=self._name, problem=str(error))

    def serve(self, message: Message) -> None:
        """Do what one message asks for: what the thread does with each."""
        if isinstance(message, Hello):
            return
        assert isinstance(message, Keep | Fetch), "the channel has refused everything else"
        tenant = self._owner(message.namespace)
        if isinstance(message, Keep):
            if tenant is not None:
                self._store.put(self._binding(tenant, message.block), message.content)
            return
        for index, block in enumerate(message.blocks):
            content = None if tenant is None else self._store.get(self._binding(tenant, block))
            if not self._send(Fetched(message.request, index, content or b"")) or content is None:
                return

    def _binding(self, tenant: str, block: bytes) -> Binding:
        return Binding(tenant, self._model.digest, block, self.epoch, dtype=self._model.dtype)

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
