"""Text from tokens: whole characters, and stop strings wherever their borders fall."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.request.assembler import Assembler, StopScanner
from appliance.gateway.sandboxes.text_link import VocabularyTable

BYTES = VocabularyTable(tuple(bytes([value]) for value in range(256)), strip_leading_space=False)


@given(st.text(max_size=60))
def test_every_text_comes_back_whole(text: str) -> None:
    """A text sent as single bytes is given back unchanged, and no delta ever holds half a character."""
    assembler = Assembler(BYTES)
    deltas = [assembler.push((byte,)) for byte in text.encode()]
    assert "\ufffd" not in "".join(deltas) or "\ufffd" in text
    assert "".join(deltas) + assembler.finish() == text


def test_an_unfinished_character_shows_as_a_replacement_at_the_end() -> None:
    """Output that ends inside a character ends with U+FFFD, not with silence."""
    assembler = Assembler(BYTES)
    assert assembler.push("\u20ac".encode()[:2]) == ""
    assert assembler.finish() == "\ufffd"


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=40),
)
def test_stop_strings_cut_at_the_first_one_however_the_text_is_split(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    """Whatever the chunk borders, the shown text never holds a stop string and is a beginning of the text; with no
    stop string in it, all of it is shown."""
    scanner = StopScanner(stops)
    shown, at = "", 0
    for size in [*sizes, len(text)]:
        shown += scanner.push(text[at : at + size])
        at += size
    stopped = scanner.stopped is not None
    shown += scanner.flush()
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert shown == text


@given(
    st.text("ab", max_size=60),
    st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=60),
)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    """After each piece what is held back is the longest end of the text that a stop string begins with."""
    scanner = StopScanner(stops)
    shown, at = "", 0
    for size in sizes:
        shown += scanner.push(text[at : at + size])
        at += size
        seen = text[:at]
        if scanner.stopped is None:
            held = [stop[:cut] for stop in stops for cut in range(len(stop)) if seen.endswith(stop[:cut])]
            assert shown == seen[: len(seen) - len(max(held, key=len))]


def test_a_character_costs_the_same_whatever_nearly_is_a_stop_string() -> None:
    """Sixteen long stop strings, and an output that begins with one and looks like the others: counted in lines of
    Python, its later tokens cost no more than those of a text that has nothing of them in it but a first letter."""
    stops = ["a" * 256, *("a" + chr(98 + place) * 255 for place in range(15))]

    def lines(text: str) -> int:
        scanner, count = StopScanner(stops), 0

        def trace(_frame: object, event: str, _argument: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            for char in text:
                scanner.push(char)
        finally:
            sys.settrace(before)
        return count

    assert lines("a" * 250) < 2 * lines("az" * 125)


def test_text_after_a_stop_string_is_never_shown() -> None:
    """The scanner stays silent after a hit."""
    scanner = StopScanner(["END"])
    assert scanner.push("so EN") == "so "
    assert scanner.push("D and more") == ""
    assert (scanner.stopped, scanner.push("x"), scanner.flush()) == ("END", "", "")


def test_a_leading_space_is_dropped_once_where_the_tokenizer_says_so() -> None:
    """SentencePiece's dummy prefix does not reach the client; later spaces do."""
    table = VocabularyTable((b" a", b" b"), strip_leading_space=True)
    assert Assembler(table).push((0, 1)) == "a b"


def test_ids_beyond_the_table_have_no_text() -> None:
    """Padding rows of the logits are possible ids; they show nothing."""
    assert Assembler(BYTES).push((65, 99_999, 66)) == "AB"
