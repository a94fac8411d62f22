"""engine.text.marks: marking, unmarking, settling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text.marks import CLOSE, OPEN, ControlTokens, holds_mark, unmark, wrap

CONTROL = ControlTokens(["<a>", "<a><b>", "[x]", ""])

pieces = st.lists(st.sampled_from(["<a>", "<b>", "[x]", "<", "a", ">", " ", OPEN, CLOSE]), max_size=12)


def test_marking_takes_the_longest_token_first() -> None:
    """Every occurrence is wrapped once, the longer token before the shorter one it begins with."""
    assert CONTROL.mark("q<a>r<a><b>[x]") == f"q{wrap('<a>')}r{wrap('<a><b>')}{wrap('[x]')}"
    assert CONTROL.mark("<b> plain") == "<b> plain"


def test_no_tokens_mark_nothing() -> None:
    """A model without control tokens leaves every text as it is."""
    empty = ControlTokens([])
    assert empty.mark("<a>") == "<a>"
    assert empty.unmarked_in("<a>") is None


def test_settling_keeps_whole_tokens_only() -> None:
    """Marks around anything but a control token, and marks without a partner, go."""
    assert CONTROL.settle("plain <a>") == "plain <a>"
    assert CONTROL.settle(f"{OPEN}{wrap('<a>')}{CLOSE}{OPEN}q{CLOSE}r{CLOSE}") == wrap("<a>") + "qr"
    assert CONTROL.settle(f"{OPEN}<a{CLOSE}>") == "<a>"


def test_unmarked_tokens_are_found() -> None:
    """A control token in clear is named; one in marks is not, nor one that a mark would
    complete."""
    assert CONTROL.unmarked_in(f"{wrap('<a>')} [x]") == "[x]"
    assert CONTROL.unmarked_in(f"{wrap('<a>')} x]") is None
    assert CONTROL.unmarked_in(f"[{wrap('<a>')}x]") is None


def test_removing_marks() -> None:
    """What was marked comes back as it was."""
    assert unmark(CONTROL.mark("a<a>b")) == "a<a>b"
    assert unmark("plain") == "plain"
    assert holds_mark(wrap("a"))
    assert not holds_mark("a")


@given(pieces.map("".join))
def test_settled_text_is_stable_and_spells_the_same(text: str) -> None:
    """Settling changes no character but marks, and settling twice is settling once."""
    settled = CONTROL.settle(text)
    assert unmark(settled) == unmark(text)
    assert CONTROL.settle(settled) == settled
    assert settled.count(OPEN) == settled.count(CLOSE)
