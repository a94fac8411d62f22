"""Reasoning told apart on the host: the same text as the text sandbox reads, for any tokens in any batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.generate_request import Delta, FinishReason
from appliance.gateway.request.thinking_text import ThinkingMarks, ThinkingText
from appliance.gateway.sandboxes.text_link import VocabularyTable
from engine.text.output.format import OutputFormat
from engine.text.output.reader import OutputReader
from engine.text.output.spelling import Spelling
from engine.text.output.tools import NO_TOOLS
from isolation.ipc.messages import Finish
from isolation.ipc.output import PartKind, Thinking

ENTRIES = (b"<think>", b"</think>", b"a", b" b", b"\n", b"  ", b"\xc3", b"\xa9", b"EN", b"D", b"")
BEGIN, END, A, B, LINE, SPACES, HALF, OTHER_HALF, STOP_1, STOP_2, NOTHING = range(len(ENTRIES))
TABLE = VocabularyTable(ENTRIES, False)
MARKS = ThinkingMarks(BEGIN, END)


def text_of(state: Thinking, stops: tuple[str, ...] = (), *, shows_reasoning: bool = True) -> ThinkingText:
    """A text."""
    return ThinkingText(TABLE, stops, MARKS, state, shows_reasoning=shows_reasoning)


def told(text: ThinkingText, batches: list[list[int]], finish: Finish = Finish.STOP) -> tuple[str, str, int]:
    """Reasoning, content, and the number of tokens that count, of an output; a token of no text ends it."""
    reasoning, content, used = "", "", 0
    for number, batch in enumerate([*batches, [NOTHING]]):
        delta, count = text.push(batch, (), finish if number == len(batches) else Finish.NONE)
        reasoning, content, used = reasoning + delta.reasoning, content + delta.text, used + count
        if text.over:
            break
    return reasoning, content, used


@given(
    st.lists(st.lists(st.integers(0, len(ENTRIES) - 1), min_size=1, max_size=6), max_size=8), st.sampled_from(Thinking)
)
def test_it_reads_as_the_text_sandbox_does(batches: list[list[int]], state: Thinking) -> None:
    """The same reasoning, content and count of reasoning tokens, whatever comes."""
    text = text_of(state)
    reasoning, content, used = told(text, batches)
    markers = ("<think>", "</think>")
    reader = OutputReader(OutputFormat(None, markers), Spelling(markers, {}), ENTRIES, NO_TOOLS, state)
    token_ids = [token for batch in batches for token in batch]
    parts = reader.push(token_ids, Finish.STOP)
    assert content == "".join(part.text for part in parts if part.kind is PartKind.CONTENT)
    assert reasoning == "".join(part.text for part in parts if part.kind is PartKind.REASONING)
    assert used == len(token_ids) + 1
    assert text.reasoning_tokens == reader.reasoning_tokens


def test_reasoning_and_answer_are_apart() -> None:
    """White space around both is dropped; the marks count as reasoning."""
    for state, first in ((Thinking.POSSIBLE, [LINE, BEGIN, LINE]), (Thinking.BEGUN, [LINE])):
        text = text_of(state)
        assert told(text, [first, [A, B, LINE], [END, LINE, A]])[:2] == ("a b", "a")
        assert text.reasoning_tokens == len(first) - (state is Thinking.POSSIBLE) + 4
    text = text_of(Thinking.NONE)
    assert told(text, [[LINE, A, BEGIN, B]])[:2] == ("", "\na<think> b")
    assert text.reasoning_tokens == 0


@pytest.mark.parametrize("first", [[HALF], [HALF, A], [LINE], [NOTHING], [END], [BEGIN, HALF]], ids=str)
def test_each_token_of_begun_reasoning_counts(first: list[int]) -> None:
    """Where the prompt has begun the reasoning, a token counts also if it has part of a character, white space or no
    text: on the host and in the text sandbox alike, token by token."""
    markers = ("<think>", "</think>")
    reader = OutputReader(OutputFormat(None, markers), Spelling(markers, {}), ENTRIES, NO_TOOLS, Thinking.BEGUN)
    text = text_of(Thinking.BEGUN)
    for number, token in enumerate(first, 1):
        reader.push([token], Finish.NONE)
        text.push([token], (), Finish.NONE)
        assert reader.reasoning_tokens == text.reasoning_tokens == number


def test_stop_strings_end_the_answer_alone() -> None:
    """In reasoning they have no effect; tokens behind one are not charged."""
    text = text_of(Thinking.BEGUN, ("END",))
    assert told(text, [[STOP_1, STOP_2, END, A, STOP_1], [STOP_2, A, A]]) == ("END", "a", 6)
    assert (text.stopped, text.over, text.reason(Finish.NONE)) == ("END", True, FinishReason.STOP)


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_an_end_inside_the_reasoning(finish: Finish) -> None:
    """All of it is reasoning, an unfinished character included; the reason is the engine's."""
    text = text_of(Thinking.BEGUN)
    assert told(text, [[A, HALF]], finish)[:2] == ("a\ufffd", "")
    assert text.reason(finish) is (FinishReason.STOP if finish is Finish.STOP else FinishReason.LENGTH)


def test_hidden_reasoning_shows_neither_text_nor_ids() -> None:
    """It is charged and counted; control: the answer behind it is shown."""
    text = text_of(Thinking.BEGUN, shows_reasoning=False)
    first, used = text.push([A, B], (), Finish.NONE)
    second, _ = text.push([END, A], (), Finish.NONE)
    third, _ = text.push([B], (), Finish.NONE)
    assert (first, used) == (Delta("", ()), 2)
    assert (second.text, second.token_ids, second.reasoning) == ("a", (), "")
    assert (third.text, third.token_ids, text.reasoning_tokens) == (" b", (B,), 3)
