"""engine.text.tokenizer: published ids, literal control tokens, malformed files."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.catalog import embedded_model
from engine.errors import ModelLoadError, RequestRejectedError
from engine.text import tokenizer as module
from engine.text.marks import wrap
from engine.text.tokenizer import MAX_VOCABULARY, Tokenizer
from isolation.ipc.messages import FailureCode

SEPARATOR = "\n__ggml_vocab_test__\n"
MANY = 1 << 20


def vectors(path: Path) -> list[tuple[str, list[int]]]:
    """Strings and their ids, from the two files that belong together."""
    *texts, rest = (path / "qwen2.vectors.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = (path / "qwen2.vectors.out").read_text(encoding="utf-8").splitlines()
    assert rest == ""
    ids = [[int(token) for token in line.split()] for line in lines]
    return list(zip(texts, ids, strict=True))


def test_published_vectors(qwen2: Tokenizer, shared_data: Path) -> None:
    """All 46 strings of the Qwen2 vocabulary test give exactly their published ids."""
    pairs = vectors(shared_data / "tokenizers")
    assert len(pairs) == 46
    for text, expected in pairs:
        assert list(qwen2.encode_text(text, MANY)) == expected, text


@pytest.mark.parametrize("name", ["mini_dir", "stories_dir", "minimind_dir"])
def test_plain_text_gives_the_ids_of_transformers(name: str, request, load) -> None:
    """Text without control tokens encodes as in transformers, BOS and all."""
    transformers = pytest.importorskip("transformers")
    path = request.getfixturevalue(name)
    reference = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer = load(path)._tokenizer
    for text in ("", " ", "Hello, world!\n\n  x", "\u00e9\U0001f999 \u4f60\u597d", "a\tb\r\n", "1 < 2 |>"):
        assert list(tokenizer.encode_text(text, MANY)) == reference(text)["input_ids"], text


@pytest.mark.parametrize("name", ["mini_dir", "stories_dir", "minimind_dir"])
def test_control_tokens_in_text_stay_literal(name: str, request, load) -> None:
    """A control token that a text spells gives other ids, which decode to what was spelt."""
    path = request.getfixturevalue(name)
    tokenizer = load(path)._tokenizer
    published = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    plain = list(tokenizer.encode_text("", MANY))
    for token in sorted(tokenizer.control.texts):
        ids = list(tokenizer.encode_text(f"a{token}b", MANY))
        assert published.token_to_id(token) in published.encode(f"a{token}b").ids
        assert published.token_to_id(token) not in ids[len(plain) :]
        assert tokenizer.decode(ids).strip() == f"a{token}b"


def test_marked_tokens_are_the_published_ones(minimind_dir: Path, load) -> None:
    """In their marks, control tokens give the ids that the published tokenizer gives in clear."""
    tokenizer = load(minimind_dir)._tokenizer
    published = tokenizers.Tokenizer.from_file(str(minimind_dir / "tokenizer.json"))
    text = "<|im_start|>user\nHi  there<|im_end|>\n<think>\nhm</think>\n\n<tool_call>"
    marked = tokenizer.control.mark(text)
    assert marked.count(wrap("")[0]) == 5
    assert list(tokenizer.encode_marked(marked, MANY)) == published.encode(text).ids


def test_tokens_of_the_template_are_control_tokens(tiny) -> None:
    """An added token that is not special is kept apart when the template writes it, else it is
    text."""
    data = tiny("<think>", " ", special=False)
    apart = Tokenizer(data, "... <think> ...")
    assert apart.control.texts == {"<think>"}
    assert 256 not in apart.encode_text("<think>", MANY)
    assert apart.decode(apart.encode_marked(wrap("<think>"), MANY)) == "<think>"
    together = Tokenizer(data, "no such token")
    assert list(together.encode_text("<think>", MANY)) == [256]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_stripping_tokens_strip_as_published(flag: str, tiny) -> None:
    """Control tokens that swallow the spaces beside them still do."""
    spec = json.loads(tiny("<x>"))
    spec["added_tokens"][0][flag] = True
    published = tokenizers.Tokenizer.from_str(json.dumps(spec))
    tokenizer = Tokenizer(json.dumps(spec).encode(), "")
    text = "a  <x>  b"
    expected = published.encode(text).ids
    assert list(tokenizer.encode_marked(tokenizer.control.mark(text), MANY)) == expected
    assert len(expected) == 5


def test_control_tokens_inside_the_models_vocabulary(tiny) -> None:
    """Tokens that stand in the vocabulary, reached by merges or the unknown token, are kept apart
    too."""
    spec = json.loads(tiny())
    spec["pre_tokenizer"]["use_regex"] = False
    vocabulary = spec["model"]["vocab"]
    for index, token in enumerate(["<s", "<s>", "<unk>", "<s>x"]):
        vocabulary[token] = 256 + index
    spec["model"]["merges"] = [["<", "s"], ["<s", ">"], ["<s>", "x"]]
    spec["model"]["unk_token"] = "<unk>"
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] = [
        {"id": 257, "content": "<s>", "special": True, **flags},
        {"id": 258, "content": "<unk>", "special": True, **flags},
    ]
    tokenizer = Tokenizer(json.dumps(spec).encode(), "")
    assert list(tokenizer.encode_text("<s>x", MANY)) == [256, 62, 120]
    assert list(tokenizer.encode_marked(wrap("<s>") + "<s>", MANY)) == [257, 256, 62]
    spec["model"]["merges"] = ["< s", "<s >", "<s> x"]
    assert list(Tokenizer(json.dumps(spec).encode(), "").encode_text("<s>", MANY)) == [256, 62]


def test_unigram_vocabularies() -> None:
    """In a unigram model a control token is a piece like any other, and is kept apart all the
    same."""
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["<", -5.0], ["s", -5.0], [">", -5.0], ["\u2581", -5.0]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True, **flags},
            {"id": 1, "content": "<s>", "special": True, **flags},
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    tokenizer = Tokenizer(json.dumps(spec).encode(), "")
    assert list(tokenizer.encode_text("<s>", MANY)) == [2, 3, 4]
    assert list(tokenizer.encode_marked(wrap("<s>"), MANY)) == [1]
    # The unknown token is no way in: any text that the model cannot spell gives it.
    assert list(tokenizer.encode_text("\u00e4", MANY)) == [0]


def test_too_many_tokens(qwen2: Tokenizer) -> None:
    """The limit itself passes; beyond it the reason has the count, or comes before any
    counting."""
    assert len(qwen2.encode_text("a b c", 3)) == 3
    for text, reason in (("a b c d", "has 4 tokens"), ("x" * 100_000, "has more than 3 tokens")):
        with pytest.raises(RequestRejectedError, match=reason) as caught:
            qwen2.encode_text(text, 3)
        assert caught.value.code is FailureCode.TOO_LONG
    assert list(qwen2.encode_text("", 0)) == []


def test_of_a_text_that_is_far_too_long_only_its_beginning_is_encoded(
    qwen2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes would take the only worker seconds, and end it as one that hangs; control: a text that fits is encoded
    whole, after its pieces, and refused when it has one token too many."""
    sizes: list[int] = []
    encode = qwen2._encoded

    def counted(text: str, *, add_special_tokens: bool) -> list[int]:
        sizes.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(qwen2, "_encoded", counted)
    with pytest.raises(RequestRejectedError) as caught:
        qwen2.encode_text("x#" * 1_000_000, 32_768)
    assert caught.value.code is FailureCode.TOO_LONG
    assert sizes == [module.PIECE_CHARS]
    sizes.clear()
    long = "the cat sat on the mat and then " * 4_000
    count = len(encode(long, add_special_tokens=True))
    assert len(qwen2.encode_text(long, count)) == count
    assert sizes == [len(long)], "not a long text for so many tokens"
    monkeypatch.setattr(module, "LONG_TEXT", 1)
    assert len(qwen2.encode_text(long, count)) == count
    assert sizes[1:] == [module.PIECE_CHARS, len(long) - module.PIECE_CHARS, len(long)]
    with pytest.raises(RequestRejectedError, match=f"has {count} tokens"):
        qwen2.encode_text(long, count - 1)


@functools.cache
def mini_tokenizer() -> Tokenizer:
    """The embedded model's."""
    return Tokenizer((embedded_model() / "tokenizer.json").read_bytes(), "")


@settings(max_examples=60)
@given(st.text(max_size=400), st.integers(1, 40))
def test_no_text_that_fits_is_far_too_long(text: str, times: int) -> None:
    """However a text is cut into pieces: whoever has no more tokens than there may be is never refused for the pieces'
    sake."""
    tokenizer = mini_tokenizer()
    text *= times
    count = len(tokenizer._encoded(text, add_special_tokens=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARS", 64)
        patch.setattr(module, "LONG_TEXT", 0)
        assert not tokenizer._is_far_too_long(text, count)


def test_text_that_the_tokenizer_does_not_take(tiny) -> None:
    """A failure inside the library refuses the request."""
    spec = json.loads(tiny())
    del spec["model"]["vocab"]["z"]
    spec["model"]["unk_token"] = "gone"
    tokenizer = Tokenizer(json.dumps(spec).encode(), "")
    with pytest.raises(RequestRejectedError, match="cannot take this text") as caught:
        tokenizer.encode_text("z", MANY)
    assert caught.value.code is FailureCode.INVALID


def test_ids_outside_the_vocabulary_decode_to_nothing(qwen2: Tokenizer) -> None:
    """Padding rows of the logits and special tokens give no text; impossible numbers are
    refused."""
    assert qwen2.decode([9707, 999_999, 151_645, 1879]) == "Hello world"
    with pytest.raises(RequestRejectedError, match="cannot decode"):
        qwen2.decode([-1])


def test_words_of_one_tenant_do_not_speed_up_another(qwen2: Tokenizer) -> None:
    """A word seen before costs as much as a new one: the library's cache, which outlives
    requests, is off. The control is the published tokenizer, which encodes the same text much
    faster."""
    published = tokenizers.Tokenizer.from_str(qwen2._tokenizer.to_str())
    text = ("a" + " " * 128) * 3000

    def seconds(tokenizer: tokenizers.Tokenizer) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(qwen2._tokenizer) > 1.4 * seconds(published)


def broken(tiny, **changes: object) -> bytes:
    """A tokenizer file with something else in one place."""
    return json.dumps(json.loads(tiny("<x>")) | changes).encode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": None}, "describes no model"),
        ({"model": {}}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "no token|does not have the id"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [7]}}, "vocabulary is malformed"),
        ({"model": {"type": "Unigram", "vocab": [7]}}, "vocabulary is malformed"),
        ({"added_tokens": 7}, "added token is malformed"),
        ({"added_tokens": [7]}, "added token is malformed"),
        ({"added_tokens": [{"id": "1", "content": "x", "special": True}]}, "added token is malformed"),
        ({"added_tokens": [{"id": 1, "content": "x", "special": 1}]}, "added token is malformed"),
        ({"added_tokens": [{"id": MAX_VOCABULARY, "content": "x", "special": True}]}, "added token is malformed"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "cannot be used"),
        (
            {
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1, "ab": 2},
                    "merges": ["a b"],
                    "continuing_subword_prefix": "longer than what is merged",
                },
                "added_tokens": [],
            },
            "cannot be used: (range|begin|start)",
        ),
        ({"comment": "\ufdd0"}, "reserved"),
    ],
)
def test_malformed_files(changes: dict, reason: str, tiny) -> None:
    """A file that is no tokenizer, or claims what is not so, is an error of the model."""
    with pytest.raises(ModelLoadError, match=reason):
        Tokenizer(broken(tiny, **changes), "")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "describes no model"),
        (b'{"model": {}, "x": "\\uFDD1"}', "reserved"),
    ],
)
def test_malformed_json(data: bytes, reason: str) -> None:
    """So is what is no JSON object, or hides a mark in an escape."""
    with pytest.raises(ModelLoadError, match=reason):
        Tokenizer(data, "")


def test_sizes_are_bounded(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, the number of tokens and the highest id each have a bound of their own."""
    gap = json.loads(tiny())
    gap["model"]["vocab"]["ab"] = 400
    module = "engine.text.tokenizer"
    for name, bound, data, reason in (
        ("MAX_TOKENIZER_BYTES", 1000, tiny(), "larger than 1000 bytes"),
        ("MAX_VOCABULARY", 255, tiny(), "no token or more than 255"),
        ("MAX_VOCABULARY", 400, json.dumps(gap).encode(), "an id beyond 400"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.{name}", bound)
            with pytest.raises(ModelLoadError, match=reason):
                Tokenizer(data, "")


def test_the_last_check_refuses_a_control_id_out_of_place(tiny, monkeypatch) -> None:
    """Were text to give a control id by some way not thought of, the request would be refused."""
    tokenizer = Tokenizer(tiny("<x>"), "")
    assert list(tokenizer.encode_text("a", MANY)) == [97]
    monkeypatch.setattr(tokenizer, "_control_ids", frozenset([97]))
    with pytest.raises(RequestRejectedError, match="cannot be kept literal") as caught:
        tokenizer.encode_text("a", MANY)
    assert caught.value.code is FailureCode.INVALID


def test_a_wrong_id_is_noticed(tiny) -> None:
    """An added token whose id in the file is not the one it gets is refused: everything hangs on
    ids."""
    spec = json.loads(tiny("<x>"))
    spec["added_tokens"][0]["id"] = 300
    with pytest.raises(ModelLoadError, match="does not have the id 300"):
        Tokenizer(json.dumps(spec).encode(), "")


def test_control_tokens_that_cannot_be_kept_apart(tiny) -> None:
    """Where the tokenizer drops the marks before it looks for tokens, the model is refused."""
    spec = json.loads(tiny("<x>"))
    spec["added_tokens"][0]["normalized"] = True
    spec["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[\ufdd2\U0001f000]"}, "content": ""}
    assert Tokenizer(json.dumps(spec).encode(), "").control.texts == {"<x>"}
    spec["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^<x>]"}, "content": ""}
    with pytest.raises(ModelLoadError, match="cannot be told from the same text"):
        Tokenizer(json.dumps(spec).encode(), "")


def test_truncation_padding_and_dropout_are_off(tiny) -> None:
    """Settings of training do not cut, fill or vary a prompt."""
    spec = json.loads(tiny())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    spec["model"]["dropout"] = 0.5
    tokenizer = Tokenizer(json.dumps(spec).encode(), "")
    assert len(tokenizer.encode_text("abcde", MANY)) == 5


pieces = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<", "|", ">", "a", " ", "\n", "\u00e4"]),
    max_size=10,
)


@settings(deadline=None, max_examples=200)
@given(pieces.map("".join), pieces.map("".join))
def test_ids_of_any_mixture(mini_worker, before: str, after: str) -> None:
    """Around one genuine token, hostile text never gives another, and all of it decodes back."""
    tokenizer = mini_worker._tokenizer
    start = tokenizer._tokenizer.token_to_id(wrap("<|im_start|>"))
    ids = list(tokenizer.encode_marked(before + wrap("<|im_start|>") + after, MANY))
    assert [token for token in ids if token in tokenizer.special_ids] == [start]
    at = ids.index(start)
    assert tokenizer.decode(ids[:at]) == before
    assert tokenizer.decode(ids[at:]) == after
