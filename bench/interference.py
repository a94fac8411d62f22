"""G6 on real cores: a victim's time to first token under nine attacks, against it beside an ordinary tenant.

Starts `athanor demo`. Tenant beta sends sixteen short requests a second; tenant alpha has all live that it may,
from a process of its own, in one of nine shapes. The base is not an idle machine but alpha with an ordinary backlog
(``IN_SHARE``): what a victim may complain about is what an attack takes beyond that. Each round takes all three arms
in turns: beside the ordinary tenant, beside the attack, and the attack without the victim, which tells how much of the
capacity left over the attacker still gets (refusing everything would be no isolation). What it gets is counted in
tokens as they come, prompts with their first: requests that end say little where one in thirty takes seconds. What is
left over is what it gets alone less the victim's own tokens; an attack that takes less than those alone does not fill
the machine, and is held to what it gets alone. The attacks' clients share the machine's cores with the appliance, so
both ratios have them in.
Run: ``python bench/interference.py [--rounds 8] [--seconds 8] [--attack NAME] [--json]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.victim import PROMPT_IDS, Times, at, loosen, request_bytes, victim
from tests.system.conftest import Appliance, running

LIVE = 64
"""Requests of an attacker that are under way at any time."""
RATE = 16.0
"""The victim's requests a second: enough for a 99th percentile in a minute."""
VICTIM_PROMPT, VICTIM_TOKENS = 16, 8
TELL_S = 0.05
"""Between two lines of an attack's client."""
ROUNDS = 8
"""Of eight seconds: 1,024 requests an arm. Of 256, the 99th percentile is the third largest, and the same base came
out at 32 to 93 ms in nine goes."""
SETTLE_S = 2.0
"""From an attack's first request to the first measured one."""
MODEL = "athanor-mini"
MOST_RATIO, LEAST_REST = 3.0, 0.8


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind, so many of them at a time."""

    live: int
    prompt: int
    output: int
    choices: int = 1
    reads: int = 1 << 30
    """Chunks that are read before the client goes away."""
    waits_s: float = 0.0
    """How long a client sits still after its first chunk, reading nothing."""
    regex: bool = False
    """With a grammar that no compiler gets through."""


IN_SHARE = (Stream(LIVE // 2, 256, 32),)
ATTACKS: dict[str, tuple[Stream, ...]] = {
    "flood": (Stream(LIVE, 16, 32),),
    "fill and squeeze": (Stream(LIVE // 2, 16, 600), Stream(LIVE // 2, 512, 16)),
    "long prompts": (Stream(LIVE, 1_500, 1),),
    "one token": (Stream(LIVE, 16, 1),),
    "grammar bomb": (Stream(4, 1, 4, regex=True), Stream(LIVE // 2, 32, 32)),
    "fan-out": (Stream(LIVE // 16, 64, 48, choices=16),),
    "slow reader": (Stream(LIVE, 32, 1_000, reads=1, waits_s=2.0),),
    "cancel storm": (Stream(LIVE, 256, 64, reads=2),),
    "preempt storm": (Stream(LIVE, 200, 500),),
}


def body_of(kind: Stream, number: int, rng: random.Random) -> bytes:
    """One completion; no two are alike."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": [rng.randrange(8, PROMPT_IDS) for _ in range(kind.prompt)],
        "max_tokens": kind.output,
        "stream": not kind.regex,
    }
    if kind.regex:
        fields["structured_outputs"] = {"regex": "a?" * 20_000 + "a" * 20_000 + str(number)}
    else:
        fields |= {"ignore_eos": True, "temperature": 0 if kind.choices == 1 else 1, "n": kind.choices}
    return json.dumps(fields).encode()


async def attack(name: str, url: str, key: str) -> None:
    """Keep the attack going for ever; says now and then how many tokens it has got."""
    rng, numbers, got = random.Random(7), itertools.count(1), [0]
    place = urlsplit(url)

    async def one(kind: Stream) -> None:
        while True:
            reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 16)
            writer.write(request_bytes(url, key, body_of(kind, next(numbers), rng)))
            await _read(reader, kind, got)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            sys.stdout.write(f"{got[0]}\n")
            sys.stdout.flush()

    streams = IN_SHARE if name == "in share" else ATTACKS[name]
    await asyncio.gather(tell(), *(one(kind) for kind in streams for _ in range(kind.live)))


async def _read(reader: asyncio.StreamReader, kind: Stream, got: list[int]) -> None:
    """As much of an answer as this kind of client reads; adds its tokens to ``got``."""
    asked = False
    for number in itertools.count():
        piece = await reader.read(65_536)
        tokens = piece.count(b'"text":"')
        if tokens and not asked:
            asked = True
            tokens += kind.prompt
        got[0] += tokens
        if not piece or piece.endswith(b"0\r\n\r\n") or number + 1 >= kind.reads:
            break
        if kind.regex and b"\r\n\r\n" in piece:
            break
    if kind.waits_s:
        await asyncio.sleep(kind.waits_s)


@contextlib.contextmanager
def attacking(appliance: Appliance, name: str) -> Iterator[list[int]]:
    """An attack in its own process for the time of a block; gives how many tokens it has got."""
    arguments = ["--client", name, appliance.ready["http"], appliance.key("alpha")]
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    got = [0]

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            got[0] = int(line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        time.sleep(SETTLE_S)
        assert process.poll() is None, "the attack's client ended"
        yield got
    finally:
        process.kill()
        process.wait()
        reader.join()
        time.sleep(0.5)


def measure(appliance: Appliance, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """One row: the two ratios of an attack."""
    rng, base, beside = random.Random(1), Times(), Times()
    beside_tokens = alone_tokens = 0
    for _ in range(rounds):
        for times, arm in ((base, "in share"), (beside, name)):
            with attacking(appliance, arm) as count:
                before = count[0]
                got = victim(appliance, MODEL, seconds, rng, rate=RATE, tokens=VICTIM_TOKENS)
                beside_tokens += (count[0] - before) * (arm == name)
            times.first += got.first
            times.failed += got.failed
        with attacking(appliance, name) as count:
            before = count[0]
            time.sleep(seconds)
            alone_tokens += count[0] - before
    own = len(beside.first) * (VICTIM_PROMPT + VICTIM_TOKENS)
    left = alone_tokens - own if alone_tokens > own else alone_tokens
    # An attack that gets nothing even alone shows nothing.
    ratio, rest = at(beside.first, 0.99) / at(base.first, 0.99), beside_tokens / left if left else 0.0
    return {
        "attack": name,
        "requests": len(beside.first),
        "failed": base.failed + beside.failed,
        "base_p50_ms": at(base.first, 0.5),
        "base_p99_ms": at(base.first, 0.99),
        "p50_ms": at(beside.first, 0.5),
        "p99_ms": at(beside.first, 0.99),
        "p99_ratio": ratio,
        "attacker_keeps": rest,
        "attacker_tokens": beside_tokens,
        "left_tokens": left,
        "passed": ratio <= MOST_RATIO and rest >= LEAST_REST and not base.failed and not beside.failed,
    }


def main() -> None:
    """Print one line an attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(attack(*options.client))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state") as appliance:
        loosen(appliance)
        victim(appliance, MODEL, 3.0, random.Random(0), rate=RATE, tokens=VICTIM_TOKENS)
        for name in [options.attack] if options.attack else ATTACKS:
            row = measure(appliance, name, options.rounds, options.seconds)
            rows.append(row)
            if not options.json:
                print(
                    f"{name:17} TTFT p50 {row['base_p50_ms']:6.1f} -> {row['p50_ms']:6.1f} ms  p99 "
                    f"{row['base_p99_ms']:6.1f} -> {row['p99_ms']:6.1f} ms ({row['p99_ratio']:4.2f}x)  attacker keeps "
                    f"{100 * row['attacker_keeps']:4.0f} % ({row['attacker_tokens']} of {row['left_tokens']} tokens)  "
                    f"failed {row['failed']} of {row['requests']}  {'pass' if row['passed'] else 'FAIL'}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
