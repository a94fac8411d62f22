"""What metering costs a streamed token: ``bench/host.py`` with and without it, alternating.

``python bench/metered_host.py [--streams 64] [--tokens 256] [--rounds 10] [--front-end http]`` starts three appliances
with null engines and audit logs, and drives one after the other, in alternating order: one whose supervisor counts
nothing in its usage book and whose policy has no prices (``bench/unmetered.py``: the product has no switch, so the
bench hands in a meter that does nothing), one with prices, and one with prices and a limit of spend, whose reservations
go to disk. Compared is processor time, user and system, of all processes of each: on a machine with other work the
clock on the wall says little. Bars: 2 us a token, and 1 % of the tokens that a second of processor time gives.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.selftest.processes import CpuClock
from bench.host import POLICY, Served, drive, null_appliance

MOST_US, MOST_SHARE = 2.0, 0.01
"""Bars: microseconds a token, and share of the throughput."""

SETTLE_S = 0.5
"""After a run, until the last entries are in log and book."""

PRICES = "prices: {currency: EUR, rules: [{models: ['*'], input: 1, cached_input: 0.1, output: 2}]}\n"
UNMETERED = "no meter"
WAYS = {
    UNMETERED: POLICY,
    "prices": POLICY + PRICES,
    "limit of spend": POLICY.replace("limits: {", "limits: {spend_per_month: 1000000, ") + PRICES,
}
"""Way -> its policy."""


def begin(stack: contextlib.ExitStack, way: str) -> tuple[Served, CpuClock]:
    """Start the appliance of a way, for the time of ``stack``."""
    program = ("-m", "appliance.operator.cli")
    if way == UNMETERED:
        program = (str(Path(__file__).with_name("unmetered.py")),)
    served = stack.enter_context(null_appliance(0, policy=WAYS[way], audit=True, program=program))
    return served, CpuClock(served.process.pid, served.sandboxes())


def spent(served: Served, clock: CpuClock, given: argparse.Namespace) -> dict[str, float]:
    """Microseconds of processor time a token, by component and in sum."""
    before = clock.read()
    seen = drive(served, given.front_end, given.streams, given.requests, given.tokens)
    time.sleep(SETTLE_S)
    after = clock.read()
    if seen["failures"]:
        raise RuntimeError(f"{seen['failures']} requests failed")
    found = {room: (value - before[room]) / 1e3 / seen["tokens"] for room, value in after.items()}
    return found | {"all": sum(found.values())}


def middle(values: list[float]) -> str:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):7.2f} ({low:.2f} to {high:.2f})"


def main() -> int:
    """Measure, print, and give 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="What metering costs a streamed token.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="requests of each stream in a run")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each way, in alternating order")
    parser.add_argument("--front-end", default="http")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        started = {way: begin(stack, way) for way in WAYS}
        for way in WAYS:
            spent(*started[way], given)  # to warm up
        for number in range(given.rounds):
            for way in sorted(WAYS, reverse=bool(number % 2)):
                runs[way].append(spent(*started[way], given))
    print(f"{given.rounds} rounds of {given.streams} x {given.requests} x {given.tokens} tokens, {given.front_end}")
    print("processor time (user + system), us a token: medians and quartiles")
    missed = False
    for way, several in runs.items():
        rooms = "  ".join(
            f"{room} {middle([one[room] for one in several])}" for room in ("gateway", "supervisor", "all")
        )
        print(f"{way:>15}  {rooms}")
        if way == UNMETERED:
            continue
        pairs = list(zip(several, runs[UNMETERED], strict=True))
        host = [sum(one[room] - other[room] for room in ("gateway", "supervisor")) for one, other in pairs]
        share = [1 - other["all"] / one["all"] for one, other in pairs]
        less = middle([100 * one for one in share])
        print(f"{'':>15}  more, gateway and supervisor {middle(host)} us; less throughput {less} %")
        missed |= median(host) > MOST_US or median(share) > MOST_SHARE
    print(f"bars ({MOST_US:g} us a token, {100 * MOST_SHARE:g} % of the throughput): {'missed' if missed else 'held'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
