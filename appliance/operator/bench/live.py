"""Measures a model of a running appliance beside its tenants: few streams, few tokens, low priority.

Requests ask for the priority that gets what others leave, whatever their tenant has; a level that does not end in time
is given up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.operator.bench import metrics, workload
from appliance.operator.bench.client import Client
from appliance.operator.bench.errors import TargetError
from appliance.operator.bench.run import play

LEVELS = (1, 4, 16)
"""Streams of the levels; the most rows that other tenants' steps are ever made longer by."""

REQUESTS_A_STREAM = 2
LEAST_REQUESTS = 4
"""Requests of a level of one stream."""

WARM_TOKENS = 8
"""Output tokens of the requests before a level counts, one for each stream."""

LEVEL_S = 300.0
"""Longest that a level takes, its first requests, which may wake the model, included."""

LOOK_S = 0.5
"""Seconds between two looks at the memory."""

LOW = "flex"
"""Service tier that asks for low priority."""

Scrape = Callable[[], str]
"""Gives the appliance's metrics as text; blocks."""


@dataclass(frozen=True, slots=True)
class LiveLevel:
    """Figures of one number of streams."""

    streams: int
    requests: int
    failures: dict[str, int]
    tokens_per_s: float
    bound: float | None
    """Most tokens a second by the memory's speed; None where that is not known."""
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    later_token_p50_s: float | None

    @property
    def share(self) -> float | None:
        """Part of the bound that was reached."""
        return self.tokens_per_s / self.bound if self.bound else None


@dataclass(slots=True)
class EngineMemory:
    """What the engine held at most, of what was seen."""

    most: int | None = None
    limit: int | None = None
    loaded_s: float | None = None
    """How long its sandbox took to be ready, when it last booted."""


async def measure(
    client: Client,
    shape: workload.Shape,
    bound: Callable[[int], float | None],
    say: Callable[[str], None],
    *,
    levels: Sequence[int] = LEVELS,
    seed: int = 0,
) -> list[LiveLevel]:
    """Measure all levels, one after the other.

    Raises:
        TargetError: a level does not end in time, or none of its requests succeeds.
    """
    found = []
    for streams in levels:
        count = max(LEAST_REQUESTS, REQUESTS_A_STREAM * streams)
        load = workload.parse_load(f"closed:{streams},requests={count}")
        plans = workload.plan(load, shape, tenants=1, seed=seed)
        short = workload.Shape(shape.prompt_tokens, min(shape.output_tokens, WARM_TOKENS))
        warm = workload.warm_up(load, short, tenants=1, seed=seed)[:streams]
        say(f"{streams} at once: {count} requests ...")
        try:
            async with asyncio.timeout(LEVEL_S):
                played = await play(client, load, plans, warm)
        except TimeoutError:
            raise TargetError(
                f"{streams} streams gave no {count} answers in {LEVEL_S:g} s: tenants leave nothing for low priority"
            ) from None
        one = metrics.figures(played)
        if one.failed == one.requests:
            raise TargetError(f"no request succeeded: {', '.join(sorted(one.failures))}")
        found.append(_level(streams, one, bound(streams)))
    return found


def _level(streams: int, one: metrics.Figures, bound: float | None) -> LiveLevel:
    return LiveLevel(
        streams,
        one.requests,
        one.failures,
        one.output_tokens_per_s,
        bound,
        one.ttft.p50 if one.ttft else None,
        one.ttft.p95 if one.ttft else None,
        one.tpot.p50 if one.tpot else None,
    )


async def watch(memory: EngineMemory, model: str, scrape: Scrape) -> None:
    """Look at the engine's memory now and then, until cancelled."""
    while True:
        look(memory, model, await asyncio.to_thread(scrape))
        await asyncio.sleep(LOOK_S)


def look(memory: EngineMemory, model: str, text: str) -> None:
    """Take what a scrape tells of a model's engine. Pure but for the memory that it fills."""
    held = value_of(text, "athanor_sandbox_memory_bytes", model)
    if held is not None:
        memory.most = max(memory.most or 0, int(held))
    limit = value_of(text, "athanor_sandbox_memory_limit_bytes", model)
    memory.limit = memory.limit if limit is None else int(limit)
    away = value_of(text, "athanor_sandbox_last_away_seconds", model)
    memory.loaded_s = memory.loaded_s if away is None else away


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"([a-zA-Z_:]+)\{(.*)\} (\S+)")


def value_of(text: str, name: str, model: str) -> float | None:
    """Return the largest value of a metric of a model's engine in a scrape; None where there is none."""
    found = []
    for line in text.splitlines():
        parts = _LINE.match(line) if line.startswith(name + "{") else None
        if parts is None or parts[1] != name:
            continue
        labels = dict(_LABEL.findall(parts[2]))
        if labels.get("gen_ai_request_model") == model and labels.get("athanor_role") == "engine":
            found.append(float(parts[3]))
    return max(found, default=None)
