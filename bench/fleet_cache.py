"""Cached tokens of two hosts behind nginx, beside what one host with all blocks finds: ``python -m bench.fleet_cache``.

Two real appliances with real engines and KV pools that evict nothing, behind the real nginx with the recipe of
``deploy/fleet``. The requests of a scaled Mooncake trace come one after the other, so that each finds all that was
computed before it on its host. The bound is what one cache of unlimited size finds in them (whole blocks, never the
last token). Answers are shorter than the trace's, on which no prefix depends. The arms have prompts of their own
seeds, so that none finds what another left:

* ``one host``: every request names one session, so one host has all. It has to reach the bound, else the others say
  nothing;
* ``sessions``: every request names its session in ``x-session-affinity``. A session is what shares a chain of prefixes:
  a request goes on with the session that brought the last of the blocks with which it begins, where these are at least
  two (all requests of the trace begin with one) and half of that session's last prompt
  (``bench.simulation.traffic.sessions_of``);
* ``prefixes``: the same, where a session is all requests that have two blocks in common at their begin;
* ``none``: the header is left out, and the router puts each request anywhere. The control.

Sessions are named anew from ``--name``, so another name puts them on other hosts. The verdict is on ``sessions``. Run
as root, with nginx installed: ``python -m bench.fleet_cache TRACE [--model DIR] [--requests N] [--output N]
[--name WORD] [--json]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from appliance.gateway.front.affinity import HEADER
from appliance.operator.bench.traces import TraceRequest, read_trace
from appliance.operator.bench.workload import Load, Planned, Shape, parse_load, plan
from appliance.operator.cli.bench_target import KV_BLOCK, Target, own_appliance
from bench.simulation.traffic import sessions_of
from tests.appliance.operator.bench.prefix_bound import prefix_bound
from tests.system.routers import Certificates, free_port, nginx_router

ROOT = Path(__file__).resolve().parents[1]

BAR = 0.95
"""Least part of the bound that sessions have to find."""

KV_BYTES = 1 << 30
"""KV of each host: the trace's tokens of all arms take 0.4 GB of it with the model of 260,000 weights."""

SYSTEM_BLOCKS = 1
"""Blocks with which every request of the trace begins."""

FLEET_KEY = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Found:
    """What one arm found."""

    arm: str
    sessions: int
    """Names that were sent; 0: none."""
    requests: int
    failed: int
    hosts: dict[str, int]
    """Requests that each host answered."""
    prompt_tokens: int
    cached_tokens: int
    bound: int
    """Tokens that one host with all blocks would have found."""

    @property
    def share(self) -> float:
        """Part of the bound that was found."""
        return self.cached_tokens / self.bound


def arms(trace: Sequence[TraceRequest], name: str) -> dict[str, list[str] | None]:
    """Return the session that each request names, by arm; None: no request names one. Pure."""
    heads = [str(one.hash_ids[: SYSTEM_BLOCKS + 1]) for one in trace]
    numbers = {head: number for number, head in enumerate(dict.fromkeys(heads))}
    return {
        "one host": [f"{name}-all"] * len(trace),
        "sessions": [f"{name}-{session}" for session, _ in sessions_of(trace)],
        "prefixes": [f"{name}-p{numbers[head]}" for head in heads],
        "none": None,
    }


@contextlib.contextmanager
def two_hosts(model: Path | None, certificates: Certificates) -> Iterator[tuple[int, Target]]:
    """Two appliances with one fleet key and one set of credentials behind nginx: its port, and the first appliance."""
    key = certificates.folder / "fleet.key"
    key.write_text(FLEET_KEY)
    tls = {"certificate": str(certificates.folder / "host.pem"), "key": str(certificates.folder / "host.key")}

    def first(_: Path, config: dict[str, Any]) -> None:
        config["listen"] |= {"tls": tls, "fleet_key": str(key), "trusted_proxies": ["127.0.0.1"]}

    with own_appliance(model, KV_BYTES, "auto", adjust=first) as one:

        def second(state: Path, config: dict[str, Any]) -> None:
            first(state, config)
            for name in ("credentials.json", "pepper"):
                shutil.copyfile(one.state / name, state / name)

        with own_appliance(model, KV_BYTES, "auto", adjust=second) as other:
            port, addresses = free_port(), [target.url.rpartition("//")[2] for target in (one, other)]
            with nginx_router(ROOT, certificates, addresses, port):
                yield port, one


def ask(client: httpx.Client, model: str, planned: Planned, session: str | None) -> tuple[str, int, int]:
    """Send one request; gives the host that answered, and the prompt's tokens and those of it that were cached. The
    host of an answer that is none is empty."""
    body = {"model": model, "prompt": list(planned.prompt), "max_tokens": planned.output_tokens, "ignore_eos": True}
    try:
        answer = client.post("/v1/completions", json=body, headers={} if session is None else {HEADER: session})
        usage = answer.raise_for_status().json()["usage"]
    except httpx.HTTPError:
        return "", 0, 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer.headers["x-host"], usage["prompt_tokens"], cached


def play(client: httpx.Client, model: str, arm: str, plans: list[Planned], names: list[str] | None) -> Found:
    """Send an arm's requests one after the other."""
    hosts, prompt_tokens, cached_tokens = Counter[str](), 0, 0
    for number, planned in enumerate(plans):
        host, prompt, cached = ask(client, model, planned, None if names is None else names[number])
        hosts[host] += 1
        prompt_tokens, cached_tokens = prompt_tokens + prompt, cached_tokens + cached
    failed, bound = hosts.pop("", 0), prefix_bound(plans, KV_BLOCK)
    sent = 0 if names is None else len(set(names))
    return Found(arm, sent, len(plans), failed, dict(hosts), prompt_tokens, cached_tokens, bound)


def run(load: Load, model: Path | None, name: str) -> Iterator[Found]:
    """Play all arms in front of one pair of hosts, and give each as it ends."""
    trace = read_trace(load.path)[: int(load.option("requests", 1 << 30))]
    with tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp") as folder:
        certificates = Certificates.create(Path(folder))
        with two_hosts(model, certificates) as (port, target):
            headers = {"authorization": f"Bearer {target.api_keys[0]}"}
            with httpx.Client(
                base_url=f"https://localhost:{port}", verify=certificates.context(), headers=headers, timeout=60
            ) as client:
                for seed, (arm, names) in enumerate(arms(trace, name).items(), start=1):
                    plans = plan(load, Shape(), tenants=1, seed=seed)
                    yield play(client, target.model, arm, plans, names)


def show(one: Found) -> None:
    """Print one line of the table."""
    hosts = " and ".join(str(number) for number in one.hosts.values())
    print(
        f"{one.arm:9s} {one.sessions:4d} sessions, {hosts:11s} requests, {one.failed} failed; "
        f"{one.cached_tokens:6d} of {one.prompt_tokens} tokens cached, bound {one.bound}: {100 * one.share:.1f} %",
        flush=True,
    )


def main() -> int:
    """Measure and print; 1 where the bar is missed, or the one host misses the bound."""
    parser = argparse.ArgumentParser(description="Cached tokens of two hosts behind nginx.")
    parser.add_argument("trace", type=Path, help="a scaled Mooncake trace")
    parser.add_argument("--model", type=Path, help="folder of the model; left out: the embedded one")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--output", type=int, default=8, help="how many times shorter than the trace's answers are")
    parser.add_argument("--name", default="fleet", help="what the names of sessions begin with")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    load = parse_load(f"trace:{arguments.trace},requests={arguments.requests},output={arguments.output}")
    found = {}
    for one in run(load, arguments.model, arguments.name):
        found[one.arm] = one
        if not arguments.json:
            show(one)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found.values()]))
    well = found["one host"].share == 1 and not any(one.failed for one in found.values())
    met = well and found["sessions"].share >= BAR
    print(f"{'met' if met else 'MISSED'}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
