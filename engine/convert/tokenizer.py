"""Tokenizer of a GGUF file as ``tokenizer.json``, ``tokenizer_config.json`` and stop ids.

Two kinds are converted, each exactly or not at all:

* "gpt2": byte-level BPE with its merges in the file. The file only names its pre-tokenizer (``tokenizer.ggml.pre``);
    ``engine.convert.pretokenizers`` has the supported names.
* "llama": SentencePiece BPE, which joins the pair whose piece has the best score. That equals BPE whose merges are all
    pairs of pieces that form a piece, best score first, as in the published conversions. Scores must differ:
    SentencePiece breaks ties by position, which a list of merges cannot express.

Anything else (unigram, WordPiece) is refused. Control tokens (type 3) become special added tokens, user-defined tokens
(type 4) plain added ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.convert.pretokenizers import PRETOKENIZERS, Pretokenizer
from engine.convert.values import Values
from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import show_name

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types."""

MAX_TOKENS = 1 << 20
"""Largest vocabulary; the limit of the text sandbox."""

MAX_TOKEN_LENGTH = 512
"""Longest token in characters; every split position is tried. Published ones reach 256."""

SPACE = "\u2581"
"""SentencePiece's marker of a space."""

TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an output whatever the file says: the names used by chat models."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class TextParts:
    """Files and ids for the text sandbox and the stop test."""

    tokenizer: Json
    config: Json
    stop_ids: tuple[int, ...]
    begin_id: int | None


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens of a file with their types."""

    tokens: Sequence[str]
    kinds: Sequence[int]

    def of_kind(self, kind: int) -> list[tuple[int, str]]:
        """Return ids and texts of the tokens of one type."""
        return [(place, self.tokens[place]) for place, one in enumerate(self.kinds) if one == kind]


def read_text(values: Values, vocabulary_rows: int) -> TextParts:
    """Convert the tokenizer.

    Args:
        values: values of the header.
        vocabulary_rows: rows of the embedding; at least as many as tokens.

    Raises:
        ModelLoadError: the kind is not supported, or the vocabulary is malformed.
    """
    kind = values.text("tokenizer.ggml.model", "")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"{values.name}: tokenizer {show_name(kind)} is not converted; supported are: gpt2, llama")
    vocabulary = _vocabulary(values, vocabulary_rows)
    added = [(CONTROL, True), (USER_DEFINED, False)]
    entries = sorted((place, text, special) for kind_, special in added for place, text in vocabulary.of_kind(kind_))
    spec = _byte_level(values, vocabulary) if kind == "gpt2" else _sentencepiece(values, vocabulary)
    unknown = vocabulary.of_kind(UNKNOWN)
    if kind == "llama":
        entries = sorted([*entries, *((place, text, True) for place, text in unknown)])
    begin = _token_id(values, "bos_token_id", vocabulary)
    end = _token_id(values, "eos_token_id", vocabulary)
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(place, text, special) for place, text, special in entries],
        **spec,
        "post_processor": _framing(values, kind, vocabulary, begin, end) or spec.get("post_processor"),
    }
    stops = {one for name in ("eot", "eom") if (one := _token_id(values, f"{name}_token_id", vocabulary)) is not None}
    stops |= {place for place, text in vocabulary.of_kind(CONTROL) if text in TURN_ENDS}
    stops |= set() if end is None else {end}
    return TextParts(spec, _config(values, vocabulary, begin, end), tuple(sorted(stops)), begin)


def _vocabulary(values: Values, rows: int) -> GgufVocabulary:
    tokens = values.texts("tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= min(MAX_TOKENS, rows):
        raise ModelLoadError(f"{values.name}: {len(tokens)} tokens for an embedding of {rows} rows")
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError(f"{values.name}: tokenizer.ggml.tokens holds a token twice")
    if max(map(len, tokens)) > MAX_TOKEN_LENGTH:
        raise ModelLoadError(
            f"{values.name}: tokenizer.ggml.tokens holds a token of over {MAX_TOKEN_LENGTH} characters"
        )
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in values:
        kinds = [int(one) for one in values.numbers("tokenizer.ggml.token_type", len(tokens))]
        if not all(NORMAL <= one <= BYTE for one in kinds):
            raise ModelLoadError(f"{values.name}: tokenizer.ggml.token_type holds an unknown type")
    return GgufVocabulary(tokens, kinds)


def _byte_level(values: Values, vocabulary: GgufVocabulary) -> Json:
    name = values.text("tokenizer.ggml.pre", "")
    if name not in PRETOKENIZERS:
        raise ModelLoadError(
            f"{values.name}: tokenizer.ggml.pre {show_name(name)} is not known; "
            f"supported are: {', '.join(sorted(PRETOKENIZERS))}"
        )
    known = set(vocabulary.tokens)
    merges = []
    for merge in values.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or {left, right, left + right} - known:
            raise ModelLoadError(f"{values.name}: tokenizer.ggml.merges joins what is no token: {show_name(merge)}")
        merges.append([left, right])
    return _bpe(vocabulary, merges, PRETOKENIZERS[name])


def _bpe(vocabulary: GgufVocabulary, merges: list[list[str]], cut: Pretokenizer) -> Json:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pre: Json = {**byte_level, "use_regex": True}
    if cut.pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": cut.pattern}, "behavior": "Isolated", "invert": False}
        pre = {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]}
    return {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": pre,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            **_MODEL,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.whole_words,
            "vocab": {text: place for place, text in enumerate(vocabulary.tokens)},
            "merges": merges,
        },
    }


_MODEL: Json = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
}


def _sentencepiece(values: Values, vocabulary: GgufVocabulary) -> Json:
    prefix = values.boolean("tokenizer.ggml.add_space_prefix", default=True)
    if values.boolean("tokenizer.ggml.remove_extra_whitespaces", default=False):
        raise ModelLoadError(f"{values.name}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    unknown = vocabulary.of_kind(UNKNOWN)
    if len(unknown) > 1:
        raise ModelLoadError(f"{values.name}: more than one token is the unknown one")
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model: Json = {
        **_MODEL,
        "unk_token": unknown[0][1] if unknown else None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {text: place for place, text in enumerate(vocabulary.tokens)},
        "merges": _merges(values, vocabulary),
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(values: Values, vocabulary: GgufVocabulary) -> list[list[str]]:
    """Return every pair of pieces that forms a piece: best score first, then the shorter left part."""
    scores = values.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    pieces = {text: scores[place] for place, text in vocabulary.of_kind(NORMAL)}
    found: list[tuple[float, list[list[str]]]] = []
    for text, score in pieces.items():
        pairs = [
            [text[:cut], text[cut:]] for cut in range(1, len(text)) if text[:cut] in pieces and text[cut:] in pieces
        ]
        if pairs:
            found.append((score, pairs))
    if len({score for score, _ in found}) != len(found):
        raise ModelLoadError(f"{values.name}: two pieces have one score: this vocabulary cannot be converted exactly")
    found.sort(key=lambda one: -one[0])
    return [pair for _, pairs in found for pair in pairs]


def _framing(values: Values, kind: str, vocabulary: GgufVocabulary, begin: int | None, end: int | None) -> Json | None:
    """Return the tokens added around a text: beginning and end, where the file asks for them."""
    bos_default = kind == "llama" or values.text("tokenizer.ggml.pre", "") == "llama-bpe"
    with_begin = values.boolean("tokenizer.ggml.add_bos_token", default=bos_default) and begin is not None
    with_end = values.boolean("tokenizer.ggml.add_eos_token", default=False) and end is not None
    if not with_begin and not with_end:
        return None
    ids = [one for one, wanted in ((begin, with_begin), (end, with_end)) if wanted and one is not None]
    tokens = {vocabulary.tokens[one]: one for one in ids}
    before = [_special(vocabulary, begin)] if with_begin and begin is not None else []
    after = [_special(vocabulary, end)] if with_end and end is not None else []
    return {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [one], "tokens": [text]} for text, one in tokens.items()},
    }


def _special(vocabulary: GgufVocabulary, token_id: int) -> Json:
    return {"SpecialToken": {"id": vocabulary.tokens[token_id], "type_id": 0}}


def _config(values: Values, vocabulary: GgufVocabulary, begin: int | None, end: int | None) -> Json:
    unknown = _token_id(values, "unknown_token_id", vocabulary)
    named: Mapping[str, int | None] = {"bos_token": begin, "eos_token": end, "unk_token": unknown}
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: vocabulary.tokens[one] for name, one in named.items() if one is not None}
    if "tokenizer.chat_template" in values:
        config["chat_template"] = values.text("tokenizer.chat_template")
    return config


def _token_id(values: Values, name: str, vocabulary: GgufVocabulary) -> int | None:
    key = f"tokenizer.ggml.{name}"
    return values.integer(key, 0, len(vocabulary.tokens) - 1) if key in values else None


def _added(place: int, text: str, special: bool) -> Json:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": place, "content": text, **flags, "special": special}
