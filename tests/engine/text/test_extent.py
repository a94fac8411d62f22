"""The bound on the text of one token: it holds where there is one, and there is none where text may be dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRejectedError
from engine.text.extent import MOST_COMPOSED, most_characters
from engine.text.tokenizer import Tokenizer
from isolation.ipc.messages import FailureCode

COLLAPSE = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def sequence(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Parts one after the other."""
    return {"type": "Sequence", kind: list(parts)}


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 7),
        ({"normalizer": {"type": "NFC"}}, 7 * MOST_COMPOSED),
        ({"normalizer": sequence("normalizers", {"type": "NFD"}, {"type": "Lowercase"})}, 7),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}}, 7),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, 0),
        ({"normalizer": COLLAPSE}, 0),
        ({"normalizer": sequence("normalizers", {"type": "NFC"}, COLLAPSE)}, 0),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, 0),
        ({"normalizer": {"type": "StripAccents"}}, 0),
        ({"pre_tokenizer": sequence("pretokenizers", SPLIT, BYTE_LEVEL)}, 7),
        ({"pre_tokenizer": sequence("pretokenizers", SPLIT | {"behavior": "Removed"}, BYTE_LEVEL)}, 0),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, 0),
        ({"pre_tokenizer": None}, 0),
        ({"model": {"type": "WordPiece", "vocab": {}, "unk_token": "x"}}, 0),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "byte_fallback": True}, "pre_tokenizer": None}, 0),
        ({"added_tokens": [{"content": "x", "lstrip": False, "rstrip": True}]}, 0),
    ],
)
def test_what_has_a_bound(tiny, changes: dict[str, Any], most: int) -> None:
    """Only pipelines whose every part keeps all characters; composition is counted in."""
    assert most_characters(json.loads(tiny()) | changes, 7) == most


def test_published_vocabularies_have_one(mini, qwen2: Tokenizer, stories) -> None:
    """Byte-level and byte-fallback ones of the length of their longest token."""
    bounds = [tokenizer._most_characters for tokenizer in (mini._tokenizer, qwen2, stories._tokenizer)]
    assert bounds == [16, 128, 7]


@settings(max_examples=200)
@given(st.text(max_size=40), st.integers(1, 50))
def test_no_text_has_fewer_tokens_than_the_bound_says(mini_worker, stories_worker, text: str, times: int) -> None:
    """Over two published spellings, however a text repeats."""
    for worker in (mini_worker, stories_worker):
        tokenizer = worker._tokenizer
        count = len(tokenizer.fragment(text * times))
        assert len(text * times) <= (count + 1) * tokenizer._most_characters


def test_composition_makes_one_of_so_many_at_most() -> None:
    """By Unicode's own data: no character is canonically made of more, and some are."""
    import unicodedata

    most = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000))
    assert most == MOST_COMPOSED


def test_a_long_text_that_collapses_fits(tiny) -> None:
    """A normaliser that makes one blank of a hundred thousand leaves a prompt of one token, which is no longer than
    one may be; without it the same text is refused (control)."""
    text = " " * 100_000
    collapsing = Tokenizer(tiny(normalizer=COLLAPSE), "")
    assert len(collapsing.encode_text(text, 4)) == 1
    with pytest.raises(RequestRejectedError) as raised:
        Tokenizer(tiny(), "").encode_text(text, 4)
    assert raised.value.code is FailureCode.TOO_LONG
