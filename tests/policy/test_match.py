"""policy.match: globs with stars."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.match import first_match, glob_matches


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a", "a", True),
        ("a", "A", False),
        ("a", "ab", False),
        ("a", "", False),
        ("", "", True),
        ("*", "", True),
        ("*", "anything", True),
        ("qwen3-*", "qwen3-", True),
        ("qwen3-*", "qwen3-8b", True),
        ("qwen3-*", "xqwen3-8b", False),
        ("*-8b", "qwen3-8b", True),
        ("*-8b", "qwen3-8b-fp8", False),
        ("q*3*b", "qwen3-8b", True),
        ("q*3*c", "qwen3-8b", False),
        ("a.b", "axb", False),
        ("**", "x", True),
    ],
)
def test_table(pattern: str, name: str, expected: bool) -> None:
    """Only the star is special; the whole name must fit."""
    assert glob_matches(pattern, name) is expected


@given(st.text(alphabet="ab*", max_size=8), st.text(alphabet="ab", max_size=8))
def test_agrees_with_a_regular_expression(pattern: str, name: str) -> None:
    """The matcher and the obvious translation to a regular expression agree."""
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    assert glob_matches(pattern, name) == bool(re.fullmatch(expression, name))


@given(st.text(max_size=20))
def test_every_name_matches_itself(name: str) -> None:
    """A name without stars is a pattern for itself."""
    assert glob_matches(name, name)


def test_many_stars_cost_little() -> None:
    """A pattern made to blow up a backtracking matcher ends at once."""
    start = time.perf_counter()
    assert not glob_matches("a*" * 60 + "b", "a" * 128)
    assert time.perf_counter() - start < 10


def test_first_match_gives_the_index() -> None:
    """The first pattern that fits decides; no patterns fit nothing."""
    assert first_match(["a", "b*", "*"], "bc") == 1
    assert first_match(["a"], "b") is None
    assert first_match([], "b") is None
