"""Requests of a fleet from a published trace: many copies at once, each from another moment, spread over tenants.

A trace has a few requests a second; a fleet has thousands. So the trace is laid over itself as often as the rate asks,
each copy beginning at a random second of it and played at its own speed, so that the pauses between the turns of a
conversation are the recorded ones. Sessions are found by their prefixes (``sessions_of``); each belongs to one tenant,
drawn by a Zipf distribution, as few tenants send much. What two sessions of different tenants had in common in the
trace is common no more: a namespace is keyed.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from appliance.operator.bench.traces import TraceRequest, read_trace

VOCABULARY = 128_256
IDS_A_TRACE = 1 << 21
"""Numbers of blocks that one copy of a trace may use; the published ones have some 200,000."""

_FILL = array("I", [7])


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it comes to the router."""

    at: float
    """Seconds; below 0 for what came before the simulation, and is found in caches only."""
    tenant: int
    session: int
    turn: int
    """Number of the request in its session, from 0."""
    prompt_tokens: int
    output: int
    blocks: tuple[int, ...]
    """Numbers of the blocks that the prompt consists of, unique in the fleet."""
    block_tokens: int

    def prompt(self) -> array[int]:
        """Make the token ids: each block has its number in its first three tokens, and nothing else of interest."""
        ids, size = array("I"), self.block_tokens
        fill = _FILL * max(size, 3)  # Azure's shortest prompts have two tokens; the cut below is theirs.
        for number in self.blocks:
            fill[0], fill[1], fill[2] = (
                number % VOCABULARY,
                number // VOCABULARY % VOCABULARY,
                number // VOCABULARY**2,
            )
            ids += fill
        return ids[: self.prompt_tokens]


@dataclass(frozen=True, slots=True)
class Shape:
    """How much traffic, of whom, and when."""

    requests_per_s: float
    tenants: int
    before_s: float
    """Seconds before 0 whose requests are given too, for caches to be as they left them."""
    seconds: float
    skew: float = 0.9
    """Exponent of the Zipf distribution of sessions over tenants."""
    seed: int = 1
    longest: int = 131_072
    """Tokens of prompt and output; longer requests are left out."""


def sessions_of(trace: Sequence[TraceRequest]) -> list[tuple[int, int]]:
    """Return session and turn of each request of a trace, which is in the order of arrival.

    A request goes on with the session that brought the last of the blocks with which it begins, where these are at
    least two (the first one is a prompt of the system) and half of that session's last prompt.
    """
    brought: dict[int, int] = {}
    lengths: list[int] = []
    turns: list[int] = []
    found = []
    for one in trace:
        known, session = 0, -1
        for block in one.hash_ids:
            if block not in brought:
                break
            known, session = known + 1, brought[block]
        if session < 0 or known < 2 or 2 * known < lengths[session]:
            session = len(lengths)
            lengths.append(0)
            turns.append(-1)
        lengths[session] = len(one.hash_ids)
        turns[session] += 1
        found.append((session, turns[session]))
        for block in one.hash_ids:
            brought.setdefault(block, session)
    return found


def arrivals(trace: Sequence[TraceRequest], shape: Shape) -> list[Arrival]:
    """Return the requests of a fleet in the order of arrival."""
    rng = random.Random(f"traffic {shape.seed}")
    span = trace[-1].at_s or 1.0
    copies = max(1, round(shape.requests_per_s * span / len(trace)))
    # Not a whole number of copies would give another rate: the pace makes up for it.
    pace = shape.requests_per_s * span / len(trace) / copies
    sessions, times = sessions_of(trace), [one.at_s / pace for one in trace]
    wanted = shape.before_s + shape.seconds
    share = list(accumulate(1 / (rank + 1) ** shape.skew for rank in range(shape.tenants)))
    number_of = max(session for session, _ in sessions) + 1
    made: list[Arrival] = []
    for copy in range(copies):
        begin = rng.uniform(0, max(0.0, times[-1] - wanted))
        owners: dict[int, int] = {}
        first = bisect_right(times, begin)
        for place in range(first, bisect_right(times, begin + wanted)):
            one, (session, turn) = trace[place], sessions[place]
            tenant = owners.get(session)
            if tenant is None:
                tenant = owners[session] = bisect_right(share, rng.random() * share[-1])
            if one.prompt_tokens + one.output_tokens > shape.longest:
                continue
            size, base = one.block_tokens or one.prompt_tokens, copy * IDS_A_TRACE
            # A trace that tells no blocks has prompts that are all new.
            ids = one.hash_ids or (IDS_A_TRACE // 2 + place,)
            at = times[place] - begin - shape.before_s
            blocks = tuple([base + block for block in ids])
            owner = min(tenant, shape.tenants - 1)
            made.append(
                Arrival(at, owner, copy * number_of + session, turn, one.prompt_tokens, one.output_tokens, blocks, size)
            )
    made.sort(key=lambda arrival: (arrival.at, arrival.session))
    return made


def invented(seconds: float = 600.0, per_s: float = 3.0, seed: int = 1) -> list[TraceRequest]:
    """Make a trace where no published one is at hand: conversations whose prompts grow, Poisson arrivals, lengths of
    the orders of Mooncake's."""
    rng = random.Random(f"invented {seed}")
    size, fresh, made, at = 512, 1, [], 0.0
    while at < seconds:
        at += rng.expovariate(per_s / 2)
        when, blocks = at, [0]
        for _ in range(rng.choice((1, 1, 2, 4))):
            grown = min(40, max(1, int(rng.lognormvariate(1.6, 0.9))))
            blocks = blocks + list(range(fresh, fresh + grown))
            fresh += grown
            length = size * len(blocks) - rng.randrange(size - 1)
            made.append(TraceRequest(when, length, max(1, int(rng.lognormvariate(5, 0.9))), tuple(blocks), size))
            when += rng.lognormvariate(3.5, 0.8)
    made.sort(key=lambda one: one.at_s)
    return [one for one in made if one.at_s < seconds]


def load(name: str, folder: Path) -> tuple[list[TraceRequest], str]:
    """Return the trace of a name (``mooncake``, ``azure``, ``invented``) and the word for it in reports.

    Raises:
        TraceError: the file is there and damaged.
    """
    if name in FILES and (path := folder / FILES[name]).exists():
        return read_trace(path), f"{name} ({path.name})"
    if name in FILES:
        return invented(), f"invented, since {FILES[name]} is not in {folder}"
    return invented(), "invented"


FILES = {"mooncake": "mooncake_conversation_trace.jsonl", "azure": "AzureLLMInferenceTrace_conv.csv"}
"""Published files by name."""
