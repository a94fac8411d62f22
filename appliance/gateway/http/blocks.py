"""Deltas of one output to blocks: stretches of reasoning, of text, and calls, one after the other; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from appliance.gateway.generate_request import CallDelta, Delta, TokenLogprob


class BlockKind(Enum):
    """What a block is."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class What(Enum):
    """What happens to a block."""

    BEGIN = auto()
    MORE = auto()
    END = auto()


@dataclass(slots=True)
class Block:
    """A stretch of an output."""

    kind: BlockKind
    index: int
    """Place among the output's blocks, from 0."""
    name: str = ""
    """The tool's name, of a call."""
    call_id: str = ""
    """The call's id."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of its tokens, of a text."""
    refused: bool = False
    """Whether it is a call that turned out to be none."""

    @property
    def text(self) -> str:
        """The whole text, of a call its arguments."""
        return "".join(self.pieces)


Step = tuple[What, Block, str]
"""What happens, to which block, and the new text of ``MORE``."""


class Blocks:
    """Cuts an output into blocks as it comes."""

    def __init__(self) -> None:
        self._all: list[Block] = []
        self._open: Block | None = None
        self._calls: dict[int, Block] = {}
        """Calls by their number in the output."""

    def whole(self) -> list[Block]:
        """Return all blocks but calls that turned out to be none."""
        return [block for block in self._all if not block.refused]

    def push(self, delta: Delta) -> Iterator[Step]:
        """Yield what a delta does."""
        # What was read of a call that is none is text of this delta, behind it.
        for call in delta.calls:
            if call.refused and call.index in self._calls:
                yield from self._refuse(self._calls[call.index])
        if delta.reasoning:
            yield from self._into(BlockKind.REASONING, delta.reasoning)
        if delta.text:
            yield from self._into(BlockKind.TEXT, delta.text)
        if delta.logprobs and self._open is not None and self._open.kind is BlockKind.TEXT:
            self._open.logprobs.extend(delta.logprobs)
        for call in delta.calls:
            yield from self._take(call)

    def finish(self) -> Iterator[Step]:
        """Yield the end of the block that is open."""
        if self._open is not None:
            yield What.END, self._open, ""
            self._open = None

    def _into(self, kind: BlockKind, text: str) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Block(kind, len(self._all)))
        yield self._more(text)

    def _take(self, call: CallDelta) -> Iterator[Step]:
        if call.name:
            block = self._calls[call.index] = Block(BlockKind.CALL, len(self._all), call.name, call.call_id)
            yield from self._begin(block)
        if call.arguments:
            yield self._more(call.arguments)
        if call.refused:
            yield from self._refuse(self._calls[call.index])

    def _refuse(self, block: Block) -> Iterator[Step]:
        block.refused = True
        if block is self._open:
            yield from self.finish()

    def _begin(self, block: Block) -> Iterator[Step]:
        yield from self.finish()
        self._all.append(block)
        self._open = block
        yield What.BEGIN, block, ""

    def _more(self, text: str) -> Step:
        assert self._open is not None, "text belongs to a block that has begun"
        self._open.pieces.append(text)
        return What.MORE, self._open, text
