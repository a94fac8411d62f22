"""A stranger's hour: attacks without a credential, one after the other, while two tenants work.

Starts the real appliance on one core, and on another its tenants' clients and one attack after the other, each at its
fixed rate from 1 and from 64 addresses. Plain text over IPv4, then TLS over IPv6, where every attacker has a network
(/64) of its own; that needs root, for a network namespace. For each attack: which requests of the tenants failed, their
time to first token against that without an attack, memory and descriptors of the gateway. The first row is a control:
the gateway stands still for two seconds or more, which the time to first token has to show.

Run: ``python bench/door.py [--short] [--only NAME ...] [--seconds 30] [--addresses 1 64] [--ground plain4 tls6]
[--json FILE]``. The exit code is 0 when every bar of ``bench/door_view.py`` holds, 1 when one does not or the control
was not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.door_ground import (
    GROUNDS,
    IN_NAMESPACE,
    Door,
    Ground,
    Others,
    Watch,
    enter_namespace,
    give_addresses,
    serving,
)
from bench.door_tenants import DEADLINE_S, Asked, Work
from bench.door_view import (
    HEAD,
    MOST_TTFT_RATIO,
    QUIET_S,
    Calm,
    Reached,
    Row,
    breaches,
    is_back,
    line,
    quantile,
    row_of,
    whole_row,
    within,
)
from bench.strangers import ATTACKS, MOST_ADDRESSES, Attack

WARM_S = 5.0
"""Seconds of the tenants' work that nothing is taken from: first grammars, pools and pages."""

CALM_S = 20.0
SECONDS = 30.0
"""Of an attack: 240 requests of the tenants, 120 of them on new connections."""

SHORT_CALM_S = 8.0
SHORT_SECONDS = 3.0
"""In the three minutes: the 99th percentile is then taken over all attacks alone."""

STOP_S = 2.0
"""For how long the control stops the gateway; longer where requests take long without an attack (``stop_s``)."""

MOST_STOP_S = 0.8 * DEADLINE_S
"""Beyond it tenants' requests would fail of the control."""

LOOK_S = 0.1

START_S = 60.0
"""Seconds for a client of ours to begin."""


class Lines:
    """A program of ours that writes a JSON line now and then, for the time of a block; killed at its end."""

    def __init__(self, script: str, *arguments: str, given: str = "") -> None:
        self._argv = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        self._given = given
        self._came = threading.Event()

    def heard(self, fields: dict[str, Any]) -> None:
        """Take a line."""
        raise LookupError(fields)

    def __enter__(self) -> Any:
        self._process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._given)
            self._process.stdin.close()
        if not self._came.wait(START_S) or self._process.poll() is not None:
            self.__exit__()
            raise RuntimeError(f"{self._argv[1]} did not begin; its own words are above")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def must_live(self) -> None:
        """Make sure that the program runs still: what it did is no measurement else.

        Raises:
            RuntimeError: it has ended by itself.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"{' '.join(self._argv[1:3])} ended by itself; its own words are above")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with contextlib.suppress(ValueError):  # the last line, cut by the kill
                self.heard(json.loads(text))
                self._came.set()
        self._came.set()


class Tenants(Lines):
    """The tenants' clients, and what became of their requests."""

    def __init__(self, work: Work) -> None:
        super().__init__("door_tenants.py", given=json.dumps(asdict(work)))
        self.asked: list[Asked] = []
        self._begun: list[float] = []

    def heard(self, fields: dict[str, Any]) -> None:
        """Take a line."""
        if "begun" in fields:
            self._begun.append(fields["begun"])
        elif fields:
            self.asked.append(Asked(**fields))

    def settled(self, until: float) -> bool:
        """Whether every request that was due before has ended."""
        return sum(due <= until for due in self._begun) <= sum(one.due <= until for one in list(self.asked))


class Strangers(Lines):
    """An attack."""

    def __init__(self, attack: Attack, door: Door, addresses: int) -> None:
        tls = ["--tls"] if door.authority else []
        places = ["--http", door.http, "--grpc", door.grpc]
        super().__init__("strangers.py", attack.name, *places, "--addresses", str(addresses), *tls)
        self._told: list[dict[str, float]] = []

    def heard(self, fields: dict[str, Any]) -> None:
        """Take a line."""
        self._told.append(fields)

    @property
    def began(self) -> float:
        """When it began."""
        return self._told[0]["at"]

    def reached(self) -> Reached:
        """What it has done so far."""
        first, last = self._told[0], self._told[-1]
        seconds = max(last["at"] - first["at"], 1e-3)
        return Reached(
            (last["done"] - first["done"]) / seconds,
            int(last["most_open"]),
            int(last["refused"]),
            int(last["cut"]),
            (last["cpu_s"] - first["cpu_s"]) / seconds,
        )


@dataclass
class Scene:
    """One appliance with its tenants, and the rows that were measured of it."""

    ground: Ground
    door: Door
    watch: Watch
    tenants: Tenants
    calm: Calm
    since: float
    """When the tenants' requests began to count."""
    others: Others
    rows: list[Row] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def rest(self, seconds: float) -> float:
        """Measure once more without an attack, at the end: what else the machine does changes in an hour, and is to be
        in both arms. Gives the 99th percentile."""
        begin, mark = time.monotonic(), self.others.mark()
        time.sleep(seconds)
        end = time.monotonic()
        others = max(self.calm.others, self.others.share(mark))
        settle(self.tenants, end)
        times = times_between(self.tenants, begin, end)
        self.calm = replace(self.calm, times=self.calm.times + times, others=others)
        return quantile(times, 0.99)

    @property
    def stop_s(self) -> float:
        """Seconds for which the control stops the gateway: twice what breaks the bar."""
        return min(max(STOP_S, 2 * MOST_TTFT_RATIO * self.calm.ttft), MOST_STOP_S)

    def control(self) -> float:
        """Stop the gateway for a moment; gives the ratio of times to first token, which has to show it."""
        begin = time.monotonic()
        os.kill(self.door.gateway(), signal.SIGSTOP)
        time.sleep(self.stop_s)
        os.kill(self.door.gateway(), signal.SIGCONT)
        end = time.monotonic()
        settle(self.tenants, end)
        times = [one.ended - one.due for one in within(self.tenants.asked, begin, end)]
        self.quiet(end, self.calm.memory)
        return quantile(times, 0.99) / self.calm.ttft

    def attack(self, attack: Attack, addresses: int, seconds: float) -> Row:
        """Measure one row."""
        mark = self.others.mark()
        with Strangers(attack, self.door, addresses) as strangers:
            begin = strangers.began
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            reached, end = strangers.reached(), time.monotonic()
            others = self.others.share(mark, strangers.pid)
            strangers.must_live()
            self.tenants.must_live()
        before = self.watch.between(0.0, begin)[-1]
        settle(self.tenants, end)
        back_s = self.quiet(end, before.memory)
        done = time.monotonic()
        samples = [before, *self.watch.between(begin, done)]
        asked = within(self.tenants.asked, begin, done)
        named = (addresses, attack.rate, attack.unit)
        row = row_of(attack.name, named, reached, self.calm, asked, samples, (begin, end), back_s, others)
        self.rows.append(row)
        self.times += times_between(self.tenants, begin, end)
        return row

    def whole(self, back_s: float | None) -> Row:
        """The row over all attacks; what the gateway keeps is measured against the time before the first."""
        asked = within(self.tenants.asked, self.since, time.monotonic())
        return whole_row(self.rows, asked, self.times, self.calm, self.watch.samples, back_s)

    def quiet(self, end: float, memory: int) -> float | None:
        """Wait until the gateway has about so much memory, and its descriptors, again: at most ``QUIET_S`` from the
        attack's end. Gives the seconds."""
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            if any(is_back(one, memory, self.calm.descriptors) for one in self.watch.between(now - 2 * LOOK_S, now)):
                return now - end
            if now > end + QUIET_S:
                return None


def settle(tenants: Tenants, until: float) -> None:
    """Wait until every request that was due before has ended: each has a deadline."""
    give_up = until + DEADLINE_S + 5.0
    while not tenants.settled(until) and time.monotonic() < give_up:
        time.sleep(LOOK_S)


def times_between(tenants: Tenants, begin: float, end: float) -> tuple[float, ...]:
    """Times to the first token of the requests that were due then and answered."""
    return tuple(one.ttft for one in list(tenants.asked) if begin <= one.due <= end and not one.failure)


@contextlib.contextmanager
def scene(ground: Ground, calm_s: float) -> Iterator[Scene]:
    """An appliance on this ground with its tenants at work, for the time of the block; measured for so many seconds
    without an attack.

    Raises:
        RuntimeError: the tenants got no answer.
    """
    with serving(ground) as door, Watch(door) as watch, Tenants(door.work) as tenants:
        time.sleep(WARM_S)
        others = Others(door, tenants.pid)
        begin, mark = time.monotonic(), others.mark()
        time.sleep(calm_s)
        end = time.monotonic()
        share = others.share(mark)
        settle(tenants, end)
        samples, times = watch.between(begin, end), times_between(tenants, begin, end)
        if not samples or not times:
            raise RuntimeError("the tenants got no answer without an attack, so there is nothing to compare with")
        calm = Calm(times, samples[-1].memory, max(sample.descriptors for sample in samples), share)
        yield Scene(ground, door, watch, tenants, calm, begin, others)


def choose(ground: Ground, options: argparse.Namespace) -> list[tuple[Attack, int]]:
    """The attacks on a ground, with their addresses. In the three minutes one with TLS has those alone that need it."""
    others_plain = options.short and any(not GROUNDS[name].tls for name in options.ground)
    chosen = [
        attack
        for attack in ATTACKS.values()
        if (not options.only or attack.name in options.only)
        and (ground.tls or not attack.needs_tls)
        and (attack.needs_tls or not ground.tls or not others_plain)
    ]
    return [(attack, addresses) for attack in chosen for addresses in options.addresses]


def measure(ground: Ground, options: argparse.Namespace) -> dict[str, Any] | None:
    """All rows of one appliance, shown as they come; None where no attack is chosen."""
    chosen = choose(ground, options)
    if not chosen:
        return None
    with scene(ground, options.calm) as now:
        holds = f"{now.calm.memory / (1 << 20):.0f} MB, {now.calm.descriptors} descriptors"
        print(
            f"\n{ground.name}: p99 TTFT {now.calm.ttft * 1e3:.0f} ms without an attack, gateway {holds}, other work"
            f" {now.calm.others:.0%}"
        )
        seen = now.control()
        verdict = "seen" if seen > MOST_TTFT_RATIO else "NOT SEEN"
        print(f"control: the gateway stopped for {now.stop_s:.1f} s: TTFT {seen:.0f}x, {verdict}\n{HEAD}", flush=True)
        for attack, addresses in chosen:
            show(now.attack(attack, addresses, options.seconds))
        back_s = now.quiet(time.monotonic(), now.calm.memory)
        rest = now.rest(options.calm)
        print(f"at the end: p99 TTFT {rest * 1e3:.0f} ms without an attack, other work {now.calm.others:.0%}")
        show(whole := now.whole(back_s))
    rows = [asdict(row) | {"breaches": breaches(row)} for row in (*now.rows, whole)]
    passed = seen > MOST_TTFT_RATIO and not any(row["breaches"] for row in rows)
    return {
        "ground": ground.name,
        "calm_ttft": now.calm.ttft,
        "rest_ttft": rest,
        "control": seen,
        "rows": rows,
        "passed": passed,
    }


def show(row: Row) -> None:
    """Print one line, and below it what failed."""
    print(line(row), flush=True)
    for failure in row.failures:
        print(f"{'':<19}{failure}", flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Attacks without a credential while two tenants work.")
    parser.add_argument("--short", action="store_true", help="three minutes: each attack for 3 s from 64 addresses")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, metavar="NAME", help="these attacks; see --list")
    parser.add_argument("--seconds", type=float, help=f"of each attack ({SECONDS:g})")
    parser.add_argument("--calm", type=float, help=f"seconds without an attack before the first ({CALM_S:g})")
    parser.add_argument("--addresses", type=int, nargs="+", help=f"of the attackers, 1 to {MOST_ADDRESSES} (1 64)")
    parser.add_argument("--ground", nargs="+", choices=GROUNDS, default=["plain4", "tls6"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true", help="the attacks, and nothing else")
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:<18} {attack.rate:>6,g} {attack.unit + '/s':<16} {attack.does}")
        return 0
    options.seconds = options.seconds or (SHORT_SECONDS if options.short else SECONDS)
    options.calm = options.calm or (SHORT_CALM_S if options.short else CALM_S)
    options.addresses = options.addresses or ([MOST_ADDRESSES] if options.short else [1, MOST_ADDRESSES])
    if not all(1 <= number <= MOST_ADDRESSES for number in options.addresses):
        parser.error(f"--addresses: 1 to {MOST_ADDRESSES}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the appliance ends as well
    enter_namespace(sys.argv)
    if options.in_namespace:
        give_addresses()
    else:
        print("no network namespace (root and `ip` make one): IPv4 only, on the machine's own loopback")
        options.ground = list(dict.fromkeys(name.replace("6", "4") for name in options.ground))
    found = [figures for name in options.ground if (figures := measure(GROUNDS[name], options)) is not None]
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found and all(figures["passed"] for figures in found) else 1


if __name__ == "__main__":
    sys.exit(main())
