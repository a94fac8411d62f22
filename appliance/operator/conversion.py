"""Converts a GGUF file into a model folder: ``athanor model convert SRC.gguf DIR``.

The file comes from strangers, so nothing here looks into it: a child does (``engine.convert``), locked down before it
reads the first byte. The result appears under its name at once or not at all; a conversion that fails or is broken off
leaves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.errors import ConfigError
from appliance.operator.conversion_child import Progress, new_folder, run_converter, without_a_word

PROGRAM = "engine.convert"

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Dtypes of the result."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What came of it."""

    folder: Path
    architecture: str
    tensors: int
    types: tuple[str, ...]
    """Types of numbers in the source."""
    dtype: str
    weight_bytes: int
    """Bytes of the converted weights."""
    chat_template: bool


def convert(source: Path, folder: Path, *, dtype: str, progress: Progress) -> Converted:
    """Convert a file into a folder that does not exist yet, or is empty.

    Raises:
        ConfigError: the file is not there or cannot be converted, or the folder cannot be made; the message says why.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype must be one of: {', '.join(DTYPES)}")
    if not source.is_file():
        raise ConfigError(f"{source} is not a file")
    with new_folder(folder) as made:
        said = run_converter(PROGRAM, [str(source.absolute()), str(made), dtype], progress)
        done = _parsed(said, folder)
    return done


def _parsed(value: Any, folder: Path) -> Converted:
    try:
        return Converted(
            folder,
            architecture=str(value["architecture"])[:64],
            tensors=int(value["tensors"]),
            types=tuple(str(one)[:16] for one in value["types"][:64]),
            dtype=str(value["dtype"])[:16],
            weight_bytes=int(value["bytes"]),
            chat_template=bool(value["chat_template"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        raise without_a_word() from error
