"""Grammars of outputs that call tools: what the models write passes, and what passes is read as calls that satisfy the
tools' schemas, whether the markers of a format are special tokens or text."""

from __future__ import annotations

import random

import pytest

from isolation.ipc.grammar import MaskState
from isolation.ipc.output import Thinking
from tests.engine.text.output.held import (
    ALONE,
    BARE,
    FULL,
    LEAST,
    SEEDS,
    WHOLE,
    allowed_by,
    check_calls,
    each_format,
    each_spelling,
    each_spelt,
    held,
    tools,
)
from tests.engine.text.output.reading import Read
from tests.engine.text.output.writing import write


@each_spelt
@pytest.mark.parametrize("required", [True, False])
def test_what_templates_write_passes(name: str, special: bool, required: bool) -> None:
    """Calls as the chat template writes them pass to their end, one and several, and are read as what they say."""
    grammar = held(name, tools(required=required), special=special)
    for calls in ([FULL], [LEAST], [BARE], [BARE, FULL, LEAST]):
        if len(calls) > 1 and name in ALONE:
            continue
        text = write(name, calls)
        assert grammar.passes(text), text
        assert grammar.read(grammar.spelt.ids(text)).calls == calls


@each_spelt
def test_what_is_no_call_of_a_tool_does_not_pass(name: str, special: bool) -> None:
    """An unknown tool, a value of a wrong type or out of bounds, a missing argument and one too many; a begun call is
    no end."""
    grammar = held(name, tools(required=True), special=special)
    for call in (
        ("get_nothing", {}),
        ("get_weathe", LEAST[1]),
        ("get", {"city": "Oslo"}),
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"days": 1}),
        ("get_weather", {**LEAST[1], "more": 1}),
        ("get_weather", {**LEAST[1], "days": 15}),
        ("get_weather", {**LEAST[1], "days": "x"}),
        ("get_weather", {**LEAST[1], "city": ""}),
        ("get_weather", {**LEAST[1], "city": "Oslo!!"}),
        ("get_weather", {**LEAST[1], "unit": "k"}),
        ("get_weather", {**LEAST[1], "metric": 1}),
        ("get_weather", {**LEAST[1], "hours": [1, 2, 3, 4]}),
        ("get_weather", {**LEAST[1], "place": {"names": ["a"]}}),
        ("get_weather", {**LEAST[1], "place": {"lat": 1, "names": []}}),
        ("get_weather", {**LEAST[1], "place": {"lat": 91}}),
    ):
        assert not grammar.passes(write(name, [call])), call
    text = write(name, [LEAST])
    assert not any(grammar.passes(text[:length]) for length in range(0, len(text) - 1, 4))
    assert not grammar.passes("")
    assert not grammar.passes("It rains.")


@each_spelt
@pytest.mark.parametrize("parallel", [True, False])
def test_random_outputs_are_calls(name: str, special: bool, parallel: bool) -> None:
    """Whatever the masks allow is read, once the grammar accepts the end, as calls that satisfy the schemas."""
    grammar = held(name, tools(required=True, parallel=parallel), special=special)
    begin = "<|channel|>commentary" if name == "harmony" and not special else ""
    for seed in range(SEEDS):
        found = grammar.read(grammar.walk(seed, begin))
        check_calls(found)
        assert len(found.calls) == 1 or (parallel and found.calls)
        assert not found.content.strip()


@each_spelt
def test_text_may_stand_for_a_call(name: str, special: bool) -> None:
    """Without a duty to call, plain text passes and may end anywhere, and is read as it is; so is no text at all."""
    grammar = held(name, tools(), special=special)
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    for text in ("It rains, 5 < 6 <b>.", "caf\u00e9 \U0001f600 [x] {y} </", "a\n\nb: <|", "Call <tool"):
        for length in range(1, len(text)):
            assert grammar.passes(begin + text[:length])
        assert grammar.read(grammar.spelt.ids(begin + text)) == Read(text)
    assert grammar.passes(begin)


@each_spelt
def test_text_may_stand_before_a_call(name: str, special: bool) -> None:
    """Text, then a call, is read as both; not in formats whose calls are the whole answer."""
    grammar = held(name, tools(), special=special)
    for text in ("I look.", "a <b> {\n\n", "<"):
        whole = text + write(name, [LEAST])
        if name not in WHOLE:
            assert grammar.passes(whole), whole
            assert grammar.read(grammar.spelt.ids(whole)) == Read(text.rstrip(), calls=[LEAST])


@each_spelt
def test_what_begins_like_a_call_is_one(name: str, special: bool) -> None:
    """Behind the beginning of a call there is no way but to its end."""
    grammar = held(name, tools(), special=special)
    text = write(name, [LEAST])
    begin = text[: text.index("get_weather")]
    assert grammar.state(begin) is MaskState.OPEN
    assert grammar.state(begin + "no such tool") is None
    for seed in range(SEEDS):
        before = "" if name in WHOLE else "Well."
        found = grammar.read(grammar.walk(seed, before + begin))
        check_calls(found)
        assert found.calls
        assert found.content == before


@each_format
def test_markers_that_are_text_are_spelt_nowhere_else(name: str) -> None:
    """Random text made of pieces of the format's markers passes only where the reading has nothing to refuse."""
    grammar = held(name, tools(), special=False)
    form = grammar.spelt.words.form
    pieces = [*form.markers, *(marker[:-1] for marker in form.markers), "<", "a", "\n", " ", "{", "["]
    rng = random.Random(name)
    passed = 0
    for _ in range(200):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 4)))
        if grammar.passes(text):
            passed += 1
            assert not grammar.read(grammar.spelt.ids(text)).refused, text
    assert passed > 2 or name == "harmony"


@each_spelt
@pytest.mark.parametrize("required", [True, False])
def test_reasoning_comes_before_calls(name: str, special: bool, required: bool) -> None:
    """Where the prompt has begun it, reasoning, its end and a call pass and are read as such; a call alone does not.
    Where it is possible, both do."""
    if name == "harmony":
        pytest.skip("has reasoning of its own")
    source, text = tools(required=required), write(name, [FULL])
    # A special token cannot stand in reasoning; its text can.
    thought = "Let me see: <b> {" + ("" if special else "\n" + write(name, [BARE]))
    begun = held(name, source, special=special, thinking=Thinking.BEGUN, thinks=True)
    for space in ("", "\n", "\n\n"):
        whole = f"{thought}</think>{space}{text}"
        assert begun.passes(whole)
        found = begun.read(begun.spelt.ids(whole))
        assert (found.reasoning, found.calls, found.content, found.refused) == (thought, [FULL], "", [])
    assert not begun.passes(text)
    assert begun.passes(f"hm</think>{text}")
    assert begun.passes(f"</think>{text}")
    assert begun.passes("hm</think>\n\nIt rains.") is not required
    possible = held(name, source, special=special, thinking=Thinking.POSSIBLE, thinks=True)
    for whole, reasoning in ((text, ""), (f"<think>{thought}</think>\n\n{text}", thought)):
        assert possible.passes(whole)
        found = possible.read(possible.spelt.ids(whole))
        assert (found.reasoning, found.calls, found.content, found.refused) == (reasoning, [FULL], "", [])
    assert not possible.passes("<think>hm")
    for seed in range(SEEDS // 3):
        check_calls(begun.read(begun.walk(seed, f"hm</think>\n{text[: text.index('get_weather')]}")))


@each_spelling
def test_harmony_reasons_on_its_own_channel(special: bool) -> None:
    """Reasoning, then a call in either order of its header, or an answer where none is required."""
    call = '<|message|>{"city": "Bonn", "days": 14}'
    for header in (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json",
        " to=functions.get_weather<|channel|>commentary json",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json",
    ):
        whole = f"<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant{header}{call}"
        for required in (True, False):
            grammar = held("harmony", tools(required=required), special=special)
            assert grammar.passes(whole)
            assert grammar.passes(header + call)
            assert grammar.read(grammar.spelt.ids(whole)) == Read(reasoning="hm <b>", calls=[LEAST])
            answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It rains."
            assert grammar.passes(answer) is not required


@each_spelt
def test_one_call_is_the_end_where_one_is_permitted(name: str, special: bool) -> None:
    """Without parallel calls nothing passes behind a complete call; with them, another does (control)."""
    for required in (True, False):
        grammar = held(name, tools(required=required, parallel=False), special=special)
        row = grammar.after(grammar.spelt.ids(write(name, [LEAST])))
        assert row is not None
        assert row.state is MaskState.ACCEPTING
        assert not allowed_by(row)
        both = write(name, [LEAST, BARE])
        if name not in ALONE:
            assert not grammar.passes(both)
            assert held(name, tools(required=required), special=special).passes(both)
