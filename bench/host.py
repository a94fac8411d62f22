"""The host side alone: what each streamed token costs in processor time when the engine computes nothing.

Starts the appliance with a null engine in its real sandboxes (``engine.backends.null``) and a client in a process of
its own, and divides the processor time of each room by the tokens that arrived. Free running shows the least that a
token costs; paced at 200 streams x 85 steps/s = 17,000 tokens/s it is the rhythm of one large accelerator. What the
sandboxes burn while nothing happens is measured in the same run, before the load, and given apart: ``idle`` is in
microseconds for each token at that row's rate, and the columns of the rooms hold it too.

``python bench/host.py [--streams 1 32 64 200] [--front-end http grpc] [--pace free 11765] [--json]``; ``--front-end``
also takes chat, responses and messages, and http is /v1/completions;
``--api chat responses messages [--rounds 12]`` compares APIs instead, in turns of one run (``bench/host_apis.py``);
``--profile FILE`` writes where the gateway spends its time (cProfile, which slows it: read shares, not times).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from appliance.operator.demo import TENANTS, choose_ports, prepare_keys, run_directory
from appliance.selftest.processes import CpuClock
from bench.host_apis import ApiCost, compare, table
from bench.host_client import APIS, Load

STEP_US = 11_765
"""Microseconds of a step at 85 steps a second."""

IDLE_S = 4.0
"""How long the idle appliance is watched."""

TARGET_S = 6.0
"""About how long a row's load shall last."""

TURN_S = 2.0
"""About how long a turn of a comparison shall last: twelve rounds of three APIs take a minute and a half."""

START_S = 120.0

POLICY = "version: 1\ntenants:\n" + "".join(
    f"  {name}:\n    credentials: ['key:{name}-1']\n    models: ['*']\n    limits: {{requests_per_minute: 1000000, "
    f"tokens_per_minute: 1000000000, concurrency: 512, max_context_tokens: 4096, max_output_tokens: 4000}}\n"
    for name in TENANTS
)


@dataclass(frozen=True)
class Served:
    """A running appliance."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    keys: list[str]
    state: Path
    """Folder of its configuration and policy."""

    def sandboxes(self) -> dict[str, int]:
        """Room to sandbox process."""
        model = httpx.get(self.ready["admin"] + "/status", timeout=10).json()["models"][0]
        return {room: int(model[room]["pid"]) for room in ("engine", "text")}


@contextlib.contextmanager
def null_appliance(  # noqa: PLR0913 - each is one knob of a measurement
    step_us: int,
    profile: Path | None = None,
    *,
    wipe_memory: bool = True,
    policy: str = POLICY,
    max_num_seqs: int = 256,
    audit: bool = False,
    program: tuple[str, ...] = ("-m", "appliance.operator.cli"),
    listen: dict[str, Any] | None = None,
    like: Served | None = None,
    fleet: dict[str, Any] | None = None,
    sandbox: dict[str, Any] | None = None,
    prepare: Callable[[Path], None] | None = None,
) -> Iterator[Served]:
    """An appliance with the null engine, for the time of a block; ``max_num_seqs`` requests run in it at once. With
    ``audit`` it keeps an audit log, and so a usage book; ``program`` is what Python runs as ``athanor``; ``listen``
    are further keys of that section, ``fleet`` and ``sandbox`` are the sections of those names; the credentials are
    those of ``like``, where it is given. ``prepare`` gets the folder with all files before the start."""
    with tempfile.TemporaryDirectory(prefix="athanor-host-") as folder:
        state = Path(folder)
        keys = prepare_keys(state)
        for name in ("credentials.json", "pepper") if like is not None else ():
            (state / name).write_bytes((like.state / name).read_bytes())
        (state / "policy.yaml").write_text(policy)
        http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
        model = {
            "name": "athanor-mini",
            "path": str(embedded_model()),
            "runner": "null",
            "step_us": step_us,
            "kv_bytes": 2 << 30,
            "max_num_seqs": max_num_seqs,
        }
        config = {
            "listen": {"http": http, "grpc": rpc, "admin": admin, **(listen or {})},
            "models": [model],
            "policy": "policy.yaml",
            "credentials": "credentials.json",
            "pepper": "pepper",
            "run_dir": str(run_directory(state)),
            "wipe_memory": wipe_memory,
            **({"audit": {"directory": "audit"}} if audit else {}),
            **({"fleet": fleet} if fleet is not None else {}),
            **({"sandbox": sandbox} if sandbox is not None else {}),
        }
        (state / "athanor.yaml").write_text(json.dumps(config))
        if prepare is not None:
            prepare(state)
        environment = dict(os.environ)
        if profile is not None:
            program = str(Path(__file__).with_name("profiled.py")), str(profile)
        command = [sys.executable, *program, "serve", "--config", str(state / "athanor.yaml")]
        root = Path(__file__).resolve().parents[1]
        with (state / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=root)
        try:
            assert process.stdout is not None
            ready = select.select([process.stdout], [], [], START_S)[0]
            line = process.stdout.readline() if ready else b""
            if not line:
                raise RuntimeError("the appliance did not start:\n" + (state / "log").read_text()[-3000:])
            yield Served(process, json.loads(line), list(keys.values()) if like is None else like.keys, state)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def drive(
    served: Served,
    front_end: str,
    streams: int,
    requests: int,
    tokens: int,
    *,
    repeats: int = 1,
    span_s: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """Run the client to its end; gives what it saw. ``repeats``: how often the prompt's sentence is said; ``span_s``:
    ``arrive_s`` and ``run_s`` of ``Load``."""
    host, port = served.ready["grpc" if front_end == "grpc" else "http"].rpartition("//")[2].rsplit(":", 1)
    load = Load(host, int(port), served.keys, streams, requests, tokens, front_end, repeats, *span_s)
    client = Path(__file__).with_name("host_client.py")
    done = subprocess.run(
        [sys.executable, str(client)], input=json.dumps(asdict(load)).encode(), stdout=subprocess.PIPE, check=True
    )
    return dict(json.loads(done.stdout))


def measure(served: Served, clock: CpuClock, front_end: str, streams: int, tokens: int, rate: float) -> dict[str, Any]:
    """One row: a short run to warm up and to learn the speed, then one of about ``TARGET_S``."""
    warm = drive(served, front_end, streams, 1, tokens)
    speed = rate or warm["tokens"] / max(warm["wall_s"], 1e-3)
    requests = max(1, round(speed * TARGET_S / (streams * tokens)))
    return driven(served, clock, front_end, streams, requests, tokens)


def driven(served: Served, clock: CpuClock, front_end: str, streams: int, requests: int, tokens: int) -> dict[str, Any]:
    """What one run of the client gave and cost."""
    before = clock.read()
    seen = drive(served, front_end, streams, requests, tokens)
    spent = {room: value - before[room] for room, value in clock.read().items()}
    done = max(1, seen["tokens"])
    return {
        "front_end": front_end,
        "streams": streams,
        "tokens": done,
        "failures": seen["failures"],
        "tokens_per_s": done / seen["wall_s"],
        "wall_s": seen["wall_s"],
        "us_per_token": {room: value / 1e3 / done for room, value in spent.items()},
        "client_us_per_token": seen["cpu_s"] / done * 1e6,
        "tokens_per_chunk": done / max(1, seen["chunks"]),
        "gap_p50_ms": quantile(seen["gaps"], 0.5) * 1e3,
        "gap_p99_ms": quantile(seen["gaps"], 0.99) * 1e3,
        "ttft_p50_ms": quantile(seen["firsts"], 0.5) * 1e3,
        "ttft_p99_ms": quantile(seen["firsts"], 0.99) * 1e3,
    }


def idle(clock: CpuClock) -> dict[str, float]:
    """Share of a core that each room uses while nothing happens."""
    before, began = clock.read(), time.monotonic()
    time.sleep(IDLE_S)
    after, wall = clock.read(), time.monotonic() - began
    return {room: (after[room] - before[room]) / 1e9 / wall for room in after}


def quantile(values: list[float], share: float) -> float:
    """Of sorted values; 0 of none."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, by pace: an appliance for each."""
    results = []
    for pace in arguments.pace:
        step_us = 0 if pace == "free" else int(pace)
        profile = arguments.profile and Path(arguments.profile).resolve()
        with null_appliance(step_us, profile) as served:
            clock = CpuClock(served.process.pid, served.sandboxes())
            for front_end in arguments.front_end:
                drive(served, front_end, 4, 1, 64)
            rest = idle(clock)
            for front_end in arguments.front_end:
                for streams in arguments.streams:
                    rate = streams * 1e6 / step_us if step_us else 0.0
                    row = measure(served, clock, front_end, streams, arguments.tokens, rate)
                    row |= {"step_us": step_us, "idle_cores": rest}
                    row["idle_us_per_token"] = sum(rest.values()) * 1e6 / row["tokens_per_s"]
                    results.append(row)
                    if not arguments.json:
                        show(row, first=len(results) == 1)
    return results


def run_apis(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All comparisons, by pace and streams: an appliance for each pace."""
    results = []
    for pace in arguments.pace:
        step_us = 0 if pace == "free" else int(pace)
        with null_appliance(step_us) as served:
            clock = CpuClock(served.process.pid, served.sandboxes())
            for streams in arguments.streams:
                found = _compared(served, clock, arguments, streams, step_us)
                results += [asdict(one) | {"streams": streams, "step_us": step_us} for one in found]
                if not arguments.json:
                    shown = f"{step_us / 1e3:.1f} ms a step" if step_us else "free running"
                    print("\n".join(table(found, streams, shown)), flush=True)
    return results


def _compared(
    served: Served, clock: CpuClock, arguments: argparse.Namespace, streams: int, step_us: int
) -> list[ApiCost]:
    """Compare the APIs at one number of streams; each runs once before, to warm up and to learn the speed."""
    tokens, requests = arguments.tokens, {}
    for api in arguments.api:
        warm = drive(served, api, streams, 1, tokens)
        speed = streams * 1e6 / step_us if step_us else warm["tokens"] / max(warm["wall_s"], 1e-3)
        requests[api] = max(1, round(speed * TURN_S / (streams * tokens)))
    most = max(requests.values())  # as many for each: what a request costs is then in all of them alike
    return compare(arguments.api, arguments.rounds, lambda api: driven(served, clock, api, streams, most, tokens))


def show(row: dict[str, Any], *, first: bool) -> None:
    """One line of the table, at once: a run takes a while."""
    if first:
        print(
            "pace       via       streams  tokens/s | CPU us a token: gateway   text  engine  other   all  (idle)"
            " client | tok/chunk  gap p50    p99  TTFT p50   p99 ms  failed"
        )
    spent = row["us_per_token"]
    pace = f"{row['step_us'] / 1e3:.1f} ms" if row["step_us"] else "free"
    print(
        f"{pace:10s} {row['front_end']:9s} {row['streams']:7d} {row['tokens_per_s']:9.0f} |"
        f" {spent['gateway']:25.2f} {spent['text']:5.2f} {spent['engine']:7.2f}"
        f" {spent['supervisor'] + spent['other']:6.2f} {sum(spent.values()):6.2f} {row['idle_us_per_token']:7.2f}"
        f" {row['client_us_per_token']:6.2f} | {row['tokens_per_chunk']:9.2f} {row['gap_p50_ms']:8.2f}"
        f" {row['gap_p99_ms']:7.2f} {row['ttft_p50_ms']:8.1f} {row['ttft_p99_ms']:7.1f} {row['failures']:10d}",
        flush=True,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a streamed token costs the host.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 64, 200])
    parser.add_argument("--front-end", choices=(*APIS, "grpc"), nargs="+", default=["http", "grpc"])
    parser.add_argument("--api", choices=APIS, nargs="+", help="compare these APIs, in turns of one run")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each API in a comparison")
    parser.add_argument("--pace", nargs="+", default=["free", str(STEP_US)], help="free, or microseconds of a step")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--profile", metavar="FILE", help="where to write the gateway's profile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = run_apis(arguments) if arguments.api else run(arguments)
    if arguments.json:
        print(json.dumps(results))
    return 0 if not any(row["failures"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
