"""What a model's output is made of: its reasoning, its content and its calls, in the format that it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.text.output.growing import SPACE, Growing, Reading
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules
from engine.text.output.tools import ToolSet
from isolation.ipc.output import Thinking


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that have a meaning in it; some of them are special tokens of a model."""
    read: Callable[[Growing, Parts], Reading[None]]
    """Reads content and calls to the end of the output."""
    rules: Callable[[Rules, ToolSet], None]
    """Adds the rules of ``calls``, which an output of calls follows."""
    begins: tuple[str, ...]
    """Texts with which calls begin, and which no content holds."""
    bare: str = ""
    """Characters with which calls begin that are the whole answer, and with which no content begins."""
    heads: tuple[str, ...] = ()
    """Texts with which those calls begin, and with which no JSON without blanks does; ``NAME`` is for a tool's."""
    id_length: int = 0
    """Characters that the id of a call has in chat templates; 0: any number."""
    one_call: bool = False
    """Whether chat templates take one call in a message."""
    reads_thinking: bool = False
    """Whether the format has reasoning and content of its own, which ``read`` and ``rules`` describe whole."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of one model's outputs."""

    calls: CallFormat | None = None
    thinking: tuple[str, str] | None = None
    """Markers around reasoning that stands at the beginning of an output."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all texts that have a meaning."""
        return (*(self.thinking or ()), *(self.calls.markers if self.calls is not None else ()))

    @property
    def thinks(self) -> bool:
        """Whether outputs may hold reasoning."""
        return self.thinking is not None or (self.calls is not None and self.calls.reads_thinking)

    def state_after(self, rendered: str) -> Thinking:
        """Return where a rendered prompt, without marks, leaves the model's reasoning."""
        if self.thinking is None:
            return Thinking.POSSIBLE if self.thinks else Thinking.NONE
        begin, end = self.thinking
        prompt = rendered.rstrip(SPACE)
        if prompt.endswith(begin.rstrip(SPACE)):
            return Thinking.BEGUN
        return Thinking.NONE if prompt.endswith(end) else Thinking.POSSIBLE


def read(form: OutputFormat, text: Growing, parts: Parts, thinking: Thinking) -> Reading[None]:
    """Read an output from its beginning to its end."""
    if form.thinking is not None and thinking is not Thinking.NONE:
        yield from _read_thinking(form.thinking, text, parts, begun=thinking is Thinking.BEGUN)
    calls = form.calls
    if calls is not None and (parts.tools.tools or calls.reads_thinking):
        if parts.tools.answer is not None and not calls.reads_thinking and (yield from _is_answer(calls, text, parts)):
            calls = None
    else:
        calls = None
    if calls is not None:
        yield from calls.read(text, parts)
    else:
        yield from text.until(parts.content, ())


def _is_answer(calls: CallFormat, text: Growing, parts: Parts) -> Reading[bool]:
    """Return whether what follows is an answer in JSON, in which nothing is a call, whatever it spells."""
    heads = [head.replace("NAME", name) for head in calls.heads for name in parts.tools.tools]
    yield from text.skip()
    return not (yield from text.stands((*calls.begins, *heads)))


def _read_thinking(markers: tuple[str, str], text: Growing, parts: Parts, *, begun: bool) -> Reading[None]:
    begin, end = markers
    # Where the prompt has begun it, all tokens are reasoning: also those that give no text yet.
    parts.thinks, parts.undecided = begun, not begun
    text.begin()
    yield from text.skip()
    space = text.taken()
    # Even where the prompt has begun it, a model may begin it again.
    found = yield from text.begins((begin,))
    parts.undecided = False
    if found is None and not begun:
        parts.content(space)
        return
    parts.thinks = True
    yield from text.until(parts.reasoning, (end,))
    parts.thinks = False
    parts.reasoned()
