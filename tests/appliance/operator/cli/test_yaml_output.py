"""YAML that commands print, read back by readers of both versions of YAML."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from appliance.operator.cli.yaml_output import yaml_text

ODD = ["1e3", "no", "y", "0o14", "0x10", "017", "1_000", "2025-01-01", "12:30:00", "~", "", "x: y", "- a", "#", "<<"]
"""Texts that one version of YAML or the other takes for something else where they stand without quotes."""

texts = st.sampled_from(ODD) | st.text("ab1e:#-'\" \n\te\u0301", max_size=9)
leaves = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts


def branches(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """Lists and mappings of what there is."""
    return st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)


def both(text: str) -> tuple[object, object]:
    """The document as a reader of YAML 1.1 and one of YAML 1.2 read it."""
    return yaml.safe_load(text), YAML(typ="safe", pure=True).load(text)


@settings(max_examples=200, deadline=None)
@given(st.recursive(leaves, branches, max_leaves=12))
def test_both_versions_read_what_was_written(value: object) -> None:
    """Whatever the data, both readers give it back."""
    assert both(yaml_text(value)) == (value, value)


@pytest.mark.parametrize("word", ["1e3", "0o14", "no", "y"])
def test_unquoted_the_two_versions_may_differ(word: str) -> None:
    """Control: without quotes at least one version takes these words for no text, or is told by quotes; the writer
    quotes those that either takes for a number or a boolean."""
    plain = both(f"a: {word}\n")
    taken = any(document != {"a": word} for document in plain)
    assert taken == (word != "y")
    assert both(yaml_text({"a": word})) == ({"a": word}, {"a": word})


def test_keys_keep_their_order_and_letters() -> None:
    """Keys stand in the order of the data, and letters as they are."""
    assert yaml_text({"b": 1, "a": ["\u00e9"]}) == "b: 1\na:\n- \u00e9\n"
