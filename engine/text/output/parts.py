"""What a format's reader finds in an output: content, reasoning and calls, in order.

White space around reasoning and calls is the format's own and is dropped. What is malformed goes to the content, whole,
behind a part that says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.text.marks import unmark
from engine.text.output.growing import SPACE, Growing, MalformedCallError, UnfinishedCallError
from engine.text.output.tools import Tool, ToolSet
from isolation.ipc.output import MAX_CALLS, Part, PartKind

PASSED_ON = frozenset((PartKind.CONTENT, PartKind.REASONING, PartKind.ARGUMENTS))
"""Kinds whose neighbouring parts are one."""


@dataclass(slots=True)
class _Held:
    """Text of one kind whose white space at the beginning is dropped, and at its end is held back."""

    kind: PartKind
    begun: bool = False
    space: str = ""


class Parts:
    """Collects the parts of one output."""

    def __init__(self, tools: ToolSet) -> None:
        self.tools = tools
        self.cut = False
        """Whether the output ended because its tokens were used up."""
        self.over = False
        """Whether the output is to end here, as it has the only call that it may have."""
        self.thinks = False
        """Whether what is read now is reasoning."""
        self.undecided = False
        """Whether what is read now may become the marker that begins reasoning."""
        self._parts: list[Part] = []
        self._calls = 0
        self._token = 0
        self._content = _Held(PartKind.CONTENT, begun=True)
        self._reasoning = _Held(PartKind.REASONING)
        self._begun = False
        """Whether a call has begun and not ended."""
        self._before = ""
        """White space of the content before the call that has begun."""

    def drain(self) -> list[Part]:
        """Return the parts found since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def at(self, token: int) -> None:
        """Say of which token what is found next is."""
        self._token = token

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._text(self._content, text)

    def reasoning(self, text: str) -> None:
        """Add text that the model wrote to itself."""
        self._text(self._reasoning, text)

    def reasoned(self) -> None:
        """Note the end of a stretch of reasoning: white space around it is dropped."""
        self._reasoning.space, self._reasoning.begun = "", False
        self._content.begun = False

    def call(self, name: str) -> Tool:
        """Begin a call.

        Raises:
            MalformedCallError: the request has no such tool, or has too many calls.
        """
        tool = self.tools.tools.get(name)
        if tool is None:
            raise MalformedCallError("names a tool that the request does not have")
        if self._calls == MAX_CALLS:
            raise MalformedCallError(f"is one more than the {MAX_CALLS} that an output may have")
        self._before, self._content.space = self._content.space, ""
        self._put(PartKind.CALL, name)
        return tool

    def arguments(self, text: str) -> None:
        """Add text of the arguments of the call that has begun."""
        self._put(PartKind.ARGUMENTS, unmark(text))

    def called(self) -> None:
        """End the call that has begun."""
        self._put(PartKind.CALLED, "")
        self._before = ""
        self._calls += 1
        self._content.begun = False
        self.over = not self.tools.parallel

    @contextmanager
    def trying(self, text: Growing, begin: str = "") -> Iterator[None]:
        """Read one call, or several, in the block; ``begin`` is what was taken before it. A call that is malformed
        becomes content. Behind each of several that is complete, the block begins ``text`` anew."""
        text.begin()
        calls = self._calls
        try:
            yield
        except UnfinishedCallError as error:
            # The output has ended: what is left of it is the beginning of a marker, and part of the call.
            text.held()
            if not self.cut:
                self._refuse(error, begin if calls == self._calls else "", text)
            elif not self._begun and calls == self._calls:
                self.content(unmark(begin + text.taken()))
        except MalformedCallError as error:
            self._refuse(error, begin if calls == self._calls else "", text)

    def end(self) -> None:
        """Note the end of the output."""
        if self._content.space and not self._calls and self._content.begun:
            self._put(PartKind.CONTENT, self._content.space)
        self._content.space = ""

    def _refuse(self, error: MalformedCallError, begin: str, text: Growing) -> None:
        self._put(PartKind.REFUSED, f"the call {error}")
        self._content.begun = True
        self.content(self._before + unmark(begin + text.taken()))
        self._before = ""

    def _text(self, held: _Held, text: str) -> None:
        text = unmark(text)
        if not held.begun:
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        if kept:
            self._put(held.kind, held.space + kept)
            held.space, held.begun = text[len(kept) :], True
        elif held.begun:
            held.space += text

    def _put(self, kind: PartKind, text: str) -> None:
        if kind in PASSED_ON and not text:
            return
        if kind is PartKind.CALL:
            self._begun = True
        elif kind in (PartKind.CALLED, PartKind.REFUSED):
            self._begun = False
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind is kind and last.token == self._token and kind in PASSED_ON:
            self._parts[-1] = Part(kind, self._token, last.text + text)
        else:
            self._parts.append(Part(kind, self._token, text))
