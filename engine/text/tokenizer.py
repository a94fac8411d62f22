"""Published tokenizer.json with one change: control tokens are recognised only in their marks.

The file is read, and every control token is renamed to its marked form (``engine.text.marks``): in the list of added
tokens, in the model's own vocabulary, in the name of the unknown token. Ids, merges, normalisation and everything else
are unchanged. So one pass over a marked text gives the ids that the published tokenizer gives for that text with its
control tokens, and a control token spelt by a user is encoded like any other text. That no text without marks gives a
control id is checked while loading, and again on every result.

Control tokens are the added tokens that the file declares special, and those that stand literally in the chat template
(models declare some of theirs, ``<think>`` for one, as not special).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
import tokenizers.models

from engine.errors import ModelLoadError, RequestRejectedError
from engine.text.extent import most_characters
from engine.text.marks import OPEN, ControlTokens, holds_mark, wrap
from isolation.ipc.messages import FailureCode

MAX_TOKENIZER_BYTES = 128 << 20
"""Largest tokenizer.json in bytes; the largest published ones have 35 MiB."""

MAX_VOCABULARY = 1 << 20
"""Largest number of ids; the largest published vocabularies have 262,144."""

WORD_CACHE_ENTRIES = 0
"""Size of the tokenizer's word cache. Disabled: one tenant's words would measurably speed up another's prompt. Without
the cache encoding takes 1.4 times as long."""

PIECE_CHARS = 1 << 16
"""Characters of a long text encoded at a time to detect that it is far too long; some 60 ms."""

PIECE_SLACK = 16
"""Additional tokens that a piece may have because it was cut out of its text."""

LONG_TEXT = 4
"""Characters for each permitted token above which a text counts as long; prose has about as many."""

MOST_AT_ONCE = 2 << 20
"""Largest number of characters encoded at once without the check: megabytes take seconds, which delays other
prompts."""

_ESCAPED_MARK = re.compile(r"\\ufdd[01]", re.IGNORECASE)


class Tokenizer:
    """Converts text to ids and back for one model."""

    def __init__(self, data: bytes, template_literals: str) -> None:
        """Load the tokenizer; ``data`` is the content of tokenizer.json, ``template_literals`` the text in the chat
        template (``engine.text.jinja.literals``).

        Raises:
            ModelLoadError: it is no tokenizer, too large, or its control tokens cannot be separated.
        """
        spec = _parsed(data)
        added = _added_tokens(spec)
        self.control = ControlTokens(
            text
            for text, token in added.items()
            if token["special"] or (text in template_literals and not text.isspace())
        )
        self.special_ids = frozenset(token["id"] for token in added.values() if token["special"])
        self.added_ids = frozenset(token["id"] for token in added.values())
        try:
            unknown = _unknown_token(spec)
            _rename(spec, self.control)
        except (TypeError, LookupError, AttributeError, ValueError) as error:
            raise ModelLoadError("tokenizer.json: the model's vocabulary is malformed") from error
        self.decoder: object = spec.get("decoder")
        self._tokenizer = _built(spec)
        self._check_ids(added)
        # The unknown token is no control token: any tokenizer may produce it for any text.
        self._control_ids = frozenset(added[text]["id"] for text in self.control.texts if text != unknown)
        self._framing = self._control_count(self._encoded("", add_special_tokens=True))
        self._check_apart()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._most_characters = most_characters(spec, max(map(len, vocabulary)))
        self.vocab_size = 1 + max(vocabulary.values())
        if self.vocab_size > MAX_VOCABULARY:
            raise ModelLoadError(f"tokenizer.json has an id beyond {MAX_VOCABULARY}")

    def encode_text(self, text: str, max_tokens: int, *, framed: bool = True) -> array[int]:
        """Encode plain text; ``framed``: with what the tokenizer's own post-processor adds (BOS, EOS).

        Raises:
            RequestRejectedError: ``TOO_LONG`` beyond ``max_tokens``, ``INVALID`` when the tokenizer cannot encode the
                text.
        """
        return self._checked(text, max_tokens, add_special_tokens=framed, control=self._framing if framed else 0)

    def encode_marked(self, text: str, max_tokens: int) -> array[int]:
        """Encode a rendered conversation; nothing is added to the template's output.

        Raises:
            RequestRejectedError: as ``encode_text``.
        """
        marked = text.count(OPEN)
        return self._checked(text, max_tokens, add_special_tokens=False, control=marked)

    def fragment(self, text: str) -> list[int]:
        """Encode text from the middle of an answer; nothing is added around it.

        Raises:
            RequestRejectedError: ``INVALID`` when the tokenizer cannot encode the text.
        """
        return self._encoded(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids without special tokens; ids outside the vocabulary give nothing."""
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        except Exception as error:
            raise RequestRejectedError(FailureCode.INVALID, "the tokenizer cannot decode these ids") from error
        if holds_mark(text):
            for token in self.control.texts:
                text = text.replace(wrap(token), token)
        return text

    def tokens(self) -> dict[str, int]:
        """Return ids by token text as spelt in the model's vocabulary; added tokens in clear."""
        names = {wrap(text): text for text in self.control.texts}
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return {names.get(name, name): token_id for name, token_id in vocabulary.items()}

    def special(self) -> dict[str, int]:
        """Return ids by text of the tokens that the model declares special."""
        return {text: token_id for text, token_id in self.tokens().items() if token_id in self.special_ids}

    def _checked(self, text: str, max_tokens: int, *, add_special_tokens: bool, control: int) -> array[int]:
        # Too long even if every token stood for as much text as one can; avoids the encoding, where there is a bound.
        bound = (max_tokens + 1) * self._most_characters
        if 0 < bound < len(text) or self._is_far_too_long(text, max_tokens):
            raise RequestRejectedError(FailureCode.TOO_LONG, f"the prompt has more than {max_tokens} tokens")
        ids = self._encoded(text, add_special_tokens=add_special_tokens)
        if len(ids) > max_tokens:
            raise RequestRejectedError(
                FailureCode.TOO_LONG, f"the prompt has {len(ids)} tokens; at most {max_tokens} are allowed"
            )
        if self._control_count(ids) > control:
            raise RequestRejectedError(
                FailureCode.INVALID, "the text spells a control token that cannot be kept literal"
            )
        return array("I", ids)

    def _is_far_too_long(self, text: str, max_tokens: int) -> bool:
        """Return whether the first pieces of a long text already exceed the limit of the whole by an eighth; the rest,
        up to megabytes, is then not encoded."""
        if len(text) <= max(PIECE_CHARS, min(LONG_TEXT * max_tokens, MOST_AT_ONCE)):
            return False
        left = max_tokens + max_tokens // 8
        for start in range(0, len(text), PIECE_CHARS):
            piece = self._encoded(text[start : start + PIECE_CHARS], add_special_tokens=False)
            left -= len(piece) - PIECE_SLACK
            if left < 0:
                return True
        return False

    def _control_count(self, ids: list[int]) -> int:
        return sum(map(self._control_ids.__contains__, ids))

    def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:
            raise RequestRejectedError(FailureCode.INVALID, "the tokenizer cannot take this text") from error
        ids: list[int] = encoding.ids
        return ids

    def _check_ids(self, added: Mapping[str, Mapping[str, Any]]) -> None:
        for text, token in added.items():
            name = wrap(text) if text in self.control.texts else text
            if self._tokenizer.token_to_id(name) != token["id"]:
                raise ModelLoadError(
                    f"tokenizer.json: added token {text!r} does not have the id {token['id']} that the file gives it"
                )

    def _check_apart(self) -> None:
        for text in self.control.texts:
            token_id = self._tokenizer.token_to_id(wrap(text))
            marked = self._encoded(wrap(text), add_special_tokens=False)
            bare = self._encoded(text, add_special_tokens=False)
            if token_id not in marked or self._control_count(bare):
                raise ModelLoadError(f"tokenizer.json: control token {text!r} cannot be told from the same text")


def _parsed(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TOKENIZER_BYTES:
        raise ModelLoadError(f"tokenizer.json is larger than {MAX_TOKENIZER_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"tokenizer.json is not JSON: {error}") from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ModelLoadError("tokenizer.json describes no model")
    if holds_mark(text) or _ESCAPED_MARK.search(text):
        raise ModelLoadError("tokenizer.json holds U+FDD0 or U+FDD1, which are reserved")
    # Our own settings: no silent truncation, no padding, no randomness.
    spec["truncation"] = spec["padding"] = None
    if spec["model"].get("dropout") is not None:
        spec["model"]["dropout"] = None
    return spec


def _added_tokens(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = spec.get("added_tokens") or []
    added: dict[str, dict[str, Any]] = {}
    for token in tokens if isinstance(tokens, list) else [None]:
        if (
            not isinstance(token, dict)
            or not isinstance(token.get("content"), str)
            or type(token.get("id")) is not int
            or type(token.get("special")) is not bool
            or not 0 <= token["id"] < MAX_VOCABULARY
        ):
            raise ModelLoadError("tokenizer.json: an added token is malformed")
        added[token["content"]] = dict(token)
    return added


def _unknown_token(spec: Mapping[str, Any]) -> str | None:
    model = spec["model"]
    vocabulary, index = model.get("vocab"), model.get("unk_id")
    if isinstance(vocabulary, list) and type(index) is int and 0 <= index < len(vocabulary):
        return str(vocabulary[index][0])
    name = model.get("unk_token")
    return name if isinstance(name, str) else None


def _rename(spec: dict[str, Any], control: ControlTokens) -> None:
    """Rename every control token to its marked form, in place."""
    names = {text: wrap(text) for text in control.texts}
    for token in spec.get("added_tokens") or []:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed = names.keys() & vocabulary.keys()
        model["vocab"] = {names.get(name, name): value for name, value in vocabulary.items()}
        if renamed and "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not _makes(pair, renamed)]
    elif isinstance(vocabulary, list):
        for entry in vocabulary:
            entry[0] = names.get(entry[0], entry[0])
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _makes(pair: str | list[str], names: Iterable[str]) -> bool:
    """Return whether a merge has a renamed token as part or result."""
    left, right = pair if isinstance(pair, list) else pair.split(" ", 1)
    return left in names or right in names or left + right in names


def _built(spec: Mapping[str, Any]) -> Any:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except BaseException as error:
        # The library is Rust: where it panics over a file, PyO3's error is no ``Exception``.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelLoadError(f"tokenizer.json cannot be used: {error}") from error
    if not 0 < tokenizer.get_vocab_size(with_added_tokens=True) <= MAX_VOCABULARY:
        raise ModelLoadError(f"tokenizer.json has no token or more than {MAX_VOCABULARY}")
    if isinstance(tokenizer.model, tokenizers.models.BPE | tokenizers.models.Unigram):
        tokenizer.model._resize_cache(WORD_CACHE_ENTRIES)
        tokenizer.model._clear_cache()
    return tokenizer
