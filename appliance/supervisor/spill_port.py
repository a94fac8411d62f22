"""Supervisor's end of one engine's spill channel: a thread that seals blocks that come and returns those asked for.

The engine is hostile: it names a namespace by its key, and the supervisor, which drew the key, knows the tenant.
Unknown keys, and those of a tenant whose blocks may not be kept, are passed over. What one life of an engine sent is
never given to another: its epoch is part of every object's name, and ends with it. So an engine that was taken over
cannot leave anything behind for its successor. The one exception are tenants whose blocks a fleet shares
(``fleet_kv``): those are sealed once more for all hosts, and a fetch that this engine's own blocks do not answer goes
on there. One that breaks the protocol is at fault here as on its other channel, and is ended: without the thread it
would not be told either what it must forget. Whatever it sends, and however often it rings, costs at most its share of
a processor (``PORT_SHARE``).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import structlog

from appliance.common.errors import SpillBreachError, SpillOverrunError, SpillPortError
from appliance.common.time_share import TimeShare
from appliance.supervisor.fleet_kv import EngineLife, FleetKv
from appliance.supervisor.fleet_seek import FleetSeeker
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.store_tier import BATCH_OBJECTS
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.doorbell import ThreadBell
from isolation.ipc.errors import PeerGoneError, ProtocolError, RingFull
from isolation.ipc.messages import Hello
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, Lost, Share, Unwanted, Withdraw, mark_of
from isolation.keys.seal import Binding

log = structlog.get_logger()

EPOCH_BYTES = 16

WAIT_S = 60.0
"""Seconds of the longest sleep without a message: the engine, ``forget`` and ``close`` wake the thread."""

READ_BATCH = 16
"""Most messages taken at a time: with the largest blocks, 80 MiB of memory."""

SEND_PATIENCE_S = 1.0
"""Seconds for which a fetch waits for room in the engine's ring before it is given up."""

MAX_MARKS = 4_096
"""Most namespaces of which the engine is still to be told something, two words of each at most: a lease that ends and
comes back changes two namespaces of each tenant. An engine that has read nothing while so many changed is ended: it
would keep what it was to forget."""

PORT_SHARE = 0.8
"""Part of one processor that the thread of one engine may use on and on. An engine that sends or rings without end
leaves a fifth of the interpreter to the rest; blocks of an honest one come back at four fifths of the pace."""

PORT_BURST_S = 0.25
"""Seconds of processor time that the thread may use at once after a quiet time: a long prefix comes back without a
pause. In any second the thread uses at most this, ``PORT_SHARE`` of it, and one batch of blocks more."""


class SpillPort:
    """Thread for one engine; ``close`` ends it and forgets what that engine sent."""

    def __init__(
        self,
        channel: Channel,
        model_digest: str,
        store: SpillStore,
        owner: Callable[[bytes], str | None],
        name: str,
        failed: Callable[[SpillPortError], object] = lambda _error: None,
        fleet: tuple[FleetKv, EngineLife] | None = None,
    ) -> None:
        """Args:
        channel: the host's end of the spill channel, which the port owns.
        model_digest: digest of the engine's model, to which its blocks are bound.
        store: store of sealed blocks.
        owner: gives the tenant of a namespace key, if its blocks may be kept.
        name: name of the sandbox, for the log.
        failed: called from the thread when it ends because the machine refuses what it needs, or because the engine
            broke the protocol (``SpillBreachError``).
        fleet: blocks of tenants that share, and this life of the engine; None where there is no fleet.
        """
        self.epoch = secrets.token_bytes(EPOCH_BYTES)
        self._fleet = fleet
        self._seeker = None if fleet is None else FleetSeeker(*fleet, self._ring, name)
        self.shared: set[str] = set()
        """Accounts for which the engine's blocks went to the fleet."""
        self.broke = False
        """Whether the engine broke the protocol."""
        self._channel = channel
        self._model_digest = model_digest
        self._store = store
        self._owner = owner
        self.name = name
        """Name of the sandbox."""
        self._failed = failed
        self._telling = threading.Lock()
        """Held around looks at what the engine is to be told."""
        self._words: dict[bytes, list[Forget | Share]] = {}
        """By mark what the engine is to be told, the oldest first: to forget, to share, or both in this order."""
        self._overrun = False
        """Whether there was more to tell than may wait."""
        self._lost = set[bytes]()
        """Marks of which the engine is to be told that the store has lost what it had: each once, however often."""
        self._closing = threading.Event()
        self._bell: ThreadBell | None = None
        """Wakes the thread; None before ``start``."""
        self._thread = threading.Thread(target=self._run, name=f"spill {name}", daemon=True)

    def start(self) -> None:
        """Begin to serve.

        Raises:
            SpillPortError: the machine gives no descriptors or no thread; ``close`` is still to be called.
        """
        try:
            self._bell = ThreadBell()
            self._thread.start()
            if self._seeker is not None:
                self._seeker.start()
        except (OSError, RuntimeError) as error:  # A thread that cannot start is a RuntimeError.
            raise _refused(error) from error

    def forget(self, namespace: bytes) -> None:
        """Ask the engine to forget a namespace; sent by the thread."""
        mark = mark_of(namespace)
        with self._telling:
            self._words.pop(mark, None)  # What was to be shared ends with it.
            self._lost.discard(mark)
            self._add(Forget(mark))
        self._ring()

    def share(self, namespace: bytes) -> None:
        """Tell the engine that other hosts may have blocks of a namespace, where it shares; sent by the thread."""
        if self._fleet is not None:
            kv = self._fleet[0]
            with self._telling:
                self._add(Share(mark_of(namespace), kv.writes_computed, kv.lasts_s))
            self._ring()

    def _add(self, word: Forget | Share) -> None:
        """Have a word told behind those that wait; the lock is held."""
        if word.mark not in self._words and len(self._words) >= MAX_MARKS:
            self._overrun = True
            return
        words = self._words.setdefault(word.mark, [])
        words[:] = [one for one in words if type(one) is not type(word)] + [word]

    def lose(self, namespaces: Iterable[bytes]) -> None:
        """Tell the engine that hosts find nothing any more of what it sent of these namespaces; sent by the thread."""
        if self._fleet is not None:
            marks = {mark_of(namespace) for namespace in namespaces}
            with self._telling:
                self._lost |= marks
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def close(self) -> None:
        """End the thread and forget what came over this channel; blocks for at most a second or two."""
        self._closing.set()
        if self._seeker is not None:
            self._seeker.close()
        if self._bell is not None:
            self._bell.ring()
            if self._thread.is_alive():
                self._thread.join()
            self._bell.close()
        self._channel.close()
        self._store.drop_epoch(self.epoch)

    def _run(self) -> None:
        try:
            self._serve_all()
        except PeerGoneError:
            log.debug("an engine has closed its spill channel", sandbox=self.name)
        except ProtocolError as error:
            self.broke = True
            log.warning("an engine broke the protocol on its spill channel", sandbox=self.name, problem=str(error))
            self._failed(SpillBreachError(f"broke the protocol on its spill channel: {error}"))
        except SpillPortError as error:
            self._failed(error)
        except OSError as error:
            self._failed(_refused(error))

    def _serve_all(self) -> None:
        """Serve until ``close``, within the share of processor time."""
        assert self._bell is not None, "the thread was started"
        share, used = TimeShare(time.monotonic(), PORT_SHARE, PORT_BURST_S), time.thread_time()

        def pace() -> None:
            nonlocal used
            before, used = used, time.thread_time()
            if pause_s := share.spend(used - before, time.monotonic()):
                self._closing.wait(pause_s)

        while True:
            self._bell.drain()  # Before the looks at what it was rung for: no ring is lost.
            if self._closing.is_set():
                return
            self._tell()
            for found in self._seeker.take() if self._seeker is not None else ():
                self._send(found)
            messages = self._channel.receive(READ_BATCH)
            for message in messages:
                for _ in self._steps(message):
                    pace()
                    if self._closing.is_set():
                        return
            if not messages:
                self._channel.wait(WAIT_S, self._bell.fileno())
            pace()  # Rings with nothing behind them cost time as well.

    def _tell(self) -> None:
        """Send what the engine is to be told. Where its ring stays full the rest is sent later, and none is lost.

        Raises:
            SpillOverrunError: it has read nothing while more changed than may wait.
        """
        while (word := self._next_word()) is not None:
            sent = self._send(word)
            with self._telling:
                if isinstance(word, Lost):
                    if not sent:
                        self._lost.add(word.mark)
                elif sent:
                    self._note_told(word)
            if not sent:
                return

    def _note_told(self, word: Forget | Share) -> None:
        """A word was sent; meanwhile there may be another of its namespace. The lock is held."""
        words = self._words.get(word.mark, [])
        words[:] = [one for one in words if one is not word]
        if not words:
            self._words.pop(word.mark, None)

    def _next_word(self) -> Forget | Share | Lost | None:
        """What the engine is to be told next; a word to forget or to share stays until it was sent."""
        with self._telling:
            if self._overrun:
                raise SpillOverrunError(
                    f"the engine has read nothing on its spill channel while {MAX_MARKS} namespaces changed, and would "
                    "keep what it is to forget. It is started again; when this repeats, look at why it reads nothing"
                )
            for words in self._words.values():
                return words[0]
            return Lost(self._lost.pop()) if self._lost else None

    def serve(self, message: Message) -> None:
        """Serve one message, without pauses."""
        for _ in self._steps(message):
            pass

    def _steps(self, message: Message) -> Iterator[None]:
        """Serve one message in steps of at most ``BATCH_OBJECTS`` blocks; yields after each."""
        if isinstance(message, Hello):
            return
        assert isinstance(message, Keep | Withdraw | Fetch | Unwanted), "the channel has refused everything else"
        if isinstance(message, Unwanted):
            if self._seeker is not None:
                self._seeker.end(message.request)
            return
        tenant = self._owner(message.namespace)
        if isinstance(message, Keep):
            if self._fleet is not None:
                self._fleet[0].left_out(message.left_out)
            if tenant is not None:
                self._store.put(self._binding(tenant, message.block), message.content)
                self._share(message)
            yield
            return
        if isinstance(message, Withdraw):
            if tenant is not None:
                self._drop(tenant, message)
            yield
            return
        yield from self._answer(message, tenant)

    def _answer(self, message: Fetch, tenant: str | None) -> Iterator[None]:
        """Answer a fetch; yields after each part."""
        count = 0
        while tenant is not None and count < len(message.blocks):
            blocks = message.blocks[count : count + BATCH_OBJECTS]
            before = count
            for content, tier in self._store.find_many([self._binding(tenant, block) for block in blocks]):
                if not self._send(Fetched(message.request, count, content, tier)):
                    return
                count += 1
            yield
            if count < before + len(blocks):
                break
        if count < len(message.blocks) and not (tenant is not None and self._seek(message, count)):
            self._send(Fetched(message.request, count, b""))
        yield

    def _share(self, message: Keep) -> None:
        """Offer a block to the fleet, where its tenant shares."""
        if self._fleet is not None:
            kv, life = self._fleet
            account = kv.keep(message.namespace, message.block, life, message.content)
            if account is not None:
                self.shared.add(account)

    def _drop(self, tenant: str, message: Withdraw) -> None:
        """Drop a block that the engine calls wrong, here and in the fleet."""
        self._store.drop_block(self._binding(tenant, message.block))
        if self._fleet is not None:
            kv, life = self._fleet
            kv.withdraw(message.namespace, message.block, life)

    def _seek(self, message: Fetch, first: int) -> bool:
        """Have the rest of a fetch asked for in the fleet; False where it is not."""
        return self._seeker is not None and message.size > 0 and self._seeker.ask(message, first)

    def _binding(self, tenant: str, block: bytes) -> Binding:
        return Binding(tenant, self._model_digest, block, self.epoch)

    def _send(self, message: Fetched | Forget | Share | Lost) -> bool:
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


def _refused(error: OSError | RuntimeError) -> SpillPortError:
    """Say that the machine refused what a port needs, and what to do."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return SpillPortError(
        f"the spill channel of the engine cannot be served: {reason}. The engine is started again; when this repeats, "
        "raise the limits of open files and tasks of the supervisor's unit (LimitNOFILE, TasksMax), or check its disk"
    )
