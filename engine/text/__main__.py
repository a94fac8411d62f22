"""``python -m engine.text /ipc/host.sock``: the program of the text sandbox.

It connects to the host, loads and tests the configured model, locks itself down (``engine.sandbox.lockdown``), sends
``TextReady``, and then answers jobs one by one in order of arrival. The ring is the queue, so a host that sends faster
than the worker answers finds the ring full. Grammar messages go to another process (``grammar_process``) and are
answered as results arrive. ``Drain`` ends it.

Exit status: 0 drained, 1 the host disconnected or broke the protocol, 2 wrong usage, 3 the configuration or the model
cannot be used, or the kernel supports no lock-down. Every status but 0 prints its reason in one line on stderr.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

import jinja2.debug  # noqa: F401 - jinja2 imports it at a template's first error, when nothing can be imported

from engine.config import TextConfig
from engine.errors import ConfigurationError, LockdownError, ModelLoadError
from engine.sandbox.allowed_calls import Bells
from engine.sandbox.attach import attach
from engine.sandbox.lockdown import lock_down
from engine.text.allowed_calls import worker_calls
from engine.text.grammar_process import GrammarLine, start_keeper
from engine.text.guard import own_size
from engine.text.worker import TextWorker, load_worker
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain
from isolation.ipc.errors import ProtocolError, RemoteProtocolError, RingFull, SweepError
from isolation.ipc.grammar import Advance, CloseGrammar, OpenGrammar
from isolation.ipc.messages import Failed, FailureCode, Role
from isolation.ipc.output import CloseOutput, ReadOutput
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.sweeping import Rounds, Sweeper
from isolation.ipc.text import Decode, Encode, ReadVocabulary

EXIT_DRAINED = 0
EXIT_HOST = 1
EXIT_USAGE = 2
EXIT_LOAD = 3

RECEIVE_LIMIT = 16
"""Messages taken from the ring at once; few, so that the ring stays the queue."""

IDLE_WAIT_S = 60.0
"""Longest sleep in seconds without work, which wakes the sandbox; the channel wakes the loop when a message comes."""

ROOM_WAIT_S = 0.002
"""Pause in seconds between attempts to send into a full ring; a sandbox rounds shorter sleeps up."""

SEND_TIMEOUT_S = 30.0
"""Seconds to wait for a full ring: longer than any pause of a live host."""


def main(arguments: Sequence[str]) -> int:
    """Run the worker; the argument is the path of the host's socket. Returns the exit status."""
    if len(arguments) != 1:
        return _fail(EXIT_USAGE, "usage: python -m engine.text SOCKET")
    try:
        channel, configuration = attach(arguments[0], Role.TEXT)
        try:
            config = TextConfig.from_json(configuration)
            worker = load_worker(config)
            words = worker.words()
            rounds = Rounds(Sweeper().sweep if config.wipe_memory else _keep)
            grammars = start_keeper(words, channel, rounds, config.memory_bytes) if words is not None else None
            _lock_down(channel, grammars)
            _send(channel, worker.ready())
            serve(worker, channel, grammars, rounds)
        finally:
            channel.close()
    except (ConfigurationError, LockdownError, ModelLoadError) as error:
        return _fail(EXIT_LOAD, f"cannot load: {error}")
    except SweepError as error:
        return _fail(EXIT_LOAD, f"cannot forget: {error}")
    except ProtocolError as error:
        return _fail(EXIT_HOST, f"the host is gone or out of turn: {error}")
    return EXIT_DRAINED


def _lock_down(channel: Channel, grammars: GrammarLine | None) -> None:
    _memory, inbound, outbound = channel.fds()
    keeper = None if grammars is None else Bells(*grammars.bells)
    size = own_size()
    lock_down(worker_calls(Bells(inbound, outbound), keeper, None if size is None else size.file))


def _keep() -> None:
    """Leave freed memory as it is: the default when no overwriting is requested."""


def serve(worker: TextWorker, channel: Channel, grammars: GrammarLine | None, rounds: Rounds) -> None:
    """Answer jobs until the host drains the worker; jobs before the ``Drain`` are answered.

    Raises:
        ProtocolError: the host closed its end, does not read, or sent an unexpected message.
        SweepError: freed memory can no longer be overwritten.
    """
    while True:
        # No local name may keep a message: an answered prompt must be freed, and so overwritten.
        messages = deque(channel.receive(RECEIVE_LIMIT))
        while messages:
            if not isinstance(messages[0], Ping):
                rounds.worked()
            if isinstance(messages[0], Drain):
                return
            _take(messages.popleft(), worker, channel, grammars)
        _relay(channel, grammars)
        rounds.turn()
        if grammars is None:
            channel.wait(rounds.left_s(IDLE_WAIT_S))
        else:
            channel.wait(rounds.left_s(IDLE_WAIT_S), grammars.fileno())


def _take(message: Message, worker: TextWorker, channel: Channel, grammars: GrammarLine | None) -> None:
    if isinstance(message, OpenGrammar | Advance | CloseGrammar):
        _hand_over(message, channel, grammars)
    elif isinstance(message, Encode | Decode | ReadVocabulary | ReadOutput):
        _send(channel, worker.answer(message))
        _relay(channel, grammars)
    elif isinstance(message, CloseOutput):
        worker.close_output(message.request)
    elif isinstance(message, Ping):
        _send(channel, Pong(message.number), urgent=False)
    else:
        raise RemoteProtocolError(f"a text worker takes no {type(message).__name__}")


def _hand_over(message: OpenGrammar | Advance | CloseGrammar, channel: Channel, grammars: GrammarLine | None) -> None:
    """Forward a message to the grammar keeper, or refuse it when there is none."""
    if grammars is not None:
        grammars.send(message)
    elif isinstance(message, OpenGrammar):
        reason = "this model's tokens do not spell its text exactly, which structured output needs"
        _send(channel, Failed(message.request, FailureCode.INVALID, reason))


def _relay(channel: Channel, grammars: GrammarLine | None) -> None:
    if grammars is not None:
        for answer in grammars.receive():
            _send(channel, answer)


def _send(channel: Channel, message: Message, *, urgent: bool = True) -> None:
    deadline = time.monotonic() + SEND_TIMEOUT_S
    while True:
        try:
            channel.send(message, urgent=urgent)
        except RingFull:
            if time.monotonic() > deadline:
                raise RemoteProtocolError("the host has not read its ring") from None
            time.sleep(ROOM_WAIT_S)
        else:
            return


def _fail(status: int, reason: str) -> int:
    line = " ".join(reason.split())
    sys.stderr.write(f"engine.text: {line}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
