"""Grammar processes: the keeper, the forker, and the worker's end of the shared pipe to them.

Both are forked from the worker before it receives any tenant's text, so neither they nor a grammar process ever contain
one. The *keeper* routes; it holds little memory and never forks again. The *forker* imports llguidance and builds its
tokenizer at once, concurrently with the worker's first answers, so that no grammar waits for it (a second for 150,000
ids). It forks a grammar process on the keeper's request: under gVisor a fork of so much memory takes a tenth of a
second, which delays only the forker. Frames use the wire format. They pass through memory that the two processes alone
map (``engine.sandbox.shared_pipe``), so that no copy of a grammar stays in gVisor's own process. A process whose peer
is gone exits. Each locks itself down before a tenant's first byte arrives, to its own list
(``engine.text.allowed_calls``).
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from engine.sandbox.attach import LocalSocket, receive_packet, send_packet, socket_pair
from engine.sandbox.lockdown import compiled, lock_down, narrow
from engine.sandbox.shared_pipe import SharedMemory, SharedPipe, memory_by_descriptor
from engine.text.allowed_calls import forker_calls, grammar_calls, keeper_calls
from engine.text.ending import how_ended, reap
from engine.text.grammar_child import EXIT_DEFECT, EXIT_DONE, MEMORY_BYTES, run_child
from engine.text.grammar_keeper import MAX_COMPILING, Keeper
from engine.text.guard import OwnSize
from engine.text.sandbox_memory import SandboxMemory
from engine.text.token_bytes import Words, build_tokenizer
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message, decode, encode
from isolation.ipc.doorbell import create_pipe
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.memory_order import require_total_store_order
from isolation.ipc.messages import MAX_FRAME_BYTES
from isolation.ipc.sweeping import Rounds

TICK_S = 0.02
"""Seconds between checks of the clock while work is in progress."""

IDLE_S = 10.0
"""Longest sleep in seconds without work while grammars are kept, which are let go in time; input wakes it."""

EMPTY_S = 3_600.0
"""Longest sleep in seconds while none is kept: each end of one wakes the sandbox, and there is nothing to look at."""

MAX_UNSENT_BYTES = 8 << 20
"""Bytes of answers that wait for the worker to take them; with more, no grammar process is read until it has. 400 masks
of a model with 152,000 token ids: more than the requests of an engine need in one step. One turn's results come on top
(``grammar_process_handle.MAX_RESULT_BYTES`` of each process)."""

ROOM_WAIT_S = 0.0002
"""Seconds between two tries while the keeper has not made room; it always reads."""


class GrammarLine:
    """The worker's end: sends frames to the keeper and receives its frames."""

    def __init__(self, pipe: SharedPipe, pid: int) -> None:
        self._pipe = pipe
        self._pid = pid
        self._frames = FrameReader(pipe)

    @property
    def bells(self) -> tuple[int, int]:
        """Return the descriptors that the keeper rings and that ring it."""
        return self._pipe.bells

    def fileno(self) -> int:
        """Return the descriptor that is readable when the keeper has sent something or has ended."""
        return self._pipe.fileno()

    def send(self, message: Message) -> None:
        """Send a message. The keeper always reads, so this hardly ever waits.

        Raises:
            RemoteProtocolError: the keeper has ended.
        """
        view = memoryview(encode(message))
        try:
            while view := view[self._pipe.write(view) :]:
                time.sleep(ROOM_WAIT_S)
        except PeerGoneError as error:
            raise self._ended() from error

    def receive(self) -> list[Message]:
        """Return the messages that the keeper has sent.

        Raises:
            RemoteProtocolError: the keeper has ended.
        """
        messages = self._frames.read()
        if messages is None:
            raise self._ended()
        return messages

    def _ended(self) -> RemoteProtocolError:
        return RemoteProtocolError(f"the keeper of grammars has ended{how_ended(self._pid)}")


class FrameReader:
    """Reads frames from a shared pipe without blocking."""

    def __init__(self, pipe: SharedPipe) -> None:
        self._pipe = pipe
        self._held = bytearray()

    def read(self) -> list[Message] | None:
        """Return the complete messages available; None once the other side has ended."""
        data = self._pipe.read()
        if data is None:
            return None
        self._held += data
        messages = []
        while len(self._held) >= HEADER_BYTES:
            length = int.from_bytes(self._held[:4], "little")
            if not HEADER_BYTES <= length <= MAX_FRAME_BYTES:
                raise RemoteProtocolError("a frame between worker and keeper is malformed")
            if length > len(self._held):
                break
            messages.append(decode(bytes(self._held[:length])))
            del self._held[:length]
        return messages


def start_keeper(words: Words, channel: Channel, rounds: Rounds, memory_bytes: int) -> GrammarLine:
    """Fork the keeper; the child never returns from this function.

    Args:
        words: facts about the model's tokenizer.
        channel: the channel to the host; closed in the child.
        rounds: schedule of memory sweeps; the child has its own.
        memory_bytes: the sandbox's limit, as ``TextConfig`` has it.

    Raises:
        UnsupportedMachineError: this machine orders memory otherwise.
    """
    require_total_store_order()
    shared = SharedMemory(None)
    read_from_worker, write_to_keeper = create_pipe()
    read_from_keeper, write_to_worker = create_pipe()
    pid = os.fork()
    if pid:
        os.close(read_from_worker)
        os.close(write_to_worker)
        return GrammarLine(SharedPipe(shared, read_from_keeper, write_to_keeper, first=True), pid)
    status = EXIT_DEFECT
    try:
        # The host treats the worker's end as the sandbox's end: no other process may hold its doorbells.
        channel.close()
        os.close(write_to_keeper)
        os.close(read_from_keeper)
        ours, theirs = socket_pair()
        if forker := os.fork():
            theirs.close()
            memory = SandboxMemory(memory_bytes, MAX_COMPILING * MEMORY_BYTES)
            lock_down(keeper_calls(memory.file))
            worker = SharedPipe(shared, read_from_worker, write_to_worker, first=False)
            status = KeeperLoop(words.mask_bytes, ours, worker, rounds, memory).run()
            if status == EXIT_DEFECT:
                sys.stderr.write(f"engine.text: the forker of grammars has ended{how_ended(forker)}\n")
        else:
            ours.close()
            shared.close()  # A grammar's process has no part in what others are told.
            os.close(read_from_worker)
            os.close(write_to_worker)
            status = _fork_on(theirs, words)
    except BaseException as error:  # noqa: BLE001 - process boundary: it must not go on as a second worker
        sys.stderr.write(f"engine.text: the keeper of grammars met a defect: {type(error).__name__}: {error}\n")
    finally:
        os._exit(status)


class KeeperLoop:
    """The keeper's loop: one poll over the worker, the forker and all grammar processes."""

    def __init__(
        self, mask_bytes: int, forker: LocalSocket, worker: SharedPipe, rounds: Rounds, memory: SandboxMemory
    ) -> None:
        self._forker = forker
        self._worker = worker
        self._frames = FrameReader(worker)
        self._rounds = rounds
        self._unsent = bytearray()
        self._keeper = Keeper(self._ask, mask_bytes, scarce=memory.scarce)

    def run(self) -> int:
        """Run until the worker or the forker has gone."""
        self._keeper.prepare()
        while (status := self.turn()) is None:
            pass
        return status

    def turn(self) -> int | None:
        """Wait for input, and handle it; return the exit status once the worker or the forker has gone."""
        keeper, congested = self._keeper, len(self._unsent) > MAX_UNSENT_BYTES
        poll = select.poll()
        poll.register(self._worker, select.POLLIN)
        poll.register(self._forker.fileno(), select.POLLIN)
        if congested:
            keeper.pause()
        by_fd = {} if congested else {process.pipe.fileno(): process for process in keeper.processes.values()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        longest_s = TICK_S if keeper.busy else EMPTY_S if keeper.empty else IDLE_S
        for fd, _events in poll.poll(self._rounds.left_s(longest_s) * 1_000):
            if fd == self._forker.fileno():
                data, _ = receive_packet(self._forker, 0)
                if not data:
                    return EXIT_DEFECT
                keeper.forked(int.from_bytes(data, "little"))
            elif fd == self._worker.fileno():
                messages = self._frames.read()
                if messages is None:
                    return EXIT_DONE
                while messages:  # No local name may keep one: it must be freed, and so overwritten.
                    keeper.take(messages.pop(0))
                self._rounds.worked()
            elif fd in by_fd and not by_fd[fd].ended:
                keeper.read(by_fd[fd])
        keeper.tick()
        self._send()
        self._rounds.turn()
        return None

    def _send(self) -> None:
        for answer in self._keeper.drain():
            self._unsent += encode(answer)
        if self._unsent:
            with suppress(PeerGoneError):  # The next read tells.
                del self._unsent[: self._worker.write(self._unsent)]

    def _ask(self) -> SharedPipe:
        bell_in, rings_us = create_pipe()
        bell_of_process, bell_out = os.pipe2(os.O_CLOEXEC)  # It blocks: a grammar's process has nothing else to do.
        memfd = memory_by_descriptor()
        send_packet(self._forker, b"f", (memfd, bell_of_process, rings_us))
        os.close(bell_of_process)
        os.close(rings_us)
        os.set_blocking(bell_out, False)
        return SharedPipe.opened(memfd, bell_in, bell_out, first=True)


def _fork_on(keeper: LocalSocket, words: Words) -> int:
    """The forker's loop: fork a process for each shared pipe received; report its pid."""
    signal.signal(signal.SIGCHLD, reap)  # The pipes report an end; this reports a lock-down violation.
    tokenizer = build_tokenizer(words)
    # Everything allocated so far is shared with all grammar processes: exempt it from garbage collection.
    gc.collect()
    gc.freeze()
    # Read here and passed on: no grammar process reads it itself.
    size = OwnSize()
    narrower = compiled(grammar_calls())
    lock_down(forker_calls(size.file))
    while True:
        data, fds = receive_packet(keeper, 3)
        if not data or len(fds) != 3:
            return EXIT_DONE
        held_bytes = size.bytes()
        pid = os.fork()
        if pid == 0:
            keeper.close()
            os.close(size.file)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe = SharedPipe.opened(*fds, first=False)
            narrow(narrower)
            _be_grammar(tokenizer, words, pipe, held_bytes)
        for fd in fds:
            os.close(fd)
        try:
            send_packet(keeper, pid.to_bytes(4, "little"))
        except BrokenPipeError:
            return EXIT_DONE


def _be_grammar(tokenizer: Any, words: Words, pipe: SharedPipe, held_bytes: int) -> NoReturn:
    """Run a grammar process from its start to its end."""
    status = EXIT_DEFECT
    try:
        status = run_child(tokenizer, words, pipe, held_bytes)
    except PeerGoneError:
        status = EXIT_DONE
    finally:
        os._exit(status)
