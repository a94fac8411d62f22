"""What the spill tier needs of its channel and of the memory of KV: copies of whole blocks out and in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isolation.ipc.codec import Message

ENOUGH = 1 << 10
"""Blocks that can be written at any time: more than are received in one step."""


class SpillChannel(Protocol):
    """What is needed of ``isolation.ipc.channel.Channel``."""

    def send(self, message: Message, *, urgent: bool = True) -> None:
        """Put one frame into the ring, or raise ``RingFull``."""

    def receive(self, limit: int) -> list[Message]:
        """Take up to ``limit`` messages that are there, without waiting."""


class Leaving(Protocol):
    """A copy of one block on its way out of the engine's memory."""

    @property
    def over(self) -> bool:
        """Whether the copy is complete."""

    def content(self) -> bytes:
        """The block's bytes; only when the copy is over."""

    def drop(self) -> None:
        """Overwrite the copy, once it is complete, and give its place back. To be called once for each."""


class Contents(Protocol):
    """What is needed of ``engine.backends.common.spill_content.BlockContent``."""

    size: int

    def read(self, block: int) -> bytes:
        """A copy of a block's bytes, as soon as it is complete."""

    def start(self, block: int) -> Leaving | None:
        """Begin to copy a block out; what is computed next may overwrite the block. None: no place is free."""

    def make_room(self) -> int:
        """Overwrite and give back the places of writes that are complete; how many blocks can be written now."""

    def write(self, block: int, content: bytes) -> None:
        """Overwrite all of a block, before anything that is computed next reads it."""

    def wipe(self) -> None:
        """Make all buffers zero, except those of copies that were started and not dropped."""


@dataclass(frozen=True, slots=True)
class ReadContent:
    """A block whose copy was over at once, as a ``Leaving``."""

    found: bytes
    over: bool = True

    def content(self) -> bytes:
        """The block's bytes."""
        return self.found

    def drop(self) -> None:
        """Nothing is kept."""
