"""A grammar's process as its keeper holds it: two pipes, what is under way on them, and since when."""

from __future__ import annotations

import os
import signal
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.text.grammar_child import COMMAND, RESULT

Key: TypeAlias = tuple[bytes, bytes]
"""Tenant, and digest of kind and source."""

_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a grammar's process."""

    tag: int
    request: int
    position: int
    state: int
    data: bytes


@dataclass(slots=True, eq=False)
class GrammarProcess:
    """One grammar's process."""

    commands: int
    """The pipe to it."""
    results: int
    """The pipe from it."""
    key: Key = (b"", b"")
    """Whose and which grammar it has; nobody's while it is spare."""
    pid: int = 0
    """0 until its fork was reported."""
    ended: bool = False
    """Whether the keeper has ended it; when its pid is not known yet, it is killed as soon as that is."""
    compiled: bool = False
    halted: bool = False
    """Whether it stands still, while it is the turn of others."""
    keep: bool = True
    """Whether it waits for later requests when nobody follows it any more."""
    began: float | None = None
    """When it began to compile, in seconds of the keeper's clock."""
    opening: deque[int] = field(default_factory=deque)
    """Requests that wait until it has compiled."""
    requests: set[int] = field(default_factory=set)
    """Requests that follow it."""
    asked: dict[int, float] = field(default_factory=dict)
    """Requests whose next row is under way, with the time at which it was asked for; the oldest first."""
    used: float = 0.0
    """When it last had something to do."""
    _outbound: bytearray = field(default_factory=bytearray)
    _inbound: bytearray = field(default_factory=bytearray)

    @property
    def tenant(self) -> bytes:
        """Whose it is."""
        return self.key[0]

    @property
    def idle(self) -> bool:
        """Whether nobody needs it now."""
        return self.compiled and not self.requests

    @property
    def wants_write(self) -> bool:
        """Whether commands wait for room in the pipe."""
        return bool(self._outbound)

    def halt(self, halted: bool) -> None:
        """Make a process whose pid is known stand still, or go on."""
        if halted is not self.halted:
            self.halted = halted
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP if halted else signal.SIGCONT)

    def give(self, frame: bytes) -> None:
        """Send its grammar, before any command."""
        self._outbound += frame
        self.flush()

    def command(self, operation: int, request: int, token_id: int = 0) -> None:
        """Send a command, or keep it until there is room."""
        self._outbound += COMMAND.pack(operation, request, token_id)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room. That the process has ended shows on the other pipe."""
        try:
            while self._outbound:
                del self._outbound[: os.write(self.commands, self._outbound)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._outbound.clear()

    def read(self) -> list[Result] | None:
        """The results that are there; None when the process has ended or what it writes is no result."""
        try:
            data = os.read(self.results, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._inbound += data
        results = []
        place = 0
        while len(self._inbound) - place >= RESULT.size:
            tag, request, position, state, length = RESULT.unpack_from(self._inbound, place)
            end = place + RESULT.size + length
            if length > _READ_BYTES:
                return None
            if end > len(self._inbound):
                break
            results.append(Result(tag, request, position, state, bytes(self._inbound[place + RESULT.size : end])))
            place = end
        del self._inbound[:place]
        return results
