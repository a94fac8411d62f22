"""A light tenant beside a flood: time to first token and gaps between tokens, beside and alone, over real sockets.

Starts `athanor demo`. Tenant beta sends four short requests a second; tenant alpha keeps 48 going from a process of
its own, in three shapes (short, long prompts, long outputs), or sends grammars that no compiler gets through
("bombs", four at a time: each is refused). Rounds alternate between alone and beside, so that a busy
machine moves both; what counts is the ratio. The floods' clients share the machine's cores with the appliance.
Run: ``python bench/victim.py [--rounds 3] [--seconds 15] [--model DIR] [--json]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.system.conftest import Appliance, running

RATE = 4.0
"""The victim's requests a second."""
VICTIM_TOKENS = 32
STREAMS = 48
SHAPES = {"flood": (16, 64), "long prompts": (1_500, 8), "long outputs": (16, 1_500)}
"""Prompt and output tokens of the flood's requests."""
BOMBS = 4
"""Grammars sent at a time."""
ATTACKS = (*SHAPES, "bombs")
END = b"0\r\n\r\n"
"""Last chunk of an answer (RFC 9112, section 7.1)."""
PROMPT_IDS = 400
"""Prompts are drawn from so many token ids, which every model served here has."""


@dataclass
class Times:
    """Seconds, of the victim's requests."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failed: int = 0


def body_of(model: str, prompt: int, output: int, rng: random.Random) -> bytes:
    """One streaming completion as a whole HTTP body; no two prompts are alike."""
    ids = [rng.randrange(8, PROMPT_IDS) for _ in range(prompt)]
    fields = {"model": model, "prompt": ids, "max_tokens": output, "stream": True, "ignore_eos": True, "temperature": 0}
    return json.dumps(fields).encode()


def request_bytes(url: str, key: str, body: bytes) -> bytes:
    """The request as it goes over the wire; connections are kept and used again, as clients' pools do."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ask(url: str, data: bytes, times: Times, idle: list[socket.socket]) -> None:
    """One request of the victim, timed chunk by chunk; ``idle`` are connections to use again."""
    place = urlsplit(url)
    began = last = time.monotonic()
    seen = 0
    text = b""
    try:
        connection = idle.pop()
    except IndexError:
        connection = socket.create_connection((place.hostname, place.port), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(data)
    while not text.endswith(END) and (piece := connection.recv(65_536)):
        now = time.monotonic()
        text += piece
        count = text.count(b'"text":"')
        if count > seen:
            if seen:
                times.gaps.append(now - last)
            else:
                times.first.append(now - began)
            seen, last = count, now
    if b"data: [DONE]" in text:
        idle.append(connection)
    else:
        times.failed += 1
        connection.close()


def victim(
    appliance: Appliance,
    model: str,
    seconds: float,
    rng: random.Random,
    *,
    rate: float = RATE,
    tokens: int = VICTIM_TOKENS,
) -> Times:
    """So many requests a second, whatever became of those before."""
    times = Times()
    url, key = appliance.ready["http"], appliance.key("beta")
    threads: list[threading.Thread] = []
    idle: list[socket.socket] = []
    began = time.monotonic()
    for number in range(int(seconds * rate)):
        data = request_bytes(url, key, body_of(model, 16, tokens, rng))
        time.sleep(max(0.0, began + (number + rng.random() * 0.5) / rate - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(url, data, times, idle)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for connection in idle:
        connection.close()
    return times


async def flood(url: str, key: str, model: str, attack: str) -> None:
    """Keep ``STREAMS`` requests going for ever; says a line when a second's worth of them has begun."""
    prompt, output = SHAPES[attack]
    place = urlsplit(url)
    rng = random.Random(7)
    ended = itertools.count(1)

    async def one() -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        while True:
            writer.write(request_bytes(url, key, body_of(model, prompt, output, rng)))
            while not (piece := await reader.read(65_536)).endswith(END):
                if not piece:
                    raise SystemExit("the flood was refused")
            sys.stdout.write(f"{next(ended)}\n")
            sys.stdout.flush()

    await asyncio.gather(*(one() for _ in range(STREAMS)))


async def bombs(url: str, key: str, model: str) -> None:
    """Keep ``BOMBS`` hopeless grammars going for ever, each another one; says a line for each that was refused, with
    the seconds that took."""
    place = urlsplit(url)
    numbers = itertools.count(1)
    ended = itertools.count(1)

    async def one() -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        while True:
            expression = "a?" * 20_000 + "a" * 20_000 + str(next(numbers))
            fields = {"model": model, "prompt": [9], "max_tokens": 4, "structured_outputs": {"regex": expression}}
            began = time.monotonic()
            writer.write(request_bytes(url, key, json.dumps(fields).encode()))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r")[0]))
            if b" 400 " not in head.split(b"\r\n")[0]:
                raise SystemExit(f"a bomb was answered: {head!r}")
            sys.stdout.write(f"{next(ended)} {time.monotonic() - began:.3f}\n")
            sys.stdout.flush()

    await asyncio.gather(*(one() for _ in range(BOMBS)))


@contextlib.contextmanager
def flooding(appliance: Appliance, model: str, attack: str) -> Iterator[list[int]]:
    """A flood in its own process for the time of a block; gives how many of its requests have ended."""
    arguments = ["--flood", attack, appliance.ready["http"], appliance.key("alpha"), model]
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    ended = [0]

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            ended[0] = int(line.split()[0])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        time.sleep(3)
        yield ended
    finally:
        process.kill()
        process.wait()
        reader.join()
        time.sleep(1)


def at(values: list[float], part: float) -> float:
    """A quantile in milliseconds."""
    ordered = sorted(values)
    return 1_000 * ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def measure(appliance: Appliance, model: str, attack: str, rounds: int, seconds: float) -> dict[str, Any]:
    """One line: alone and beside, in turns."""
    rng = random.Random(1)
    alone, beside = Times(), Times()
    ended = 0
    for _ in range(rounds):
        for times, attacked in ((alone, False), (beside, True)):
            if attacked:
                with flooding(appliance, model, attack) as count:
                    before = count[0]
                    got = victim(appliance, model, seconds, rng)
                    ended += count[0] - before
            else:
                got = victim(appliance, model, seconds, rng)
            times.first += got.first
            times.gaps += got.gaps
            times.failed += got.failed
    row: dict[str, Any] = {"attack": attack, "requests": len(beside.first), "failed": alone.failed + beside.failed}
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        for kind, one, other in (("ttft", alone.first, beside.first), ("itl", alone.gaps, beside.gaps)):
            row[f"{kind}_{name}_alone_ms"] = at(one, part)
            row[f"{kind}_{name}_beside_ms"] = at(other, part)
            row[f"{kind}_{name}_ratio"] = at(other, part) / at(one, part)
    row["flood_requests_a_second"] = ended / (rounds * seconds)
    return row


def main() -> None:
    """Print one line an attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--attack", choices=ATTACKS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--flood", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        attack, url, key, model = options.flood
        asyncio.run(bombs(url, key, model) if attack == "bombs" else flood(url, key, model, attack))
        return
    arguments = ["--model", str(options.model)] if options.model else []
    model = options.model.name if options.model else "athanor-mini"
    rows = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state", *arguments) as appliance:
        loosen(appliance)
        victim(appliance, model, 3.0, random.Random(0))
        for attack in [options.attack] if options.attack else ATTACKS:
            rows.append(measure(appliance, model, attack, options.rounds, options.seconds))
            if not options.json:
                row = rows[-1]
                print(
                    f"{attack:13} TTFT p50 {row['ttft_p50_alone_ms']:6.1f} -> {row['ttft_p50_beside_ms']:6.1f} ms "
                    f"({row['ttft_p50_ratio']:4.1f}x)  p99 {row['ttft_p99_alone_ms']:6.1f} -> "
                    f"{row['ttft_p99_beside_ms']:6.1f} ms ({row['ttft_p99_ratio']:4.1f}x)  ITL p50 "
                    f"{row['itl_p50_ratio']:4.1f}x p99 {row['itl_p99_alone_ms']:5.1f} -> "
                    f"{row['itl_p99_beside_ms']:5.1f} ms ({row['itl_p99_ratio']:4.1f}x)  "
                    f"flood {row['flood_requests_a_second']:.1f}/s  failed {row['failed']} of {row['requests']}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


def loosen(appliance: Appliance) -> None:
    """Raise the demo's limits, so that the flood meets the scheduler and not its quota."""
    path = appliance.state / "policy.d"
    files = list(path.glob("*.yaml"))
    for file in files:
        text = file.read_text()
        for key, value in (("requests_per_minute", 1_000_000), ("tokens_per_minute", 1_000_000_000)):
            lines = [
                line[: line.index(key)] + f"{key}: {value}" if line.strip().startswith(key) else line
                for line in text.split("\n")
            ]
            text = "\n".join(lines)
        file.write_text(text)
    reload = [sys.executable, "-m", "appliance.operator.cli", "reload", "--admin", appliance.ready["admin"]]
    subprocess.run(reload, check=True, capture_output=True)


if __name__ == "__main__":
    main()
