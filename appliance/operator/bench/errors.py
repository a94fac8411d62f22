"""What can go wrong in a measurement; every message says what to do."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement cannot be made or would mean nothing."""


class LoadSpecError(BenchError):
    """A load on the command line is not one."""


class TraceError(BenchError):
    """A trace file cannot be used; ``line`` is its number from 1, or 0 when it is about the whole file."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")
        self.line = line


class TargetError(BenchError):
    """The server under test does not answer as one that can be measured."""


class CardError(BenchError):
    """A machine card cannot be read, or does not fit the command line."""
