"""Requests that fail while hosts that compute prompts are killed: routers of others, and this appliance.

    python -m venv DIR && DIR/bin/pip install --no-deps vllm-router==0.1.17 smg==1.13.0
    DIR/bin/pip install setproctitle aiohttp fastapi uvicorn orjson requests
    python -m bench.split_controls --peers DIR --requests 300
    python -m bench.split_controls --peers DIR --requests 300 --ours    # beside a real pair of hosts

Each router stands in front of one server that computes prompts and one that writes answers, which are mocks: they
answer at once what the router expects. So its figure says what the router makes of a dead server, and nothing of an
engine. This appliance runs as two real hosts with a real store. In each arm the first server is killed at random
moments and started anew, while clients ask for one answer after the other; the seed gives the same pauses to all arms.
A failure is an answer with another status than 200, or none. Printed is a table with one row for each arm: kills are
those that found a process, and ``first server`` says how many prompts it had computed (of a mock: has answered).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from appliance.operator.demo import choose_ports
from bench.split_mock import MODEL
from tests.system.conftest import PLAIN
from tests.system.test_split import gateway_of, text
from tests.system.test_split_storms import entries, split_pair

CLIENTS = 8
PAUSE_S, AWAY_S = (1.0, 3.0), (0.5, 1.5)
"""Seconds between two kills, and until the killed server starts anew."""

START_S = 120.0
"""Seconds for a router to answer its first request."""

ROUTERS = {
    "vllm-router": ("vllm-router", "--vllm-pd-disaggregation"),
    "smg": ("smg", "launch", "--pd-disaggregation", "--backend", "vllm", "--disable-tokenizer-autoload"),
}
"""Program of each router and what makes it split."""


class Mock:
    """A mock in a process of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "bench.split_mock", str(self.port)])

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        """Start it anew."""
        self.process = self._started()


@contextmanager
def router(peers: Path, name: str, log: Path) -> Iterator[tuple[str, Mock]]:
    """A router in front of two mocks; gives its address and the mock that computes prompts."""
    ports = choose_ports((0, 0, 0))
    program, *more = ROUTERS[name]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    argv = [str(peers / "bin" / program), *more, "--host", "127.0.0.1", "--port", str(ports[0])]
    with ExitStack() as stack:
        mocks = [Mock(port) for port in ports[1:]]
        for one in mocks:
            stack.callback(lambda one=one: one.kill())
        for one in mocks:
            _until(lambda port=one.port: httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200)
        file = stack.enter_context(log.open("wb"))
        argv += ["--prefill", urls[1], "--decode", urls[2]]
        argv += ["--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", f"{START_S:.0f}"]
        process = subprocess.Popen(argv, stdout=file, stderr=file)
        stack.callback(process.wait)
        stack.callback(process.kill)
        _until(lambda: _post(urls[0]) == 200)
        yield urls[0], mocks[0]


def _post(url: str) -> int:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 12}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=10).status_code


def _until(holds: Callable[[], bool]) -> None:
    """Wait until a server answers.

    Raises:
        TimeoutError: it does not.
    """
    until = time.monotonic() + START_S
    while True:
        with suppress(httpx.HTTPError):
            if holds():
                return
        if time.monotonic() > until:
            raise TimeoutError("the server does not answer as it should; see its log")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Row:
    """One arm's figures."""

    ends: Counter[str]
    kills: int
    seconds: float
    computed: str = "not known"
    """What the first server computed, in words."""

    def line(self, name: str) -> str:
        """The row of the table."""
        failed, ends = self.ends.total() - self.ends["200"], ", ".join(f"{one} {n}" for one, n in self.ends.items())
        cells = (name, self.ends.total(), failed, self.kills, f"{self.seconds:.0f}", self.computed, ends)
        return f"| {' | '.join(map(str, cells))} |"


HEAD = "| | requests | failed | kills | s | first server | ends |\n|---|---|---|---|---|---|---|"


async def storm(url: str, key: str, requests: int, kill: Callable[[], Awaitable[bool]], seed: int) -> Row:
    """Ask so many times while ``kill`` is called at random moments, which says whether it found something to kill."""
    ends, kills, asked, began = Counter[str](), 0, 0, time.monotonic()
    draw = random.Random(seed)

    async def client() -> None:
        nonlocal asked
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers, verify=PLAIN) as session:
            while asked < requests:
                asked += 1
                body = {"model": MODEL, "prompt": text(1_000 + asked), "max_tokens": 12, "ignore_eos": True}
                try:
                    answer = await session.post("/v1/completions", json=body)
                    ends[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    ends[type(error).__name__] += 1

    async def killing() -> None:
        nonlocal kills
        while True:
            await asyncio.sleep(draw.uniform(*PAUSE_S))
            kills += await kill()

    task = asyncio.create_task(killing())
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    task.cancel()
    await asyncio.wait((task,))
    return Row(ends, kills, time.monotonic() - began)


def of_router(peers: Path, name: str, requests: int, seed: int, folder: Path) -> Row:
    """Figures of a router."""
    draw = random.Random(seed + 1)
    with router(peers, name, folder / f"{name}.log") as (url, prefill):

        async def kill() -> bool:
            prefill.kill()
            await asyncio.sleep(draw.uniform(*AWAY_S))
            prefill.start()
            return True

        return asyncio.run(storm(url, "none", requests, kill, seed))


def of_ours(requests: int, seed: int, folder: Path) -> Row:
    """Figures of this appliance; its supervisor starts what was killed."""
    with split_pair(folder) as pair:

        async def kill() -> bool:
            with suppress(OSError, AssertionError):  # It has not started again yet.
                os.kill(await asyncio.to_thread(gateway_of, pair.prefill), signal.SIGKILL)
                return True
            return False

        row = asyncio.run(storm(pair.decode.http, pair.decode.keys["a"], requests, kill, seed))
        found = Counter(one["outcome"] for one in entries(pair.decode, "prefill"))
        return replace(row, computed=", ".join(f"{one} {n}" for one, n in found.most_common()))


def main() -> None:
    """Print a table with a row for each arm."""
    parser = argparse.ArgumentParser(description="Requests that fail while hosts that compute prompts are killed.")
    parser.add_argument("--peers", type=Path, help="virtual environment with the routers; left out: none runs")
    parser.add_argument("--ours", action="store_true", help="run this appliance too: two hosts and a store")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="split-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)  # Sandboxes read what lies in it.
        arms: dict[str, Callable[[], Row]] = {}
        for one in ROUTERS if arguments.peers else ():
            arms[one] = lambda one=one: of_router(arguments.peers, one, arguments.requests, arguments.seed, folder)
        if arguments.ours:
            arms["athanor"] = lambda: of_ours(arguments.requests, arguments.seed, folder)
        print(HEAD, flush=True)
        for one, run in arms.items():
            try:
                print(run().line(one), flush=True)
            except TimeoutError as error:
                log = folder / f"{one}.log"
                print(f"{one}: {error}: {log.read_text()[-800:] if log.exists() else ''}", flush=True)


if __name__ == "__main__":
    main()
