"""What metering costs a streamed token of the whole host side, and its throughput, with intervals of confidence.

``python bench/metered_host.py [--streams 64] [--tokens 256] [--rounds 30] [--front-end http]`` starts one appliance
with a null engine and an audit log, and drives it in short turns of three ways, in all orders: its supervisor counts
nothing and its policy has no prices (``bench/unmetered.py``: the product has no such switch), with prices, and with
prices and a limit of spend, whose reservations go to disk. Between two turns the policy is reloaded in the same
processes: two processes of one program differ by more than what is measured here. Compared is processor time, user and
system: on a machine with other work the clock on the wall says little. Each round gives one difference to its own turn
without a meter, so that what changes slowly is in both; printed is the median difference with its 95 % interval (free
of assumptions on the distribution: ranks). The gateway's own noise is larger than what metering costs it:
``bench/metering.py`` resolves that part. Bars: 2 us a token more in gateway and supervisor, and 1 % of the tokens that
a second of processor time gives. A bar is held or missed where the whole interval says so, and else not resolved.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.selftest.processes import CpuClock
from appliance.supervisor.audit import FLUSH_S
from bench.host import POLICY, Served, drive, null_appliance
from bench.intervals import interval, told
from bench.unmetered import FLAG

MOST_US, MOST_PERCENT = 2.0, 1.0
"""Bars: microseconds a token, and share of the throughput."""

SETTLE_S = FLUSH_S + 0.3
"""After a run, until its last entries are in log and book: a turn has to pay for its own, and for no other's."""

RELOAD_S = 20.0
"""Longest that a policy takes to be in force."""

PRICES = "prices: {currency: EUR, rules: [{models: ['*'], input: 1, cached_input: 0.1, output: 2}]}\n"
UNMETERED = "no meter"
WAYS = {
    UNMETERED: POLICY,
    "prices": POLICY + PRICES,
    "limit of spend": POLICY.replace("limits: {", "limits: {spend_per_month: 1000000, ") + PRICES,
}
"""Way -> its policy."""


def turn_to(way: str, served: Served) -> None:
    """Have the appliance go on in a way: returns once its policy is in force and the entries before are written."""
    flag, loaded = served.state / FLAG, loaded_at(served)
    flag.touch() if way == UNMETERED else flag.unlink(missing_ok=True)
    (served.state / "policy.yaml").write_text(WAYS[way])
    served.process.send_signal(signal.SIGHUP)
    until = time.monotonic() + RELOAD_S
    while loaded_at(served) == loaded:
        if time.monotonic() > until:
            raise RuntimeError("the policy was not reloaded")
        time.sleep(0.05)


def loaded_at(served: Served) -> float:
    """Unix time at which the policy in force was taken."""
    return float(httpx.get(served.ready["admin"] + "/status", timeout=10).json()["policy"]["loaded_at"])


def spent(served: Served, clock: CpuClock, given: argparse.Namespace) -> dict[str, float]:
    """Microseconds of processor time a token, by component and in sum, of one turn after a few tokens to warm up."""
    drive(served, given.front_end, 4, 1, 16)
    time.sleep(SETTLE_S)
    before = clock.read()
    seen = drive(served, given.front_end, given.streams, given.requests, given.tokens)
    time.sleep(SETTLE_S)
    after = clock.read()
    if seen["failures"]:
        raise RuntimeError(f"{seen['failures']} requests failed")
    found = {room: (value - before[room]) / 1e3 / seen["tokens"] for room, value in after.items()}
    return found | {"host": found["gateway"] + found["supervisor"], "all": sum(found.values())}


def verdict(values: list[float], most: float) -> str:
    """Whether the median is below a bar, as far as the values can tell."""
    low, high = interval(values)
    return "held" if high <= most else "missed" if low > most else "not resolved"


def show(runs: dict[str, list[dict[str, float]]]) -> bool:
    """Print figures and verdicts; returns whether a bar is missed."""
    missed = False
    for way, several in runs.items():
        rooms = "  ".join(f"{room} {told([one[room] for one in several])}" for room in ("gateway", "supervisor", "all"))
        print(f"{way:>15}  {rooms}")
    for way in [way for way in runs if way != UNMETERED]:
        pairs = list(zip(runs[way], runs[UNMETERED], strict=True))
        for room in ("gateway", "supervisor"):
            print(f"{way:>15}  {room} {told([one[room] - other[room] for one, other in pairs])} us more")
        host = [one["host"] - other["host"] for one, other in pairs]
        less = [100 * (1 - other["all"] / one["all"]) for one, other in pairs]
        # What all of the host's components do beside metering is noise here: the null engine's throughput is theirs.
        paid = [100 * (one["host"] - other["host"]) / other["all"] for one, other in pairs]
        print(f"{way:>15}  both {told(host)} us more: bar {MOST_US:g}, {verdict(host, MOST_US)}")
        print(f"{way:>15}  throughput {told(less)} % less: bar {MOST_PERCENT:g}, {verdict(less, MOST_PERCENT)}")
        print(f"{way:>15}  of it in gateway and supervisor {told(paid)} %: {verdict(paid, MOST_PERCENT)}")
        missed |= "missed" in (verdict(host, MOST_US), verdict(less, MOST_PERCENT))
    return missed


def main() -> int:
    """Measure, print, and give 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description="What metering costs a streamed token.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="requests of each stream in a turn")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each way")
    parser.add_argument("--front-end", default="http")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    orders = itertools.cycle(itertools.permutations(WAYS))
    program = (str(Path(__file__).with_name("unmetered.py")),)
    with null_appliance(0, policy=WAYS["prices"], audit=True, program=program) as served:
        clock = CpuClock(served.process.pid, served.sandboxes())
        for number, order in enumerate(itertools.islice(orders, given.rounds + 1)):
            for way in order:
                turn_to(way, served)
                one = spent(served, clock, given)
                if number:  # the first round warms up
                    runs[way].append(one)
    print(f"{given.rounds} rounds of {given.streams} x {given.requests} x {given.tokens} tokens, {given.front_end}")
    print("processor time (user + system), us a token: medians and their 95 % intervals")
    return int(show(runs))


if __name__ == "__main__":
    sys.exit(main())
