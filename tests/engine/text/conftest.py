"""Models for the tests of engine.text: published tokenizers where present, and the project's
own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import TextConfig
from engine.text.files import read_text_files
from engine.text.tokenizer import Tokenizer
from engine.text.worker import TextWorker

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def mini_dir(root: Path) -> Path:
    """The project's own model: byte-level, 2,048 tokens, ChatML."""
    path = root / "images" / "mini" / "athanor-mini"
    if not (path / "tokenizer.json").is_file():
        pytest.skip("the embedded model is not built")
    return path


@pytest.fixture(scope="session")
def stories_dir(shared_data: Path) -> Path:
    """A Llama with a SentencePiece-like vocabulary: metaspace, byte fallback, BOS."""
    return shared_data / "models" / "stories260K-hf"


@pytest.fixture(scope="session")
def minimind_dir(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with 36 added tokens and a template with tools and reasoning."""
    path = tmp_path_factory.mktemp("minimind")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        data = (shared_data / "tokenizers" / f"minimind.{name}").read_bytes()
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="session")
def qwen2(shared_data: Path) -> Tokenizer:
    """The real Qwen2 vocabulary."""
    return Tokenizer((shared_data / "tokenizers" / "qwen2.tokenizer.json").read_bytes(), "")


@pytest.fixture(scope="session")
def load():
    """Loads the text worker of a model directory."""

    def load(path: Path) -> TextWorker:
        return TextWorker(read_text_files(path), TextConfig(model_dir=str(path)))

    return load


@pytest.fixture(scope="session")
def mini(mini_dir: Path, load) -> TextWorker:
    """A worker for the project's own model."""
    return load(mini_dir)


@pytest.fixture(scope="session")
def minimind(minimind_dir: Path, load) -> TextWorker:
    """A worker for minimind."""
    return load(minimind_dir)


@pytest.fixture(scope="session")
def stories(stories_dir: Path, load) -> TextWorker:
    """A worker for stories260K."""
    return load(stories_dir)


@pytest.fixture(scope="session")
def mini_worker(mini: TextWorker) -> TextWorker:
    """The same, under the name that property tests use."""
    return mini


@pytest.fixture(scope="session")
def stories_worker(stories: TextWorker) -> TextWorker:
    """The same, under the name that property tests use."""
    return stories


@pytest.fixture(scope="session")
def tiny():
    """Builds the tokenizer.json of a byte-level model without merges: ids 0..255 are the bytes."""

    def tiny(*added: str, special: bool = True, **changes: object) -> bytes:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        letters = {byte: chr(byte) for byte in printable}
        others = (byte for byte in range(256) if byte not in letters)
        letters |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        spec = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": 256 + index, "content": text, "special": special, **flags} for index, text in enumerate(added)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letters[byte]: byte for byte in range(256)},
                "merges": [],
            },
        }
        return json.dumps(spec | changes).encode()

    return tiny
