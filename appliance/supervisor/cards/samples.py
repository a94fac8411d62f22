"""Lines of ``appliance.supervisor.cards.reader`` as values. Pure."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from appliance.common.cards import FALLEN_XID, FIGURES, MAX_CARDS, STATES, XID_KINDS, xid_kind

MAX_LINE_BYTES = 256 << 10
"""Longest line: sixteen cards with 256 processes each are half of it."""

MAX_NUMBER = 1 << 62
"""Largest figure that is believed: it has to fit into what travels."""


@dataclass(frozen=True, slots=True)
class CardSample:
    """What NVML told of one card."""

    index: int
    uuid: str
    state: str
    """One of ``appliance.common.cards.STATES``."""
    figures: dict[str, int]
    processes: dict[int, int] | None
    """Bytes by process; None where NVML does not list them, or not what they hold."""
    xids: dict[str, int] | None = None
    """Events by kind since the reader's start; None where they are not told."""
    last_xid: int = 0
    """The newest one's number; 0: there was none."""
    fallen: int = 0
    """Events of ``FALLEN_XID`` since the reader's start."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    index: int = Field(ge=0, le=255)
    uuid: str = Field(max_length=96, pattern=r"^[A-Za-z0-9-]*$")
    state: str
    figures: dict[str, int]
    processes: list[list[int]] | None
    events: bool
    xids: list[list[int]] = Field(max_length=4_096)
    last_xid: int = Field(ge=0, le=1 << 31)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    cards: list[_Row] = Field(max_length=MAX_CARDS)


def parse(line: str) -> tuple[CardSample, ...]:
    """Read one line.

    Raises:
        ValueError: it is none of the reader's.
    """
    try:
        rows = _Line.model_validate(json.loads(line)).cards
    except (ValueError, RecursionError) as error:  # Of JSON and of pydantic.
        raise ValueError("no line of the reader") from error
    return tuple(_sample(row) for row in rows)


def _sample(row: _Row) -> CardSample:
    if row.state not in STATES or not row.figures.keys() <= set(FIGURES):
        raise ValueError("a state or figure of a card that is not known")
    if any(not 0 <= number <= MAX_NUMBER for number in row.figures.values()) or any(
        len(pair) != 2 for pair in row.xids
    ):
        raise ValueError("figures of a card that cannot be")
    counts: Counter[str] = Counter()
    for number, count in row.xids:
        counts[xid_kind(number)] += count
    xids = {kind: counts[kind] for kind in XID_KINDS} if row.events or counts else None
    fallen = sum(count for number, count in row.xids if number == FALLEN_XID)
    held = _processes(row.processes)
    return CardSample(row.index, row.uuid, row.state, row.figures, held, xids, row.last_xid, fallen)


def _processes(listed: list[list[int]] | None) -> dict[int, int] | None:
    """Bytes by process. One whose memory is not told makes all of them unknown: the sum would be a lie."""
    if listed is None or any(len(pair) != 2 or pair[1] < 0 for pair in listed):
        return None
    held: Counter[int] = Counter()
    for pid, count in listed:
        held[pid] += count
    return dict(held)
