"""Id-to-bytes table: the bytes of each token, so that the host can decode by concatenation.

Two spellings cover nearly all published vocabularies. *Byte-level* (GPT-2, Radford et al. 2019; ``bytes_to_unicode`` in
its ``encoder.py``): each byte of the text is one printable character of the token, so a token may hold part of a UTF-8
character. *Metaspace* (SentencePiece, Kudo and Richardson 2018, arXiv 1808.06226): a lower block represents a space,
and with byte fallback tokens ``<0x00>`` to ``<0xFF>`` represent single bytes; a space added before the first word on
encoding is removed from the decoded text.

The decoder in tokenizer.json determines the spelling. Whether the table is *exact*, that is, whether concatenating its
entries gives the output of the tokenizer's own decoder, is tested: every id in long random sequences, then in pairs
while time lasts, then the ids of sample texts.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.text.tokenizer import Tokenizer
from isolation.ipc.messages import MAX_ENTRY_BYTES

CHECK_SECONDS = 0.4
"""Seconds of the self-check after which no more pairs are tested; the pass over all ids before them takes a tenth of a
second for the largest vocabularies."""

_LONG = 64
_SHORT = 2
_SEED = 20_240_229

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

SAMPLES = (
    "Hello, world!",
    "  two  spaces,\ttabs\n\nand lines \r\n",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u05e9\u05dc\u05d5\u05dd",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\U0001f999\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \U00010348",
    "def f(x):\n    return {'a': [1, 2.5e-3]} # 100%\n",
    "<0x41> \u2581 \ufffd",
)
"""Sample texts: scripts, spaces, code, characters beyond the basic plane, and texts that look like tokens."""


class Vocabulary:
    """Id-to-bytes table of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Build and check the table; takes at most half a second for the largest vocabularies."""
        spelling = _Spelling(tokenizer.decoder)
        self.entries = _entries(tokenizer, spelling)
        """Bytes by id; empty for special tokens and unassigned ids."""
        self.strip_leading_space = spelling.strips_leading_space
        """Whether a leading space is removed from decoded text."""
        self.exact = _agrees(tokenizer, spelling, self.entries)
        """Whether concatenating entries equals the tokenizer's own decoding."""

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of a whole text."""
        return _joined(self.entries, ids, self.strip_leading_space)


class _Spelling:
    """Byte spelling of tokens, from the decoder's description in tokenizer.json."""

    def __init__(self, decoder: object) -> None:
        parts = list(_flat(decoder))
        kinds = [part.get("type") for part in parts]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.strips_leading_space = False
        self._replacements: list[tuple[str, str]] = []
        for part in parts:
            pattern = part.get("pattern")
            if part.get("type") == "Metaspace":
                self._replacements.append((str(part.get("replacement", "\u2581")), " "))
                self.strips_leading_space |= part.get("prepend_scheme", "always") != "never"
            elif part.get("type") == "Replace" and isinstance(pattern, dict):
                old = pattern.get("String")
                if isinstance(old, str):
                    self._replacements.append((old, str(part.get("content", ""))))
            elif part.get("type") == "Strip" and part.get("content") == " ":
                self.strips_leading_space |= part.get("start") == 1

    def to_bytes(self, token: str, *, added: bool) -> bytes:
        """Return the bytes of one token; added tokens of a byte-level vocabulary spell themselves."""
        if self.byte_level:
            if added or not _SPELT_BYTES.fullmatch(token):
                return token.encode()
            return token.translate(_BYTES).encode("latin-1")
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None and self.byte_fallback:
            return bytes((int(byte.group(1), 16),))
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _flat(decoder: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders") or []:
            yield from _flat(part)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """Build GPT-2's alphabet: printable Latin-1 bytes map to themselves, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()
_BYTES = {ord(character): byte for character, byte in _BYTE_ALPHABET.items()}
_SPELT_BYTES = re.compile(f"[{re.escape(''.join(_BYTE_ALPHABET))}]*")


def _entries(tokenizer: Tokenizer, spelling: _Spelling) -> tuple[bytes, ...]:
    entries = [b""] * tokenizer.vocab_size
    for token, token_id in tokenizer.tokens().items():
        if token_id in tokenizer.special_ids:
            continue
        entry = spelling.to_bytes(token, added=token_id in tokenizer.added_ids)
        # An entry that no frame can carry stays empty; the check then finds the table not exact.
        entries[token_id] = entry if len(entry) <= MAX_ENTRY_BYTES else b""
    return tuple(entries)


def _joined(entries: Sequence[bytes], ids: Sequence[int], strip_leading_space: bool) -> bytes:
    text = b"".join([entries[token_id] for token_id in ids])
    return text[1:] if strip_leading_space and text.startswith(b" ") else text


def _agrees(tokenizer: Tokenizer, spelling: _Spelling, entries: Sequence[bytes]) -> bool:
    deadline = time.monotonic() + CHECK_SECONDS
    order = list(range(len(entries)))
    # Seeded, so that a file gives one result on every boot; nothing secret depends on it.
    shuffle = random.Random(_SEED).shuffle  # noqa: S311

    def agrees(ids: list[int]) -> bool:
        joined = _joined(entries, ids, spelling.strips_leading_space)
        text = tokenizer.decode(ids)
        return joined.decode("utf-8", "replace") == text or _unclear(joined, spelling)

    shuffle(order)
    samples = [list(tokenizer.encode_text(sample, MAX_ENTRY_BYTES)) for sample in SAMPLES]
    if not all(map(agrees, [*samples, *_sliced(order, _LONG)])):
        return False
    shuffle(order)
    return all(agrees(ids) for ids in _sliced(order, _SHORT) if time.monotonic() < deadline)


def _sliced(ids: list[int], length: int) -> Iterator[list[int]]:
    return (ids[start : start + length] for start in range(0, len(ids), length))


def _unclear(joined: bytes, spelling: _Spelling) -> bool:
    """Return whether the sequence contains incomplete UTF-8: byte fallback shows such a run as one U+FFFD a byte, while
    concatenated bytes keep the readable part, so the two cannot be compared."""
    if not spelling.byte_fallback:
        return False
    try:
        joined.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
