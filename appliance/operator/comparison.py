"""What a model folder costs beside the one that it was made from: ``athanor model compare DIR DIR --text FILE``.

Models and text are read by a child (``engine.convert.compare``), locked down before it reads the first byte; the host
gets a few numbers, as hostile as the files.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.catalog import find_files
from appliance.common.errors import ConfigError
from appliance.common.model_memory import machine_memory
from appliance.operator.conversion_child import Progress, run_converter, without_a_word

PROGRAM = "engine.convert.compare"

DTYPES = ("float32", "bfloat16")
"""Dtypes in which both models compute. bfloat16 takes half of the memory, and its own roundings."""

DEFAULT_TOKENS = 4_096
MAX_TOKENS = 1 << 16
"""Most tokens of a text; each costs as much as a prompt's."""

MEMORY_SHARE = 0.8
"""Part of the available memory that one model's weights may take: the other model's log-probabilities and the work
need the rest."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on one text."""

    folder: Path
    """Folder of the model that the other one was made from."""
    other: Path
    tokens: int
    """Tokens that were scored."""
    window: int
    """Tokens that were computed together."""
    perplexity: float
    other_perplexity: float
    divergence: float
    """Mean of Kullback and Leibler's divergence of a token's distribution from the first model's, in nats."""
    divergence_p99: float
    """One token in a hundred diverges further."""
    agreement: float
    """Share of tokens after which both have the same likeliest next one."""


def compare(folder: Path, other: Path, text: Path, *, tokens: int, dtype: str, progress: Progress) -> Comparison:
    """Compare two model folders on a text.

    Args:
        folder: of the model that the other one was made from.
        other: of that one.
        text: file in UTF-8.
        tokens: most tokens of it.
        dtype: of ``DTYPES``.
        progress: called with tokens done and tokens in all, of both models.

    Raises:
        ConfigError: a folder is none of a model, a file cannot be read, a model does not fit into memory, or the two
            cannot be compared; the message says why.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype must be one of: {', '.join(DTYPES)}")
    if not text.is_file():
        raise ConfigError(f"{text} is not a file")
    for one in (folder, other):
        find_files(one.resolve().name, one)
    free = int(machine_memory().available * MEMORY_SHARE)
    places = [str(one.absolute()) for one in (folder, other, text)]
    numbers = [str(tokens), dtype, str(len(os.sched_getaffinity(0))), str(free)]
    return _parsed(run_converter(PROGRAM, [*places, *numbers], progress), folder, other)


def _parsed(value: Any, folder: Path, other: Path) -> Comparison:
    names = ("perplexity", "other_perplexity", "divergence", "divergence_p99", "agreement")
    try:
        numbers = {name: float(value[name]) for name in names}
        if not all(math.isfinite(one) for one in numbers.values()):
            raise ConfigError("a model gives a number that is not finite: it cannot be used")
        return Comparison(folder, other, int(value["tokens"]), int(value["window"]), **numbers)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise without_a_word() from error
