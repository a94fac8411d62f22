"""Prompts on one host and answers on another, against two hosts that do both: ``python -m bench.split``.

Two real appliances and one store. In the arm ``split`` one host computes prompts for the other, which alone is asked;
in the arm ``mixed`` both are asked in turn, and long prompts are those of a tenant that does not share, so that no host
asks the other and none writes to the store. Once it serves, every process of a host is held to a core of its own
(``sched_setaffinity``); store and clients are held to none, and take their time from both cores in both arms. The arms
take turns, and begin in turn.

Tenant ``shy`` has streams with short prompts that decode all the time; tenants ``alpha`` (split) and ``beta`` (mixed)
send long prompts at a steady rate, whatever became of those before. Printed are gaps between chunks of the streams
(ITL, at the client), of all and of those in which a long prompt was under way, first tokens of both, whole blocks of
long prompts that the answering host computed itself, and the usage that clients were told beside that of both hosts'
audit logs.

Run as root: ``python -m bench.split [--rounds 4] [--seconds 30] [--streams 4] [--prompt 2000] [--every 1.0]
[--model mini|wide]``. ``--short`` is one round of ten seconds. ``wide`` is a model of 60 million random weights, whose
prompts take longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx

from appliance.common.catalog import embedded_model
from bench.peer_weights import SHAPE, write_shape
from bench.process_times import tree
from bench.split_load import Load, Seen, Target, Usage, run
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.conftest import PLAIN, as_demos
from tests.system.spilling import Spilling, served
from tests.system.test_fleet_kv import held, wait_until
from tests.system.test_split import DECODE, PREFILL, requests_of, sections

WIDE = SHAPE | {"num_hidden_layers": 4, "vocab_size": 4_096}
"""Matrices of a 0.5B model in four layers: 64 million weights."""

KV_BYTES, STORE_BYTES = 256 << 20, 1 << 30
SETTLE_S = 2.0
"""Before and between arms: what the one before has left is written."""


POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"], kv_export: true, kv_fleet: true}
  beta: {credentials: ["key:b"], models: ["*"]}
  shy: {credentials: ["key:s"], models: ["*"]}
"""


@dataclass(frozen=True, slots=True)
class Arm:
    """What is asked in one arm."""

    name: str
    asked: tuple[Spilling, ...]
    key: str
    """Key of the tenant with the long prompts."""

    @property
    def targets(self) -> list[Target]:
        """The hosts as clients have them."""
        return [Target(one.http, one.keys) for one in self.asked]


def hold(host: Spilling, core: int) -> None:
    """Hold all processes of a host, with the threads that they have, to one core; what they start inherits that."""
    here = str(host.state).encode()
    roots = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and here in _command(one)]
    for pid in tree(roots):
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), {core})


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def hosts(folder: Path, model: dict[str, Any]) -> Iterator[tuple[Spilling, Spilling]]:
    """Start both hosts, the prefill host first."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    sign(folder, (PREFILL, DECODE))
    roles = sections(folder)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        running = stack.enter_context(store(Path(name)))
        print(f"{running.version}, cores {cores}", flush=True)
        found = list[Spilling]()
        for host in (PREFILL, DECODE):
            (folder / host).mkdir()
            members = config(folder, host).model_dump(mode="json") | {"write": "when_computed"}
            kv = {"store": running.address, "size": STORE_BYTES, "ttl": 600, "members": members}
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": {"memory": 2 * KV_BYTES}}
            more = {"kv_store": kv, "sandbox": sandbox, "audit": {"directory": "audit"}, "models": [model]}
            found.append(stack.enter_context(served(folder / host, POLICY, {}, **more, split=roles[host])))
        for one in found:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(SETTLE_S)
        for one, core in zip(found, cores, strict=True):
            hold(one, core)
        yield found[0], found[1]


def at(values: list[float], part: float) -> float:
    """A quantile in milliseconds; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1e3 if ordered else float("nan")


def joined(rounds: list[Seen]) -> Seen:
    """All that one arm's clients saw."""
    whole = Seen()
    for one in rounds:
        for name in ("gaps", "gaps_beside", "short_first", "long_first", "long_second", "long_usage", "total"):
            getattr(whole, name).extend(getattr(one, name))
        whole.failed += one.failed
    return whole


def row(name: str, seen: Seen) -> str:
    """One arm's figures."""
    computed = [one.computed_blocks for one in seen.long_usage]
    cells = (
        f"ITL p50 {at(seen.gaps, 0.5):6.1f} p99 {at(seen.gaps, 0.99):6.1f} max {at(seen.gaps, 1.0):6.1f} ms",
        f"beside long prompts p50 {at(seen.gaps_beside, 0.5):6.1f} p99 {at(seen.gaps_beside, 0.99):6.1f} of "
        f"{len(seen.gaps_beside)}",
        f"TTFT short p50 {at(seen.short_first, 0.5):5.0f} p99 {at(seen.short_first, 0.99):5.0f}",
        f"long p50 {at(seen.long_first, 0.5):5.0f} p99 {at(seen.long_first, 0.99):5.0f} ms",
        f"second token of long p50 {at(seen.long_second, 0.5):5.0f}",
        f"long {len(computed)}, blocks computed there {mean(computed) if computed else 0:.1f} (most "
        f"{max(computed, default=0)})",
        f"tokens {sum(one.completion for one in seen.total)}, failed {seen.failed}",
    )
    return f"{name:6} " + "; ".join(cells)


def charged(both: Sequence[Spilling], count: int) -> tuple[Usage, dict[str, int]]:
    """Sum of the hosts' audit logs once they have so many requests, and how many each host has."""
    found: dict[str, list[dict[str, Any]]] = {}
    until = time.monotonic() + 15
    while sum(map(len, found.values())) < count and time.monotonic() < until:
        time.sleep(0.5)
        found = {one.state.parent.name: requests_of(one) for one in both}
    lines = [line for some in found.values() for line in some]
    total = Usage(
        *(sum(line.get(name, 0) for line in lines) for name in ("input_tokens", "output_tokens", "cached_tokens"))
    )
    return total, {host: len(some) for host, some in found.items()}


def told(usages: list[Usage]) -> Usage:
    """Sum of what clients were told."""
    return Usage(*(sum(getattr(one, name) for one in usages) for name in ("prompt", "completion", "cached")))


def outcomes(host: Spilling) -> dict[str, float]:
    """Counters of the split on a host, by their labels."""
    page = httpx.get(f"{host.admin}/metrics", verify=PLAIN, timeout=20).text
    rows = re.findall(r"^(athanor_split_\w+_total)(\{[^}]*\})? ([0-9.e+]+)$", page, re.MULTILINE)
    return {
        name[14:-6] + "".join(re.findall(r'="([a-z_]+)"', labels)[:1]): float(value) for name, labels, value in rows
    }


def waits(before: dict[str, float], after: dict[str, float], seen: Seen) -> str:
    """What the split's counters say of one round: outcomes, and how long after its outcome a prompt's first token
    came."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    asked = {name[5:]: int(count) for name, count in grown.items() if name.startswith("asked") and count}
    waited = 1e3 * sum(seconds for name, seconds in grown.items() if name.startswith("waited"))
    count = sum(asked.values())
    behind = mean(seen.long_first) * 1e3 - waited / count if count and seen.long_first else float("nan")
    return f"       outcomes {asked}; waited {waited / max(1, count):.0f} ms, first token {behind:.0f} ms behind that"


async def measure(arms: tuple[Arm, Arm], name: str, load: Load, rounds: int) -> dict[str, list[Seen]]:
    """Warm both arms up, then put the load on them in turns."""
    rng, decode = random.Random(1), arms[0].asked[0]
    warm = Load(load.streams, load.stream_prompt, 32, load.long_prompt, 2, 1.0, 3.0)
    found: dict[str, list[Seen]] = {arm.name: [] for arm in arms}
    warmed = {arm.name: await run(arm.targets, name, arm.key, warm, rng) for arm in arms}
    for number in range(rounds):
        for arm in arms if number % 2 else reversed(arms):
            await asyncio.sleep(SETTLE_S)
            before = outcomes(decode)
            seen = await run(arm.targets, name, arm.key, load, rng)
            found[arm.name].append(seen)
            print(row(arm.name, seen), flush=True)
            if arm is arms[0]:
                print(waits(before, outcomes(decode), seen), flush=True)
    for arm_name, seen in warmed.items():
        found[arm_name].append(Seen(total=seen.total, failed=seen.failed))
    return found


def ratio(what: str, split: list[float], mixed: list[float], rounds: Sequence[tuple[list[float], list[float]]]) -> str:
    """How many times longer the p99 is where both hosts do both: of all rounds, of each, and the median of these."""
    by_round = [at(other, 0.99) / at(one, 0.99) for one, other in rounds]
    together = at(mixed, 0.99) / at(split, 0.99)
    each = ", ".join(f"{one:.2f}" for one in by_round)
    return f"{what}, mixed over split: {together:.2f}; by round {each}: median {median(by_round):.2f}"


def report(both: tuple[Spilling, Spilling], found: dict[str, list[Seen]], rounds: int) -> None:
    """Print what all rounds say together."""
    print("\nall rounds together")
    split, mixed = joined(found["split"]), joined(found["mixed"])
    print(row("split", split))
    print(row("mixed", mixed))
    pairs = [(one, other) for one, other in zip(found["split"], found["mixed"], strict=True) if one.gaps]
    print(ratio("p99 of ITL", split.gaps, mixed.gaps, [(one.gaps, other.gaps) for one, other in pairs]))
    beside = [(one.gaps_beside, other.gaps_beside) for one, other in pairs]
    print(ratio("p99 of ITL beside long prompts", split.gaps_beside, mixed.gaps_beside, beside))
    logs, each = charged(both, len(split.total) + len(mixed.total))
    clients = told(split.total + mixed.total)
    same = "the same" if logs == clients else "DIFFERENT"
    print(f"usage of both arms: clients {clients}, audit logs {logs} of requests {each}: {same}")
    print("decode host:", outcomes(both[1]))
    blocks = Counter(one.computed_blocks for one in split.long_usage)
    print("blocks of a long prompt that the decode host computed: times", dict(sorted(blocks.items())))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Prompts apart from answers, against hosts that do both.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2_000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--output", type=int, default=200, help="tokens of a stream's answer")
    parser.add_argument("--model", choices=("mini", "wide"), default="mini")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    rounds, seconds = (1, 10.0) if options.short else (options.rounds, options.seconds)
    load = Load(options.streams, 16, options.output, options.prompt, 8, options.every, seconds)
    with tempfile.TemporaryDirectory(prefix="split-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path, model = embedded_model(), {"name": "athanor-mini", "dtype": "float32", "kv_bytes": KV_BYTES}
        if options.model == "wide":
            path = folder / "wide"
            write_shape(path, WIDE)
            for one in (path, *path.iterdir()):
                one.chmod(0o755 if one.is_dir() else 0o644)
            model = {"name": "wide", "kv_bytes": KV_BYTES}
        print(json.dumps({"model": options.model, "load": str(load)}))
        with hosts(folder, {**model, "path": str(path)}) as both:
            arms = Arm("split", both[1:], "a"), Arm("mixed", both, "b")
            report(both, asyncio.run(measure(arms, str(model["name"]), load, rounds)), rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
