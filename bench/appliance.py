"""Figures of the whole appliance: warm start, tokens a second through the HTTP API, host CPU for each token.

Starts `athanor demo` from this checkout in a temporary state directory, warms it, and runs 1, 16 and 64 streams of
greedy decoding over real sockets. ``gateway``, ``text`` and ``engine`` are the processor time of those rooms, every
process of a sandbox counted (``appliance.selftest.processes``), divided by the output tokens; the client runs on the
same cores and takes its share of them, so tokens a second are a lower bound.

Run: ``python bench/appliance.py [--tokens 200] [--json]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.selftest.processes import ROOMS, CpuClock
from tests.system.conftest import Appliance, running

STREAMS = (1, 16, 64)


async def stream(client: httpx.AsyncClient, appliance: Appliance, tenant: str, tokens: int) -> None:
    """One stream to its end."""
    body = {
        "model": "athanor-mini",
        "prompt": "Count from one:",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {"authorization": f"Bearer {appliance.key(tenant)}"}
    async with client.stream("POST", appliance.ready["http"] + "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_bytes():
            continue


async def measure(appliance: Appliance, count: int, tokens: int) -> dict[str, float]:
    """One row of the table."""
    clock = CpuClock(appliance.process.pid, {room: appliance.sandbox_pid(room) for room in ("engine", "text")})
    loop = asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        await stream(client, appliance, "alpha", 8)
        before, began = clock.read(), loop.time()
        await asyncio.gather(
            *(stream(client, appliance, ("alpha", "beta")[index % 2], tokens) for index in range(count))
        )
        wall, after = loop.time() - began, clock.read()
    done = count * tokens
    return {
        "streams": count,
        "tokens_per_s": done / wall,
        **{f"{room}_us_per_token": (after[room] - before[room]) / done / 1e3 for room in ROOMS},
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Figures of the whole appliance.")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each stream")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state") as appliance:
        rows = [asyncio.run(measure(appliance, count, arguments.tokens)) for count in STREAMS]
        figures = {"warm_start_s": appliance.started_s, "sandbox": appliance.ready["sandbox"], "rows": rows}
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print(f"warm start {figures['warm_start_s']:.1f} s in {figures['sandbox']}\n")
    print("streams   tokens/s   CPU us/token: gateway     text   engine")
    for row in rows:
        print(
            f"{row['streams']:7.0f} {row['tokens_per_s']:10.0f} {row['gateway_us_per_token']:23.1f}"
            f" {row['text_us_per_token']:8.1f} {row['engine_us_per_token']:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
