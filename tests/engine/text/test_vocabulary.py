"""engine.text.vocabulary: the table gives the tokenizer's own texts, or says that it does not."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary

MANY = 1 << 20


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=40))
def test_byte_level_round_trip(mini_worker, text: str) -> None:
    """The joined entries of any text's ids are the text's UTF-8 (noncharacters in it included)."""
    worker = mini_worker
    assert worker._vocabulary.exact
    ids = worker._tokenizer.encode_text(text, MANY)
    assert worker._vocabulary.join(ids) == text.encode()


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=40).filter(lambda text: "\u2581" not in text))
def test_metaspace_round_trip(stories_worker, text: str) -> None:
    """With spaces spelt as blocks and bytes as fallback tokens, too; the dummy prefix comes
    off."""
    worker = stories_worker
    assert worker._vocabulary.exact
    ids = worker._tokenizer.encode_text(text, MANY)
    assert worker._vocabulary.join(ids) == text.encode()


def test_qwen2_is_exact_and_checked_quickly(qwen2: Tokenizer) -> None:
    """151,936 entries are built and checked in bounded time."""
    start = time.process_time()
    vocabulary = Vocabulary(qwen2)
    assert time.process_time() - start < 2
    assert vocabulary.exact
    assert not vocabulary.strip_leading_space
    assert len(vocabulary.entries) == qwen2.vocab_size == 151_936
    assert vocabulary.entries[9707] == b"Hello"
    assert vocabulary.entries[151_645] == b""


def test_what_tokens_add(minimind, stories) -> None:
    """Special tokens have no bytes, other added tokens have their text, fallback tokens one
    byte."""
    table = {token: minimind._vocabulary.entries[token_id] for token, token_id in minimind._tokenizer.tokens().items()}
    assert table["<|im_start|>"] == b""
    assert table["<think>"] == b"<think>"
    table = {token: stories._vocabulary.entries[token_id] for token, token_id in stories._tokenizer.tokens().items()}
    assert table["<s>"] == b""
    assert table["<0x0A>"] == b"\n"
    assert table["\u2581the"] == b" the"
    assert stories._vocabulary.strip_leading_space


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": True}
DECODERS = {
    "metaspace": METASPACE | {"prepend_scheme": "first"},
    "metaspace without prefix": METASPACE | {"prepend_scheme": "never"},
    "word pieces": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "suffixes": {"type": "BPEDecoder", "suffix": "</w>"},
    "two letters stripped": {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 2, "stop": 0}],
    },
    "none": None,
}


@pytest.mark.parametrize(
    ("name", "exact", "strips"),
    [
        ("metaspace", True, True),
        ("metaspace without prefix", True, False),
        ("word pieces", False, False),
        ("suffixes", False, False),
        ("two letters stripped", False, False),
        ("none", False, False),
    ],
)
def test_decoders(name: str, exact: bool, strips: bool, tiny) -> None:
    """What the table can reproduce is found exact, everything else is found not to be."""
    spec = json.loads(tiny("<x>"))
    spec["pre_tokenizer"] = None
    spec["model"]["vocab"] |= {"\u2581": 256, "\u2581ab": 257, "</w>": 258, "##b": 259}
    spec["model"]["unk_token"] = "!"
    spec["added_tokens"][0]["id"] = 260
    spec["decoder"] = DECODERS[name]
    vocabulary = Vocabulary(Tokenizer(json.dumps(spec).encode(), ""))
    assert (vocabulary.exact, vocabulary.strip_leading_space) == (exact, strips)


def test_an_entry_too_long_for_the_wire(tiny) -> None:
    """Such a token is left empty and the table is not exact."""
    vocabulary = Vocabulary(Tokenizer(tiny("x" * 1025, special=False), ""))
    assert vocabulary.entries[256] == b""
    assert not vocabulary.exact
    assert Vocabulary(Tokenizer(tiny("x" * 1024, special=False), "")).exact


def test_holes_in_the_vocabulary_are_empty(tiny) -> None:
    """An id that no token has adds nothing."""
    spec = json.loads(tiny())
    spec["model"]["vocab"]["ab"] = 300
    vocabulary = Vocabulary(Tokenizer(json.dumps(spec).encode(), ""))
    assert len(vocabulary.entries) == 301
    assert vocabulary.entries[280] == b""
    assert vocabulary.entries[300] == b"ab"
    assert vocabulary.exact


def test_added_tokens_spell_themselves(tiny) -> None:
    """In a byte-level vocabulary an added token is its text, not the bytes its letters stand
    for."""
    vocabulary = Vocabulary(Tokenizer(tiny("\u0120x", "<\u00e4 b>", special=False), ""))
    assert vocabulary.entries[257] == "<\u00e4 b>".encode()
