"""Published request traces to plain values: when a request came, how long it was, what of it was seen before.

Two formats, told apart by the file's first line:

* Azure (``TIMESTAMP,ContextTokens,GeneratedTokens``; AzurePublicDataset, AzureLLMInferenceDataset2023.md): lengths;
* Mooncake (one JSON object a line: ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``), FAST'25:
  each hash id stands for one block of the prompt and for all before it, so two requests that begin with the same ids
  begin with the same text. Published files have 512 tokens a block; a scaled copy has fewer, which the lengths tell.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from appliance.operator.bench.errors import TraceError

MAX_ROWS = 1_000_000
"""Requests of one file; the longest published trace that fits memory as values has about as many."""

MAX_LINE_CHARS = 1 << 20
"""Characters of one line: a million-token prompt in blocks of 16 has fewer."""

MAX_TOKENS = 1 << 24
"""Tokens of one prompt or answer; more is a damaged file."""

BLOCKS = tuple(1 << power for power in range(9, -1, -1))
"""Tokens that one hash id may stand for, the published 512 first."""

AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

_NO_PREFIX = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Seconds after the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One id a block of the prompt; empty when the trace tells lengths only."""
    block_tokens: int = _NO_PREFIX
    """Tokens of one block; 0 when there are no ids."""


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace in the order of their arrival.

    Raises:
        TraceError: unreadable, of neither format, or a line that is damaged; it names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline(MAX_LINE_CHARS)
            file.seek(0)
            lines = _lines(str(path), file)
            if first.lstrip().startswith("{"):
                requests = _mooncake(str(path), lines)
            elif next(csv.reader([first]), []) == AZURE_HEADER:
                requests = _azure(str(path), lines)
            else:
                raise TraceError(
                    str(path), 1, f"is neither a Mooncake object nor the Azure header {','.join(AZURE_HEADER)}"
                )
    except UnicodeDecodeError as error:
        raise TraceError(str(path), 0, "is not UTF-8 text") from error
    except OSError as error:
        raise TraceError(str(path), 0, f"cannot be read: {error.strerror}") from error
    if not requests:
        raise TraceError(str(path), 0, "holds no request")
    requests.sort(key=lambda one: one.at_s)
    start = requests[0].at_s
    return [replace(one, at_s=one.at_s - start) for one in requests]


def scaled(
    requests: Sequence[TraceRequest], *, speed: float = 1.0, prompt_divisor: int = 1, output_divisor: int = 1
) -> list[TraceRequest]:
    """The trace played ``speed`` times faster, with prompts and answers so many times shorter, at least one token each.

    Hash ids keep their meaning: a block becomes shorter by the same factor (at least one token).
    """
    assert speed > 0
    assert prompt_divisor > 0
    assert output_divisor > 0
    result = []
    for one in requests:
        block = max(1, one.block_tokens // prompt_divisor) if one.block_tokens else _NO_PREFIX
        length = max(1, one.prompt_tokens // prompt_divisor)
        if block:
            length = min(length, block * len(one.hash_ids))
        result.append(
            replace(
                one,
                at_s=one.at_s / speed,
                prompt_tokens=length,
                output_tokens=max(1, one.output_tokens // output_divisor),
                hash_ids=one.hash_ids[: -(-length // block)] if block else (),
                block_tokens=block,
            )
        )
    return result


def within(requests: Sequence[TraceRequest], context: int) -> list[TraceRequest]:
    """Requests that fit a context of so many tokens, prompt and answer together."""
    return [one for one in requests if one.prompt_tokens + one.output_tokens <= context]


def _lines(path: str, file: Any) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(MAX_LINE_CHARS):
        number += 1
        if len(line) >= MAX_LINE_CHARS:
            raise TraceError(path, number, f"is longer than {MAX_LINE_CHARS} characters")
        if number > MAX_ROWS + 1:
            raise TraceError(path, number, f"has more than {MAX_ROWS} requests; cut the file")
        if line.strip():
            yield number, line


def _azure(path: str, lines: Iterator[tuple[int, str]]) -> list[TraceRequest]:
    next(lines)
    requests = []
    for number, line in lines:
        fields = next(csv.reader([line]))
        if len(fields) != len(AZURE_HEADER):
            raise TraceError(path, number, f"has {len(fields)} fields, not {len(AZURE_HEADER)}")
        try:
            # Seven digits of a fraction of a second are written, six are read.
            at = datetime.fromisoformat(fields[0][:26]).timestamp()
            prompt, output = int(fields[1]), int(fields[2])
        except ValueError as error:
            raise TraceError(path, number, f"is not a time and two whole numbers: {error}") from error
        _check(path, number, prompt, output)
        requests.append(TraceRequest(at, prompt, max(1, output)))
    return requests


def _mooncake(path: str, lines: Iterator[tuple[int, str]]) -> list[TraceRequest]:
    requests, candidates = [], list(BLOCKS)
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(path, number, f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(path, number, "is not a JSON object")
        at, prompt, output, ids = _fields(path, number, row)
        _check(path, number, prompt, output)
        candidates = [block for block in candidates if -(-prompt // block) == len(ids)]
        if not candidates:
            raise TraceError(
                path, number, f"{len(ids)} hash_ids for {prompt} tokens fit no block size that fits the lines above"
            )
        requests.append(TraceRequest(at / 1_000, prompt, max(1, output), tuple(ids)))
    return [replace(one, block_tokens=candidates[0]) for one in requests]


def _fields(path: str, number: int, row: Mapping[str, Any]) -> tuple[float, int, int, list[int]]:
    at, prompt, output = (row.get(name) for name in ("timestamp", "input_length", "output_length"))
    ids = row.get("hash_ids")
    if type(at) not in (int, float) or not math.isfinite(at) or at < 0:  # type: ignore[arg-type, operator]
        raise TraceError(path, number, "timestamp must be a number of milliseconds from 0")
    if type(prompt) is not int or type(output) is not int:
        raise TraceError(path, number, "input_length and output_length must be whole numbers")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise TraceError(path, number, "hash_ids must be an array of whole numbers")
    return float(at), prompt, output, ids  # type: ignore[arg-type]


def _check(path: str, number: int, prompt: int, output: int) -> None:
    if not 1 <= prompt <= MAX_TOKENS:
        raise TraceError(path, number, f"a prompt of {prompt} tokens is outside 1 to {MAX_TOKENS}")
    if not 0 <= output <= MAX_TOKENS:
        raise TraceError(path, number, f"an answer of {output} tokens is outside 0 to {MAX_TOKENS}")
