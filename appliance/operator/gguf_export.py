"""Writes a model folder as one GGUF file: ``athanor model convert DIR FILE --to-gguf``.

The folder's files are read by a child (``engine.convert.to_gguf``), locked down before it reads the first byte. The
result appears under its name at once or not at all.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.catalog import SAFETENSORS, find_files
from appliance.common.errors import ConfigError, os_errors_as
from appliance.operator import kernels
from appliance.operator.conversion_child import Progress, run_converter, without_a_word

PROGRAM = "engine.convert.to_gguf"

DTYPES = ("auto", "float32", "float16", "bfloat16", "q8_0")
"""Types of matrices; auto: as they are."""

READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files that the child reads, besides weights."""

MAX_FILES = 100
"""Most weight files: each is a value that the child's filter compares descriptors with."""


@dataclass(frozen=True, slots=True)
class GgufMade:
    """What came of it."""

    file: Path
    architecture: str
    """As the format names it."""
    tensors: int
    types: tuple[str, ...]
    weight_bytes: int
    chat_template: bool


def export(source: Path, file: Path, *, dtype: str, progress: Progress) -> GgufMade:
    """Write a model folder as a file that does not exist yet.

    Raises:
        ConfigError: the source is no model folder, cannot be written exactly as GGUF, or the file cannot be made; the
            message says why.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype of a GGUF file must be one of: {', '.join(DTYPES)}")
    if file.exists():
        raise ConfigError(f"{file} exists; name another file, or remove it first")
    engine, text = find_files(source.resolve().name, source)
    names = [name for name, _ in (*engine, *text) if name.endswith(SAFETENSORS) or name in READ]
    if sum(name.endswith(SAFETENSORS) for name in names) > MAX_FILES:
        raise ConfigError(f"{source} has more than {MAX_FILES} weight files, which is not supported")
    made = file.absolute().with_name(f".{file.name}.converting-{secrets.token_hex(4)}")
    with os_errors_as(f"cannot write {file}"):
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        arguments = [str(source.absolute()), str(made), dtype, str(kernels.installed() or ""), *names]
        done = _parsed(run_converter(PROGRAM, arguments, progress), file)
        with os_errors_as(f"cannot write {file}"):
            # Not a rename: what has come there meanwhile stays.
            os.link(made, file)
    finally:
        made.unlink(missing_ok=True)
    return done


def _parsed(value: Any, file: Path) -> GgufMade:
    try:
        return GgufMade(
            file,
            architecture=str(value["architecture"])[:64],
            tensors=int(value["tensors"]),
            types=tuple(str(one)[:16] for one in value["types"][:16]),
            weight_bytes=int(value["bytes"]),
            chat_template=bool(value["chat_template"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise without_a_word() from error
