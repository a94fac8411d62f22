"""A real engine process and the host's end of its channel, for tests: every wait has a bound and says what hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.errors import AttachError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, Hello, Role
from isolation.ipc.segment import standard_layout

PATIENCE_S = 90.0
"""Longest that an engine is waited for in all, from its start to its end: less than a test may take, so that what hung
is told. A start imports torch, which takes some seconds, and half a minute on a busy machine."""

LAST_WORDS_S = 10.0
"""Longest wait for the pipes of an engine that was sent a fatal signal."""


class Host:
    """The host's end of a real engine process."""

    def __init__(self, folder: Path) -> None:
        root, self._path = Path(__file__).resolve().parents[2], folder / "host.sock"
        self._listener = Listener(str(self._path))
        self._until = time.monotonic() + PATIENCE_S
        self.channel: Channel | None = None
        # With it a signal that ends the process has it tell where each of its threads stands.
        told = os.environ | {"PYTHONFAULTHANDLER": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", str(self._path)],
            cwd=root,
            env=told,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, config: bytes | None) -> None:
        """Meet the engine and configure it, if it is to be."""
        try:
            self.channel = self._listener.accept(None, self._left(), standard_layout(), Role.ENGINE)
        except AttachError:
            self._hung("the engine did not connect")
        assert isinstance(self.next(), Hello)
        if config is not None:
            self.channel.send(Configure(config))

    def next(self) -> Message:
        """The next message, waited for."""
        while (left := self._left()) > 0:
            if found := self.channel.receive(1):
                return found[0]
            self.channel.wait(min(left, 1.0))
        self._hung("the engine sent no message")

    def end(self) -> tuple[int, str]:
        """Exit status and what was said on stderr."""
        try:
            _, errors = self.process.communicate(timeout=max(self._left(), 0.0))
        except subprocess.TimeoutExpired:
            self._hung("the engine did not end, or something of it keeps its pipes open")
        return self.process.returncode, errors

    def close(self) -> None:
        """End the process if it is still there."""
        self._listener.close()
        if self.process.poll() is None:
            self.process.kill()
        said = self._last_words()
        if self.channel is not None:
            self.channel.close()
        assert said is not None, "the pipes of an engine that was killed stay open: another process has them"

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _hung(self, what: str) -> NoReturn:
        """Fail with what was waited for, and with where the threads of the engine stand."""
        status = self.process.poll()
        state = "it runs" if status is None else f"it had ended with {status}"
        self.process.send_signal(signal.SIGABRT)
        said = self._last_words()
        pytest.fail(f"{what} within {PATIENCE_S:g} s; {state}. It said: {said or 'nothing; its pipes stay open'}")

    def _last_words(self) -> str | None:
        """All that an engine that ends says; None where its pipes are not closed in time."""
        try:
            return self.process.communicate(timeout=LAST_WORDS_S)[1]
        except subprocess.TimeoutExpired:
            return None
