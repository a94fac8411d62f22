"""Which tokens of an output are counted as reasoning."""

from __future__ import annotations

import pytest

from engine.text.output.format import OutputFormat
from engine.text.output.reader import OutputReader
from engine.text.output.spelling import Spelling
from engine.text.output.tools import NO_TOOLS
from isolation.ipc.messages import Finish
from isolation.ipc.output import Thinking

MARKERS = ("\u25c1think\u25b7", "\u25c1/think\u25b7")
"""Markers that begin and end with a character of three bytes."""

BYTES = tuple(bytes((value,)) for value in range(256))
"""A token for each byte."""


def counted(output: bytes, state: Thinking, special: bool = False) -> list[int]:
    """Reasoning tokens after each token of an output of single bytes; ``special``: the markers are tokens 256 and
    257, which stand in the output as the bytes 0xFE and 0xFF."""
    tokens = {marker: 256 + number for number, marker in enumerate(MARKERS)} if special else {}
    reader = OutputReader(OutputFormat(None, MARKERS), Spelling(MARKERS, tokens), BYTES, NO_TOOLS, state)
    found = []
    for byte in output:
        reader.push([byte + 2 if special and byte >= 0xFE else byte], Finish.NONE)
        found.append(reader.reasoning_tokens)
    return found


BEGIN, END = (marker.encode() for marker in MARKERS)


@pytest.mark.parametrize("state", [Thinking.POSSIBLE, Thinking.BEGUN], ids=lambda state: state.name)
def test_tokens_of_both_markers_and_between_them_count(state: Thinking) -> None:
    """A marker that is spelt by eleven tokens counts eleven; what stands behind the end marker does not."""
    output = BEGIN + "\n\xe9".encode() + END + b"answer"
    assert counted(output, state)[-1] == len(output) - len(b"answer")


def test_each_piece_of_a_character_counts_where_reasoning_has_begun() -> None:
    """Pieces of characters, whole or broken, count from the first token on."""
    for output in ("\U0001f30d".encode(), b"\xf0\x9f", b"\xff\xc3a", b" \xc3"):
        assert counted(output, Thinking.BEGUN) == list(range(1, len(output) + 1))


@pytest.mark.parametrize("output", [BEGIN[:-1] + b"x", b"\xe2\x97answer", b" \n" + BEGIN[:4], b"a" + BEGIN, b"\xc3a"])
def test_what_begins_like_a_marker_and_is_none_does_not_count(output: bytes) -> None:
    """Control: neither part of a marker nor of a character is reasoning by itself."""
    assert counted(output, Thinking.POSSIBLE)[-1] == 0


def test_white_space_before_the_marker_does_not_count() -> None:
    """It belongs to neither; the marker's tokens count once the marker is complete, and one token where it is one."""
    assert counted(b"\n " + BEGIN, Thinking.POSSIBLE) == [0] * (1 + len(BEGIN)) + [len(BEGIN)]
    assert counted(b"\n \xfe\xc3\xa9\xffb", Thinking.POSSIBLE, special=True) == [0, 0, 1, 2, 3, 4, 4]
