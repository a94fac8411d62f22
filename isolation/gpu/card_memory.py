"""Memory of the machine's NVIDIA cards, asked from NVML by a program of its own (``isolation.gpu.nvml_program``)."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from isolation.errors import ProcessError
from isolation.gpu.gpu_facts import MANAGEMENT, CardMemory, GpuFacts
from isolation.host.process import Child, start

PROGRAM = Path(__file__).with_name("nvml_program.py")

TIMEOUT_S = 30.0
"""Seconds for the answer: a card without persistence takes some to be initialised."""

MAX_BYTES = 1 << 44
"""Largest memory of one card that is believed: 16 TiB."""

MAX_ANSWER_BYTES = 1 << 16
"""Bytes of the answer that are read: some hundred for each card."""

_left: list[Child] = []
"""The program that hung last."""

_UUID = re.compile(r"[A-Za-z0-9-]{1,95}")


def with_memory(facts: GpuFacts) -> GpuFacts:
    """Return the facts with the memory of the cards; with the reason where NVML does not tell it."""
    if not facts.driver or not facts.cards:
        return facts
    library = facts.library(MANAGEMENT)
    if library is None:
        return replace(facts, memory_problem=f"there is no {MANAGEMENT}.{facts.driver}")
    try:
        memory = parse_memory(_ask([sys.executable, str(PROGRAM), str(library.path)]))
        return replace(facts, memory=memory, mig=tuple(sorted({*facts.mig, *(one.index for one in memory if one.mig)})))
    except (OSError, ProcessError, ValueError) as error:
        return replace(facts, memory_problem=str(error))


def _ask(argv: list[str]) -> str:
    """What the program prints. One that hangs in the driver, where no signal reaches it, is left behind, and none is
    started beside it.

    Raises:
        OSError, ProcessError: it cannot be started, does not end, or fails.
    """
    if _left and _left[-1].poll() is None:
        raise ProcessError(argv, None, problem="the last one still hangs in the driver")
    _left.clear()
    with tempfile.TemporaryFile() as output:
        child = start(argv, stdio=output.fileno())
        status = child.wait(TIMEOUT_S)
        if status is None:
            child.kill()
            _left.append(child)
            raise ProcessError(argv, None, problem=f"took longer than {TIMEOUT_S:g} s")
        output.seek(0)
        said = output.read(MAX_ANSWER_BYTES).decode(errors="replace")
    if status != 0:
        raise ProcessError(argv, status, said)
    return said


def parse_memory(text: str) -> tuple[CardMemory, ...]:
    """Parse the line of ``isolation.gpu.nvml_program``. Pure.

    Raises:
        ValueError: it is none.
    """
    try:
        found = json.loads(text)
        cards = tuple(CardMemory(one["index"], one["uuid"], one["total"], one["free"], one["mig"]) for one in found)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"NVML's program printed no list of cards: {text[:100]!r}") from error
    for card in cards:
        numbers = all(type(one) is int for one in (card.index, card.total, card.free)) and type(card.mig) is bool
        if not numbers or not 0 <= card.free <= card.total <= MAX_BYTES or not _UUID.fullmatch(str(card.uuid)):
            raise ValueError(f"NVML tells an impossible card: {card}")
    return tuple(sorted(cards, key=lambda card: card.index))
