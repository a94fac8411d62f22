"""The clients of ``bench/split.py``: streams that decode all the time, and long prompts at a steady rate."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROMPT_IDS = 400
"""Prompts are drawn from so many token ids, which every model has that is served here."""

BLOCK = 16
END = b"0\r\n\r\n"
"""Last chunk of an answer (RFC 9112, section 7.1)."""


Span = tuple[float, float]
"""Begin and end in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer says that it cost."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    @property
    def computed_blocks(self) -> int:
        """Whole blocks of the prompt that the answering host computed itself."""
        return self.prompt // BLOCK - self.cached // BLOCK


@dataclass
class Seen:
    """What clients of one arm saw. Times are in seconds."""

    gaps: list[float] = field(default_factory=list)
    """Between two chunks of a stream, all the time."""
    gaps_beside: list[float] = field(default_factory=list)
    """Those of them in which a long prompt was under way: asked for, and without its first token. A step that holds up
    all streams is one gap of each, and hundreds of gaps lie between two prompts; so ``gaps`` has its p99 among them."""
    short_first: list[float] = field(default_factory=list)
    long_first: list[float] = field(default_factory=list)
    long_second: list[float] = field(default_factory=list)
    """From the first to the second token of a long prompt's answer."""
    long_usage: list[Usage] = field(default_factory=list)
    total: list[Usage] = field(default_factory=list)
    """Of all answers."""
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of both arms."""

    streams: int
    stream_prompt: int
    stream_output: int
    long_prompt: int
    long_output: int
    long_every_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Target:
    """A host that clients ask."""

    url: str
    keys: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Answer:
    chunks: tuple[float, ...]
    usage: Usage | None


async def _ask(target: Target, key: str, model: str, prompt: Sequence[int], output: int) -> _Answer:
    """One streaming completion; gives when its chunks with text came, the first entry being the time of asking."""
    place = urlsplit(target.url)
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {target.keys[key]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    times, usage, rest = [time.monotonic()], None, b""
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 16)
    try:
        writer.write(head.encode() + body)
        while piece := await reader.read(65_536):
            now = time.monotonic()
            whole = rest + piece
            *lines, rest = whole.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if any(choice.get("text") for choice in event.get("choices", ())) and times[-1] != now:
                        times.append(now)
                    if found := event.get("usage"):
                        details = found.get("prompt_tokens_details") or {}
                        usage = Usage(
                            found["prompt_tokens"], found["completion_tokens"], details.get("cached_tokens", 0)
                        )
            if whole.endswith(END):
                break
    finally:
        writer.close()
    return _Answer(tuple(times), usage)


async def run(targets: Sequence[Target], model: str, key: str, load: Load, rng: random.Random) -> Seen:
    """Put the load on these hosts, in turn; long prompts are sent with this key."""
    seen, began = Seen(), time.monotonic()
    until = began + load.seconds
    gaps, prompts = list[Span](), list[Span]()

    async def streaming(target: Target) -> None:
        while time.monotonic() < until:
            prompt = [rng.randrange(8, PROMPT_IDS) for _ in range(load.stream_prompt)]
            got = await _ask(target, "s", model, prompt, load.stream_output)
            if not _counted(seen, got):
                continue
            times = got.chunks
            seen.short_first.append(times[1] - times[0])
            gaps.extend((before, after) for before, after in itertools.pairwise(times[1:]) if after < until)

    async def asking(number: int) -> None:
        target = targets[number % len(targets)]
        prompt = [rng.randrange(8, PROMPT_IDS) for _ in range(load.long_prompt)]
        got = await _ask(target, key, model, prompt, load.long_output)
        if _counted(seen, got) and got.usage is not None:
            times = got.chunks
            prompts.append((times[0], times[1]))
            seen.long_first.append(times[1] - times[0])
            if len(times) > 2:
                seen.long_second.append(times[2] - times[1])
            seen.long_usage.append(got.usage)

    async with asyncio.TaskGroup() as group:
        for number in range(load.streams):
            group.create_task(streaming(targets[number % len(targets)]))
        for number in range(int(load.seconds / load.long_every_s)):
            await asyncio.sleep(max(0.0, began + (number + 0.5) * load.long_every_s - time.monotonic()))
            group.create_task(asking(number))
    seen.gaps = [after - before for before, after in gaps]
    seen.gaps_beside = [after - before for before, after in overlapping(gaps, prompts)]
    return seen


def overlapping(gaps: Sequence[Span], prompts: Sequence[Span]) -> list[Span]:
    """Those of the gaps that share some time with a prompt."""
    found, merged = list[Span](), list[Span]()
    for begin, end in sorted(prompts):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    place = 0
    for before, after in sorted(gaps):
        while place < len(merged) and merged[place][1] <= before:
            place += 1
        if place < len(merged) and merged[place][0] < after:
            found.append((before, after))
    return found


def _counted(seen: Seen, got: _Answer) -> bool:
    """Count an answer; whether it is whole."""
    if got.usage is None or len(got.chunks) < 2:
        seen.failed += 1
        return False
    seen.total.append(got.usage)
    return True
