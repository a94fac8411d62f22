"""The keeper's view of a grammar process: its shared pipe, pending commands and results, and timestamps."""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.sandbox.shared_pipe import SharedPipe
from engine.text.grammar_child import CLOSE, COMMAND, COMPILED, REFUSED, RESULT, ROW
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError
from isolation.ipc.grammar import MaskState
from isolation.ipc.messages import FailureCode

Key: TypeAlias = tuple[bytes, bytes]
"""Tenant, and digest of the grammar's kind, whitespace, state of reasoning, user and source."""

MAX_RESULT_BYTES = 1 << 18
"""Bytes of one result's data: a mask of two million tokens."""

MAX_COMMAND_BYTES = 1 << 18
"""Bytes of commands that wait for a process to read them, beyond what its pipe holds: 20,000 commands. Each request
waits for the answer to its command, so a process that serves has far fewer."""

_STATES = {COMPILED: frozenset({0}), REFUSED: frozenset(map(int, FailureCode)), ROW: frozenset(map(int, MaskState))}
"""States that a result may have, by tag."""


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a grammar process."""

    tag: int
    request: int
    position: int
    state: int
    data: bytes


@dataclass(slots=True, eq=False)
class GrammarProcess:
    """One grammar's process."""

    pipe: SharedPipe
    """Commands to the process, and its results."""
    key: Key = (b"", b"")
    """Tenant and grammar; empty while the process is a spare."""
    pid: int = 0
    """Process id; 0 until its fork was reported."""
    ended: bool = False
    """Whether the keeper has ended it; a process with unknown pid is killed as soon as the pid is known."""
    broken: bool = False
    """Whether a command met what no grammar process does: the keeper ends it at the next look."""
    compiled: bool = False
    halted: bool = False
    """Whether it is stopped during others' time slices."""
    keep: bool = True
    """Whether it stays available for later requests when no request uses it."""
    began: float | None = None
    """Start of its compilation, in seconds of the keeper's clock."""
    opening: deque[int] = field(default_factory=deque)
    """Requests that wait for its compilation."""
    requests: set[int] = field(default_factory=set)
    """Requests that use it."""
    asked: dict[int, float] = field(default_factory=dict)
    """Requests whose next row is pending, with the time of the command; oldest first."""
    used: float = 0.0
    """Time of its last activity."""
    owed: int = 0
    """Rows that commands asked for and that have not come, at most: a command for a request that was closed meanwhile
    gets none."""
    _outbound: bytearray = field(default_factory=bytearray)
    _inbound: bytearray = field(default_factory=bytearray)

    @property
    def tenant(self) -> bytes:
        """Return its tenant."""
        return self.key[0]

    @property
    def idle(self) -> bool:
        """Return whether no request needs it now."""
        return self.compiled and not self.requests

    def halt(self, halted: bool) -> None:
        """Stop or continue a process whose pid is known."""
        if halted is not self.halted:
            self.halted = halted
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP if halted else signal.SIGCONT)

    def give(self, frame: bytes) -> None:
        """Send its grammar, before any command."""
        self._outbound += frame
        self.flush()

    def command(self, operation: int, request: int, token_id: int = 0) -> None:
        """Send a command, or queue it until the pipe has space. A process that leaves ``MAX_COMMAND_BYTES`` unread is
        broken."""
        if len(self._outbound) > MAX_COMMAND_BYTES:
            self.broken = True
            return
        self.owed += operation != CLOSE
        self._outbound += COMMAND.pack(operation, request, token_id)
        self.flush()

    def flush(self) -> None:
        """Send queued commands as far as the pipe has space. The process's end shows in ``read``."""
        if self._outbound:
            try:
                del self._outbound[: self.pipe.write(self._outbound)]
            except PeerGoneError:
                self._outbound.clear()
            except RemoteProtocolError:
                self.broken = True
                self._outbound.clear()

    def read(self) -> list[Result] | None:
        """Return the available results, and send commands for which there is space now; None when the process has
        ended or wrote an invalid result."""
        try:
            data = self.pipe.read()
            self.flush()
        except RemoteProtocolError:
            return None
        if data is None or self.broken:
            return None
        self._inbound += data
        results = []
        place = 0
        while len(self._inbound) - place >= RESULT.size:
            tag, request, position, state, length = RESULT.unpack_from(self._inbound, place)
            end = place + RESULT.size + length
            if length > MAX_RESULT_BYTES or state not in _STATES.get(tag, ()):
                return None
            if end > len(self._inbound):
                break
            results.append(Result(tag, request, position, state, bytes(self._inbound[place + RESULT.size : end])))
            place = end
        del self._inbound[:place]
        return results
