"""Load of a benchmark: from its description on the command line to a list of planned requests. Pure.

A load is one of

* ``closed:16``: 16 streams; each sends its next request when its answer is complete. For saturation.
* ``open:8``: requests arrive by a Poisson process, 8 a second on average, whatever the server does. For latency.
* ``trace:FILE``: arrivals, lengths and shared prefixes of a published trace (``appliance.operator.bench.traces``).

Options follow after commas: ``requests=N``; for traces ``speed=X`` (time runs X times faster), ``prompt=N`` and
``output=N`` (prompts and answers N times shorter), ``context=N`` (longer requests are left out).

Prompts are token ids, not text: their lengths are exact for every tokenizer, and equal prefixes are equal for sure.
All is drawn from one seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from appliance.operator.bench import traces
from appliance.operator.bench.errors import LoadSpecError

TOKEN_IDS = range(8, 500)
"""Ids that prompts are made of: plain tokens of every vocabulary from 512 on, no marks of begin or end."""

MAX_STREAMS = 1_000
"""Most connections of one load; a process has 1,024 descriptors unless the limit was raised."""

MAX_RATE = 100_000.0
"""Requests a second."""

LABEL_CHARS = 26
"""Characters of a load's name in a table of 80 columns."""

_NUMBERS = {"requests": int, "prompt": int, "output": int, "context": int, "speed": float}


@dataclass(frozen=True, slots=True)
class Load:
    """One load as asked for."""

    name: str
    """As it was written, for tables."""
    kind: str
    """``closed``, ``open``, ``trace`` or ``engine``."""
    streams: int = 0
    """Streams of a closed loop."""
    rate: float = 0.0
    """Requests a second of an open loop."""
    path: Path = Path()
    """File of a trace."""
    batches: tuple[int, ...] = ()
    """Batch sizes, for the engine alone."""
    options: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, or what is most telling of it, in ``LABEL_CHARS``."""
        if len(self.name) <= LABEL_CHARS:
            return self.name
        if self.kind != "trace":
            return self.name[: LABEL_CHARS - 2] + ".."
        speed = f" x{self.option('speed', 1):g}"
        return f"{self.name.split('.')[0][: LABEL_CHARS - 2 - len(speed)]}..{speed}"

    def option(self, name: str, default: float) -> float:
        """An option after the comma, or the default."""
        return self.options.get(name, default)


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of requests that no trace tells."""

    prompt_tokens: int = 128
    output_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be sent."""

    number: int
    tenant: int
    """Index of the API key."""
    prompt: tuple[int, ...]
    output_tokens: int
    at_s: float = 0.0
    """Seconds after the load's start; in a closed loop it has no meaning."""


def parse_load(text: str) -> Load:
    """A load's words.

    Raises:
        LoadSpecError: they are none.
    """
    head, *rest = text.split(",")
    kind, _, value = head.partition(":")
    options: dict[str, float] = {}
    if kind == "engine":
        batches = tuple(_number(text, one, 1, MAX_STREAMS) for one in [value, *rest] if one) or (1, 4, 16, 64)
        return Load(text, kind, batches=batches)
    for part in rest:
        name, _, number = part.partition("=")
        if name not in _NUMBERS:
            raise LoadSpecError(f"{text!r}: {name!r} is no option; known are {', '.join(_NUMBERS)}")
        try:
            options[name] = _NUMBERS[name](number)
        except ValueError:
            raise LoadSpecError(f"{text!r}: {name} must be a number, not {number!r}") from None
        if not 0 < options[name] <= traces.MAX_TOKENS:
            raise LoadSpecError(f"{text!r}: {name} must be above 0 and at most {traces.MAX_TOKENS}")
    if kind == "closed":
        return Load(text, kind, streams=_number(text, value, 1, MAX_STREAMS), options=options)
    if kind == "open":
        try:
            rate = float(value)
        except ValueError:
            rate = 0.0
        if not 0 < rate <= MAX_RATE:
            raise LoadSpecError(f"{text!r}: an open loop needs requests a second above 0, as in open:8")
        return Load(text, kind, rate=rate, options=options)
    if kind == "trace" and value:
        return Load(
            f"trace:{Path(value).name}" + "".join(f",{one}" for one in rest), kind, path=Path(value), options=options
        )
    raise LoadSpecError(f"{text!r} is no load; write closed:STREAMS, open:RATE, trace:FILE or engine")


def plan(load: Load, shape: Shape, *, tenants: int, seed: int) -> list[Planned]:
    """The requests of a load, spread over the tenants in turn.

    Without a number of requests a closed loop gets four for each stream, at least 32, and an open loop ten seconds'
    worth.

    Raises:
        TraceError: the trace cannot be used.
        LoadSpecError: nothing of the trace is left.
    """
    assert tenants > 0
    if load.kind == "trace":
        return _plan_trace(load, shape, tenants=tenants, seed=seed)
    usual = max(32, 4 * load.streams) if load.kind == "closed" else max(32, round(10 * load.rate))
    count = int(load.option("requests", usual))
    clock = random.Random(f"{seed}:arrivals")
    at_s, result = 0.0, []
    for number in range(count):
        prompt = draw_prompt(shape.prompt_tokens, f"{seed}:{load.name}:{number}")
        result.append(Planned(number, number % tenants, prompt, shape.output_tokens, at_s))
        if load.kind == "open":
            at_s += clock.expovariate(load.rate)
    return result


def warm_up(load: Load, shape: Shape, *, tenants: int, seed: int) -> list[Planned]:
    """Requests sent before anything counts: twice the streams, with prompts that nothing later begins with."""
    count = 2 * load.streams if load.kind == "closed" else 8
    return [
        Planned(
            number,
            number % tenants,
            draw_prompt(shape.prompt_tokens, f"{seed}:warm:{number}"),
            min(shape.output_tokens, 32),
        )
        for number in range(max(count, 2 * tenants))
    ]


def draw_prompt(length: int, seed: str) -> tuple[int, ...]:
    """So many token ids, the same for the same seed."""
    return tuple(random.Random(seed).choices(TOKEN_IDS, k=length))


def _plan_trace(load: Load, shape: Shape, *, tenants: int, seed: int) -> list[Planned]:
    requests = traces.scaled(
        traces.read_trace(load.path),
        speed=load.option("speed", 1.0),
        prompt_divisor=int(load.option("prompt", 1)),
        output_divisor=int(load.option("output", 1)),
    )
    requests = traces.within(requests, int(load.option("context", traces.MAX_TOKENS)))
    requests = requests[: int(load.option("requests", len(requests)))]
    if not requests:
        raise LoadSpecError(f"{load.name}: no request fits the context asked for")
    first_s = requests[0].at_s
    blocks: dict[int, tuple[int, ...]] = {}
    result = []
    for number, one in enumerate(requests):
        if one.hash_ids:
            for hash_id in one.hash_ids:
                if hash_id not in blocks:
                    blocks[hash_id] = draw_prompt(one.block_tokens, f"{seed}:block:{hash_id}")
            prompt = tuple(token for hash_id in one.hash_ids for token in blocks[hash_id])[: one.prompt_tokens]
        else:
            prompt = draw_prompt(one.prompt_tokens, f"{seed}:{load.name}:{number}")
        result.append(Planned(number, number % tenants, prompt, one.output_tokens, one.at_s - first_s))
    return result


def _number(text: str, value: str, least: int, most: int) -> int:
    if not value.isascii() or not value.isdigit() or not least <= int(value) <= most:
        raise LoadSpecError(f"{text!r}: {value!r} is not a whole number from {least} to {most}")
    return int(value)
