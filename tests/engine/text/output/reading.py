"""Reads whole outputs in tests, in pieces of any size."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from engine.text.marks import OPEN
from engine.text.output.detect import FORMATS
from engine.text.output.format import CallFormat, OutputFormat, read
from engine.text.output.growing import Growing
from engine.text.output.parts import Parts
from engine.text.output.spelling import Spelling
from engine.text.output.tools import Tool, ToolSet
from isolation.ipc.output import Part, PartKind, Thinking

BY_NAME = {form.name: form for form in FORMATS}

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "options": {"type": "object"},
            "hours": {"type": "array", "items": {"type": "integer"}},
        },
    },
)
TIME = Tool("get_time")
TOOLS = ToolSet({tool.name: tool for tool in (WEATHER, TIME)})


@dataclass
class Read:
    """An output as a client gets it."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and parsed arguments of each complete call."""
    begun: tuple[str, str] | None = None
    """Name and text of the arguments of a call that has not ended."""
    refused: list[str] = field(default_factory=list)


def read_output(
    form: CallFormat | str | None,
    text: str,
    *,
    tools: ToolSet = TOOLS,
    thinking: tuple[str, str] | None = None,
    state: Thinking = Thinking.NONE,
    cut: bool = False,
    special: tuple[str, ...] = (),
    spelt: bool = False,
) -> Read:
    """Read a whole text, in pieces of several sizes, which must give the same. ``special``: texts that are special
    tokens of the model, wherever they stand in the text, or with ``spelt`` nowhere: other tokens spell them."""
    calls = BY_NAME[form] if isinstance(form, str) else form
    form = OutputFormat(calls, thinking)
    spelling = Spelling(form.markers, {token: number for number, token in enumerate(special)})
    cuts = [_pieces(spelling, () if spelt else special, text, size) for size in (1, 2, 7, 1 << 20)]
    found = [_read(form, spelling, pieces, tools, state, cut) for pieces in cuts]
    assert all(one == found[0] for one in found), "a reading depends on the pieces in which the text came"
    return found[0]


def _read(
    form: OutputFormat, spelling: Spelling, pieces: list[str], tools: ToolSet, state: Thinking, cut: bool
) -> Read:
    growing, parts = Growing(spelling.marked), Parts(tools)
    reading = read(form, growing, parts, state)
    running = next(reading, False) is None
    for piece in pieces:
        if parts.over:
            break
        growing.push(piece)
        running = running and next(reading, False) is None
    if not parts.over:
        growing.ended, parts.cut = True, cut
        running = running and next(reading, False) is None
        parts.end()
    assert not running or parts.over
    return joined(parts.drain())


def _pieces(spelling: Spelling, special: tuple[str, ...], text: str, size: int) -> list[str]:
    """Cut the text; a special token stays whole, as it comes from a model."""
    marked = spelling.texts
    for number, token in enumerate(special):
        text = text.replace(token, marked.get(number, ""))
    pieces: list[str] = []
    for number, piece in enumerate(text.split(OPEN)):
        if number:
            end = piece.index("\ufdd1") + 1
            pieces.append(OPEN + piece[:end])
            piece = piece[end:]
        pieces += [piece[at : at + size] for at in range(0, len(piece), size)]
    return pieces


def joined(parts: list[Part]) -> Read:
    """Put the parts of an output together."""
    result = Read()
    for part in parts:
        # What goes to the host is UTF-8.
        assert part.text.encode().decode() == part.text
        if part.kind is PartKind.CONTENT:
            result.content += part.text
        elif part.kind is PartKind.REASONING:
            result.reasoning += part.text
        elif part.kind is PartKind.CALL:
            assert result.begun is None
            result.begun = (part.text, "")
        elif part.kind is PartKind.ARGUMENTS:
            assert result.begun is not None
            result.begun = (result.begun[0], result.begun[1] + part.text)
        elif part.kind is PartKind.CALLED:
            assert result.begun is not None
            result.calls.append((result.begun[0], json.loads(result.begun[1])))
            result.begun = None
        else:
            result.refused.append(part.text)
            result.begun = None
    return result
