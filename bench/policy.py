"""What large policies cost: check, reload, the event loop's longest gap during a reload, and decisions.

    python bench/policy.py [--tenants N ...] [--groups N ...] [--rounds N] [--profile]

Each tenant has one key. With tenant groups all tenants inherit from them, in turn; without, each says all for itself.
A check is ``athanor policy check`` in a process of its own; a reload is a gateway's, with its
keys and a supervisor that answers at once. Times are processor seconds of that process; the wall time stands beside.
The gap is the longest time between two turns of the event loop, which serves all streams, in wall time; beside it the
most processor time between two turns, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import os
import pstats
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.config_loader import load_config
from appliance.common.control import NamespaceQuery, Namespaces, decode, encode
from appliance.common.keys import KeyRecord, serialise_records
from appliance.gateway.policy_file import ACCOUNTS_A_TURN
from appliance.gateway.process import YOUNG_OBJECTS, Gateway
from appliance.gateway.request.ledger import Ledger
from appliance.operator.demo import DemoOptions, choose_models, claim, prepare_keys, prepare_policy, write_config
from policy.evaluate import evaluate
from policy.limits import Rate, full
from policy.loader import Source, load_policy
from policy.model import PolicySet
from policy.request import AccessRequest, Usage

MODEL = "athanor-mini"
GROUPS = 20
"""Tenant groups from which tenants inherit, in the second row of each size."""
DECISIONS = 20_000
DECISION_TENANTS = 1_000
TAKES = 3
"""Passes over all decisions. The middle take of each leaves out what the host of a virtual machine takes of one: that
is counted as processor time of the process, and it is no part of the decision. Between two takes of one tenant are
those of all others, so none finds its tenant in the processor's cache because of the one before."""
REGION = "eu-central"
RULES = (
    'networks: ["192.0.2.0/24", "10.0.0.0/8"]',
    'hours: ["00:00-24:00"]',
    "regions: [us-east, eu-central]",
    "limits: {kv_tokens: 100000, input_tokens_per_minute: 100000}",
    "end_users: {concurrency: 64}",
)
"""Rules of a tenant in the second figure of decisions, all of which a request passes."""
TURN_S = 0.001
"""Pause between two turns of the task that measures gaps."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tenants", type=int, nargs="+", default=[100, 2_000, 10_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[0, GROUPS], help="tenant groups; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="checks and reloads of each size; the median is shown")
    parser.add_argument("--profile", action="store_true", help="also show where the last reload's time went")
    options = parser.parse_args()
    print("tenants  groups   check cpu s  wall s  MiB   reload cpu s  wall s  gap, wall ms  gap, cpu ms  kept MiB")
    for tenants, groups in itertools.product(options.tenants, options.groups):
        with tempfile.TemporaryDirectory(prefix="ath-", dir="/tmp") as folder:
            configuration = prepare(Path(folder), tenants, groups)
            checks = [check(Path(folder)) for _ in range(options.rounds)]
            told = uvloop.run(reloads(configuration, tenants, groups, options.rounds, profiled=options.profile))
        cpu, wall, peak = map(statistics.median, zip(*checks, strict=True))
        size = f"{tenants:>7,}  {groups:>6}"
        print(
            f"{size}   {cpu:>11.2f}  {wall:>6.2f}  {peak:>3.0f}   {told.cpu:>12.2f}  {told.wall:>6.2f}"
            f"  {told.gap * 1e3:>13.1f}  {told.worked * 1e3:>10.1f}  {told.kept:>8.1f}"
        )
    largest = max(options.tenants)
    print(
        f"\na new rate for each of {largest:,} tenants, all with accounts: "
        f"{rescaling(largest) * 1e3:.0f} ms in the longest turn"
    )
    texts = policy_text(DECISION_TENANTS), ruled_text(DECISION_TENANTS)
    for text, rules in zip(texts, (0, len(RULES) * DECISION_TENANTS), strict=True):
        one, first, request = decisions(text)
        print(f"\nwith {DECISION_TENANTS:,} tenants and {rules:,} rules, processor time, p50 and p99 of {DECISIONS:,}:")
        print(
            f"one decision {one[0]:.1f} and {one[1]:.1f} us, in the first pass alone {first[0]:.1f} and "
            f"{first[1]:.1f} us"
        )
        print(f"a request's admission, reservation and settlement {request[0]:.1f} and {request[1]:.1f} us")
    return 0


def policy_text(tenants: int, groups: int = 0, *, weight: int = 1, limit: str = "concurrency") -> str:
    """Return a policy of so many tenants with one key each, a line a tenant; another weight is another policy."""
    if groups:
        return grouped_text(tenants, groups, weight)
    lines = (
        f'  t{number:05}: {{credentials: ["key:k{number:05}"], models: ["{MODEL}"], weight: {weight}, '
        f"limits: {{{limit}: {number % 64 + weight}}}}}\n"
        for number in range(tenants)
    )
    return "version: 1\ntenants:\n" + "".join(lines)


def ruled_text(tenants: int) -> str:
    """Return a policy of so many tenants, each with all of ``RULES``."""
    rules = "".join(f", {rule}" for rule in RULES)
    return "version: 1\ntenants:\n" + "".join(
        f'  t{number:05}: {{credentials: ["key:k{number:05}"], models: ["{MODEL}"]{rules}}}\n'
        for number in range(tenants)
    )


def grouped_text(tenants: int, groups: int, weight: int) -> str:
    """Return a policy whose tenants have a limit of their own, and all else from groups, each of which inherits from
    one before it, and from defaults."""
    lines = [
        f"  g{number:02}: {{models: [{MODEL}], weight: {weight}, limits: {{requests_per_minute: {600 + number}}}"
        f"{f', inherits: g{number // 2:02}' if number else ''}}}\n"
        for number in range(groups)
    ]
    lines += ["tenants:\n"]
    lines += [
        f'  t{number:05}: {{credentials: ["key:k{number:05}"], inherits: g{number % groups:02}, '
        f"limits: {{concurrency: {number % 64 + weight}}}}}\n"
        for number in range(tenants)
    ]
    return "version: 1\ndefaults: {features: {tools: false}}\ntenant_groups:\n" + "".join(lines)


def prepare(folder: Path, tenants: int, groups: int) -> Path:
    """Write configuration, policy and keys of a demo with so many tenants; returns the configuration's path."""
    claim(folder)
    prepare_keys(folder)
    prepare_policy(folder)
    path = write_config(folder, DemoOptions(http_port=0, grpc_port=0, admin_port=0), choose_models(()))
    (folder / "policy.yaml").write_text(policy_text(tenants, groups))
    now = datetime.now(UTC)
    records = {f"k{number:05}": KeyRecord(os.urandom(32), now) for number in range(tenants)}
    (folder / "credentials.json").write_text(serialise_records(records))
    return path


def check(folder: Path) -> tuple[float, float, float]:
    """Return processor time, wall time and memory in MiB of one ``athanor policy check``."""
    command = [sys.executable, "-m", "appliance.operator.cli", "policy", "check", str(folder / "policy.yaml")]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the check ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began, usage.ru_maxrss / 1024


@dataclass(frozen=True, slots=True)
class Reload:
    """What reloads of one size cost, in seconds."""

    cpu: float
    wall: float
    gap: float
    """Longest time between two turns of the event loop, of all reloads."""
    worked: float
    """Most processor time of the process between two turns: what the gap would be on an idle machine, at most."""
    kept: float
    """MiB that the process has grown by."""


async def reloads(path: Path, tenants: int, groups: int, rounds: int, *, profiled: bool) -> Reload:
    """Reload a policy of another content several times; times are medians, gaps are maxima."""
    policy = path.parent / "policy.yaml"
    policy.write_text(policy_text(1))
    gateway = Gateway(load_config(path), reread=lambda: load_config(path))

    def answer(message: object) -> None:
        if isinstance(message, NamespaceQuery):
            keys = {name: os.urandom(32).hex() for name in message.tenants}
            asyncio.get_running_loop().call_soon(lambda: gateway._namespaces.take(decode(encode(Namespaces(keys)))))

    gateway._namespaces._tell = answer  # the supervisor's part, without its process
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    before, kept = resident(), 0.0
    found: list[tuple[float, ...]] = []
    for number in range(rounds):
        policy.write_text(policy_text(tenants, groups, weight=number + 2))
        ledger = gateway._service.ledger
        for name in ledger.policy.tenants:
            ledger.rates(name)  # Every tenant has an account, as after a call.
        watching = asyncio.create_task(longest_gap())
        await asyncio.sleep(0.05)
        profile = cProfile.Profile() if profiled and number == rounds - 1 else None
        if profile:
            profile.enable()
        began, spent = time.monotonic(), time.process_time()
        outcome = await gateway.reload()
        spent, taken = time.process_time() - spent, time.monotonic() - began
        if profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        if not outcome.ok:
            raise SystemExit("\n".join((outcome.message, *outcome.problems)))
        await asyncio.sleep(0.05)
        watching.cancel()
        found.append((spent, taken, *await watching))
        kept = kept or resident() - before
    spent, taken, gaps, worked = zip(*found, strict=True)
    return Reload(statistics.median(spent), statistics.median(taken), max(gaps), max(worked), kept)


def rescaling(tenants: int) -> float:
    """Return the processor time of the longest turn in which a policy comes into force that changes the request rate of
    every tenant."""
    before, after = (
        load_policy([Source("p", policy_text(tenants, weight=weight, limit="requests_per_minute"))])
        for weight in (1, 2)
    )
    ledger = Ledger(before, dict.fromkeys(before.tenants, bytes(32)))
    for name in before.tenants:
        ledger.rates(name)
    began = time.process_time()
    ledger.replace(after, dict.fromkeys(after.tenants, bytes(32)))
    longest, more = time.process_time() - began, True
    while more:
        began = time.process_time()
        more = ledger.catch_up(ACCOUNTS_A_TURN)
        longest = max(longest, time.process_time() - began)
    return longest


async def longest_gap() -> tuple[float, float]:
    """Return, when cancelled, the longest time between two turns of the loop in seconds, less the pause; and the most
    processor time of this process between two turns."""
    longest = most = 0.0
    last, spent = time.monotonic(), time.process_time()
    try:
        while True:
            await asyncio.sleep(TURN_S)
            now, used = time.monotonic(), time.process_time()
            longest, most = max(longest, now - last - TURN_S), max(most, used - spent)
            last, spent = now, used
    except asyncio.CancelledError:
        return longest, most


def resident() -> float:
    """Return this process's memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def decisions(text: str) -> tuple[tuple[float, float], ...]:
    """Return p50 and p99 in microseconds: of a decision, as the middle of its ``TAKES``; of the first takes alone; and
    of a request's two decisions with their accounts."""
    policy = load_policy([Source("policy.yaml", text)])
    ledger = Ledger(policy, dict.fromkeys(policy.tenants, bytes(32)), region=REGION)
    drawn = random.Random(1).choices(list(policy.tenants), k=DECISIONS)
    rate, now = Rate(600), time.monotonic()
    usage = Usage(concurrency=0, request_bucket=full(rate, now), token_bucket=full(rate, now))
    takes = [[taken(policy, ask(name), usage, now) for name in drawn] for _ in range(TAKES)]
    ones = [sorted(times)[TAKES // 2] for times in zip(*takes, strict=True)]
    requests: list[int] = []
    for name in drawn:
        began = time.thread_time_ns()
        reservation = ledger.admit(name, MODEL, 20)
        reservation.reserve(10, 20, 100)
        reservation.settle(10, 20)
        requests.append(time.thread_time_ns() - began)
    return middle_and_worst(ones), middle_and_worst(takes[0]), middle_and_worst(requests)


def ask(tenant: str) -> AccessRequest:
    """Return a counted request of a tenant, within all of its rules."""
    return AccessRequest(
        tenant=tenant, model=MODEL, input_tokens=10, max_output_tokens=20, address="10.1.2.3", unix_s=0.0, region=REGION
    )


def taken(policy: PolicySet, access: AccessRequest, usage: Usage, now: float) -> int:
    """Return the nanoseconds of processor time of one decision."""
    began = time.thread_time_ns()
    decision = evaluate(policy, access, usage, now)
    spent = time.thread_time_ns() - began
    assert decision.allowed
    return spent


def middle_and_worst(times_ns: list[int]) -> tuple[float, float]:
    """Return p50 and p99, in microseconds."""
    cuts = statistics.quantiles(times_ns, n=100)
    return cuts[49] / 1e3, cuts[98] / 1e3


if __name__ == "__main__":
    sys.exit(main())
