"""Text that is put together token by token is the text of all tokens at once, and the library's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers

from appliance.gateway.request.assembler import Assembler
from appliance.gateway.sandboxes.text_link import VocabularyTable
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary

SEQUENCES = 2_500
"""Of each of the four tokenizers: ten thousand in all."""

FEW = 100

SURROGATE = b"\xed\xa0\x80\xed\xb0\x80"
"""A pair of surrogates in what is no UTF-8."""

TOKENIZERS = ["qwen2", "minimind", "stories", "mini"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def pair(request: pytest.FixtureRequest, root: Path) -> tuple[str, VocabularyTable, tokenizers.Tokenizer]:
    """A tokenizer's name, its table as the text sandbox exports it, and the library's own object."""
    if request.param == "mini":
        path = root / "images" / "mini" / "athanor-mini" / "tokenizer.json"
    else:
        data: Path = request.getfixturevalue("shared_data")
        path = {
            "qwen2": data / "tokenizers" / "qwen2.tokenizer.json",
            "minimind": data / "tokenizers" / "minimind.tokenizer.json",
            "stories": data / "models" / "stories260K-hf" / "tokenizer.json",
        }[request.param]
    text = path.read_bytes()
    vocabulary = Vocabulary(Tokenizer(text, ""))
    assert vocabulary.exact
    table = VocabularyTable(tuple(vocabulary.entries), vocabulary.strip_leading_space)
    return request.param, table, tokenizers.Tokenizer.from_str(text.decode())


def sequences(table: VocabularyTable, count: int) -> list[list[int]]:
    """Random ids; a third of them mostly tokens of one byte, some with surrogates spelt in bytes."""
    generator = random.Random(count)
    bytes_of = {entry: token for token, entry in enumerate(table.entries) if len(entry) == 1}
    result = []
    for number in range(count):
        length = generator.randint(1, 60)
        ids = [generator.randrange(len(table.entries)) for _ in range(length)]
        if number % 3 == 0:
            ids = [generator.choice(list(bytes_of.values())) if generator.random() < 0.8 else one for one in ids]
        if number % 9 == 0:
            ids[length // 2 : length // 2] = [bytes_of[bytes([byte])] for byte in SURROGATE]
        result.append(ids)
    return result


def assemble(table: VocabularyTable, ids: list[int], sizes: random.Random | None) -> str:
    """The text of ids pushed a few at a time, or all at once."""
    assembler, text, start = Assembler(table), "", 0
    while start < len(ids):
        stop = start + (len(ids) if sizes is None else sizes.randint(1, 4))
        text += assembler.push(ids[start:stop])
        start = stop
    return text + assembler.finish()


def compare(pair: tuple[str, VocabularyTable, tokenizers.Tokenizer], count: int) -> None:
    """Incremental against whole against the library. A run of fallback bytes that is no UTF-8 as a whole becomes
    nothing but replacements in the library, its valid characters too, which no stream can know ahead: there ours keeps
    them, and only texts without replacements are compared."""
    name, table, library = pair
    sizes, broken = random.Random(1), 0
    for ids in sequences(table, count):
        text = assemble(table, ids, sizes)
        assert text == assemble(table, ids, None)
        expected = library.decode(ids, skip_special_tokens=True)
        if name == "stories" and "\ufffd" in expected:
            broken += 1
            assert "\ufffd" in text
        else:
            assert text == expected
    assert (broken > 0) == (name == "stories")
    assert broken < count


def test_incremental_text_is_the_whole_text(pair: tuple[str, VocabularyTable, tokenizers.Tokenizer]) -> None:
    """Byte-level vocabularies and byte fallback, incomplete characters and surrogates included."""
    compare(pair, FEW)


@pytest.mark.full
def test_ten_thousand_sequences(pair: tuple[str, VocabularyTable, tokenizers.Tokenizer]) -> None:
    """The same at the full count."""
    compare(pair, SEQUENCES)
