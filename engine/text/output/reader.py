"""Readings of outputs: token ids as they come, to parts."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from contextlib import suppress

from engine.errors import RequestRejectedError
from engine.text.output.format import OutputFormat, read
from engine.text.output.growing import Growing
from engine.text.output.parts import Parts
from engine.text.output.spelling import Spelling
from engine.text.output.tools import ToolSet, parse_tools
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.output import MAX_OUTPUTS, OutputRead, Part, ReadOutput, Thinking


class OutputReader:
    """Reads one output."""

    def __init__(
        self, form: OutputFormat, spelling: Spelling, entries: Sequence[bytes], tools: ToolSet, thinking: Thinking
    ) -> None:
        """``entries``: the bytes of each token."""
        self._entries = entries
        self._marked = spelling.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = Growing(spelling.marked)
        self._parts = Parts(tools)
        self._reading = read(form, self._text, self._parts, thinking)
        self._running = True
        self.reasoning_tokens = 0
        """Tokens so far that are reasoning, those of its markers among them."""
        self._waiting = 0
        """Tokens so far that may be part of the marker that begins reasoning."""
        self._go_on()

    @property
    def over(self) -> bool:
        """Whether the output is to end here."""
        return self._parts.over

    def push(self, token_ids: Sequence[int], ending: Finish) -> list[Part]:
        """Read more tokens; returns what became certain. The tokens behind the end of the output are not read."""
        for number, token in enumerate(token_ids):
            if self.over:
                return self._parts.drain()
            self._parts.at(number)
            thought = self._parts.thinks
            self._text.push(self._spelt(token))
            self._go_on()
            self._count(thought or self._parts.thinks)
        if ending is not Finish.NONE and not self.over:
            self._text.push(self._decoder.decode(b"", True))
            self._text.ended, self._parts.cut = True, ending is Finish.LENGTH
            self._go_on()
            self._parts.end()
        return self._parts.drain()

    def _count(self, thought: bool) -> None:
        """Count a token. One of a marker that is not complete waits; one that has part of a character does too, since
        the marker may begin with it."""
        begun = self._parts.undecided and (self._text.waits or bool(self._decoder.getstate()[0]))
        if thought:
            self.reasoning_tokens += 1 + self._waiting
        self._waiting = self._waiting + 1 if begun and not thought else 0

    def _spelt(self, token: int) -> str:
        marked = self._marked.get(token)
        if marked is not None:
            return self._decoder.decode(b"", True) + marked
        return self._decoder.decode(self._entries[token]) if token < len(self._entries) else ""

    def _go_on(self) -> None:
        if self._running:
            try:
                next(self._reading)
            except StopIteration:
                # It has read to the end, or to the only call.
                self._running = False


class OutputReaders:
    """All outputs that are read, by request."""

    def __init__(self, form: OutputFormat, special: Mapping[str, int], entries: Sequence[bytes]) -> None:
        """``special``: text -> id of the model's special tokens; ``entries``: the bytes of each token."""
        self.form = form
        self.spelling = Spelling(form.markers, special)
        self._entries = entries
        self._open: dict[int, OutputReader] = {}

    def read(self, job: ReadOutput) -> OutputRead:
        """Read more tokens of an output.

        Raises:
            RequestRejectedError: ``OVERLOADED`` when too many are read, ``INVALID`` for tools that are malformed,
                ``INTERNAL`` for an output that was not begun here.
        """
        reader = self._begun(job) if job.begins else self._open.get(job.request)
        if reader is None:
            raise RequestRejectedError(FailureCode.INTERNAL, "the output was not begun here")
        if job.shown:
            reader.push(job.token_ids[: job.shown], Finish.NONE)
        parts = reader.push(job.token_ids[job.shown :], job.ending)
        return OutputRead(job.request, reader.over, reader.reasoning_tokens, tuple(parts))

    def close(self, request: int) -> None:
        """Forget an output."""
        with suppress(KeyError):
            del self._open[request]

    def _begun(self, job: ReadOutput) -> OutputReader:
        if len(self._open) >= MAX_OUTPUTS and job.request not in self._open:
            raise RequestRejectedError(FailureCode.OVERLOADED, "too many outputs are read at once")
        tools = parse_tools(job.source)
        reader = OutputReader(self.form, self.spelling, self._entries, tools, job.thinking)
        self._open[job.request] = reader
        return reader
