"""Messages on channels: gpt-oss.

An output is messages, each with a header: ``<|channel|>analysis<|message|>`` reasoning ``<|end|>``, then
``<|start|>assistant<|channel|>final<|message|>`` content. A call is a message on the channel ``commentary`` with a
recipient: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``; commentary without a
recipient is content. Source: OpenAI's description of the harmony response format.
"""

from __future__ import annotations

import re

from engine.errors import RequestRejectedError
from engine.text.output.format import CallFormat
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_text import object_value
from engine.text.output.parts import Parts
from engine.text.output.rules import ANY_TEXT, Rules, alternatives, holding, not_beginning
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet
from isolation.ipc.messages import FailureCode

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
ANALYSIS = "analysis"
COMMENTARY = "commentary"
PREFIX = "functions."

_ENDS = (END, CALL, RETURN, START)
_MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.:-]{1,128})")


def _read(text: Growing, parts: Parts) -> Reading[None]:
    while not parts.over:
        text.begin()
        seen: list[str] = []
        header = yield from _header(text, seen)
        if header is None:
            # A model that writes no header, or the end; a header that was cut off is no content.
            if not (parts.cut and seen):
                parts.content(text.taken())
            return
        recipient, channel = header
        if recipient:
            with parts.trying(text, text.taken()):
                yield from _read_call(text, parts, recipient)
                parts.called()
            # What is left of the message, if its call was refused.
            if not parts.over:
                yield from text.until(parts.content, _ENDS)
        elif channel == ANALYSIS:
            parts.thinks = True
            yield from text.until(parts.reasoning, _ENDS)
            parts.thinks = False
            parts.reasoned()
        else:
            yield from text.until(parts.content, _ENDS)


def _header(text: Growing, seen: list[str]) -> Reading[tuple[str, str] | None]:
    """Take a header; returns recipient and channel, or None where none came. ``seen``: collects its markers."""
    words: list[str] = []
    channel: list[str] = []
    into = words
    while True:
        marker = yield from text.until(into.append, (CHANNEL, CONSTRAIN, MESSAGE, *_ENDS))
        if marker is None:
            return None
        seen.append(marker)
        if marker == MESSAGE:
            break
        if marker == CHANNEL:
            into = channel
        # A marker ends a word.
        into.append(" ")
    spelt = "".join(channel)
    found = _RECIPIENT.search("".join(words)) or _RECIPIENT.search(spelt)
    return (found.group(1) if found is not None else "", spelt.split()[0] if spelt.split() else "")


def _read_call(text: Growing, parts: Parts, recipient: str) -> Reading[None]:
    if not recipient.startswith(PREFIX):
        raise MalformedCallError("is for a tool of another kind than functions")
    parts.call(recipient.removeprefix(PREFIX))
    yield from object_value(text, parts.arguments)


def _rules(rules: Rules, tools: ToolSet) -> None:
    names = []
    for number, tool in enumerate(tools.tools.values()):
        to = quoted(f" to={PREFIX}{tool.name}")
        late = f"{rules.text(CHANNEL + COMMENTARY)} {to} {rules.text(f' {CONSTRAIN}json{MESSAGE}')}"
        early = f"{to} {rules.text(f'{CHANNEL}{COMMENTARY} ')} {rules.text(CONSTRAIN)}? {rules.text(f'json{MESSAGE}')}"
        rules.add(f"call_{number}", f"({late} | {early}) {rules.arguments(number, tool)}")
        names.append(f"call_{number}")
    ends = [holding(end) for end in _ENDS if not rules.spelling.is_special(end)]
    thoughts = rules.any_text("thoughts", "*", "", END, [pattern for pattern in ends if pattern != holding(END)])
    thought = f"{rules.text(CHANNEL + ANALYSIS + MESSAGE)} {thoughts} {rules.text(f'{START}assistant')}"
    if tools.answer is None:
        rules.add("ANSWER", not_beginning(ANY_TEXT, ends))
        answered = "ANSWER?"
    elif ends:
        # A string of an answer could spell them.
        raise RequestRejectedError(FailureCode.INVALID, "this model's tokens do not tell the end of an answer in JSON")
    else:
        answered = rules.answer(tools.answer)
    answer = "" if tools.required else f"| {rules.text(f'{CHANNEL}final{MESSAGE}')} {answered}"
    # One call: its end ends the output.
    rules.add("calls", f"({thought})? ({alternatives(names)} {answer})")


HARMONY = CallFormat("harmony", _MARKERS, _read, _rules, begins=(), reads_thinking=True)
