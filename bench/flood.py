"""What a flood of requests at the gateway takes from all others: engine, supervisor, and other tenants.

Tenant alpha sends requests over many connections as fast as they are refused (``--shape refused``: of a model that does
not exist) or answered (``short``: one token each, a refusal where that is beyond its rate). Tenant beta has answers
computed, one behind the other, and sends a short request now and then. The gateway's loop takes turns with its own nice
value (``NICENESS``) and with 0, so that a machine that others use moves both. Told of each arm: beta's tokens a
second and its time to the first token, answers of the flood, processor time of the parts, how long the two loops
were ready and had no core, and how late a program of nice value 0 beside the supervisor woke up. ``hangs`` counts
sandboxes that have answered no probe for 5 s, and ``own_nice`` is what the gateway has decided by itself, which
``--own`` leaves as it is.

``--one-core`` leaves the appliance one processor, and the clients another; ``--grouped`` starts it in a cgroup of
version 1 that is not the root, as in a container, where sandboxes weigh a quarter.

Run as root: ``python bench/flood.py --model DIR [--seconds 60] [--one-core] [--grouped] [--shape refused|short|none]``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator.precedence import NICENESS
from bench.process_times import tree
from bench.residency_zipf import CLIENT_NICENESS
from bench.victim import request_bytes
from tests.system.conftest import Appliance, running

CONNECTIONS = 48
STREAMS = 2
"""Answers of the victim that are computed at a time, one behind the other."""
STREAM_TOKENS = 16
"""Tokens of one, counted when it has ended: few beside those of a turn, many beside the time of a request."""
ASK_GAP_S = 0.2
"""Seconds between two short requests of the victim."""
TURN_S = 5.0
SETTLE_S = 1.0
"""Seconds after a turn began that are not counted."""
CANARY_S = 0.02
BEFORE_S = 6.0
"""Seconds of flood before the first turn: by then the gateway has decided about its nice value by itself."""
PR_SET_PDEATHSIG = 1
GROUP = Path("/sys/fs/cgroup/cpu/athanor-bench-flood")

CANARY = """
import sys, time
period = float(sys.argv[1])
while True:
    before = time.monotonic()
    time.sleep(period)
    print(before, time.monotonic() - before - period, flush=True)
"""


class Arm:
    """What was seen while the gateway's loop had one nice value."""

    def __init__(self, niceness: int | None) -> None:
        self.niceness = niceness
        self.seconds = 0.0
        self.spans = list[tuple[float, float]]()
        self.used = dict[str, float]()
        """Seconds, by name: processor time of parts, waits for a core."""

    def has(self, moment: float) -> bool:
        """Whether a moment is one of its own."""
        return any(begin <= moment < end for begin, end in self.spans)


def quantiles(found: list[float]) -> dict[str, float]:
    """Middle, 99 of 100 and most, in milliseconds."""
    ordered = sorted(found) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    last = len(ordered) - 1
    return {name: round(1e3 * ordered[min(last, int(part * len(ordered)))], 1) for name, part in places.items()}


def send_flood(address: str, key: str, shape: str, model: str) -> None:
    """Send requests over all connections, the next as soon as the last is answered; prints how many were answered."""
    fields = {"model": "no-such-model" if shape == "refused" else model, "prompt": [9], "max_tokens": 1}
    data = request_bytes(f"http://{address}", key, json.dumps(fields).encode())
    host, _, port = address.rpartition(":")
    selector = selectors.DefaultSelector()
    for _ in range(CONNECTIONS):
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(data)
        selector.register(connection, selectors.EVENT_READ)
    answered, told = 0, time.monotonic()
    while True:
        for event, _ in selector.select():
            connection = event.fileobj  # type: ignore[assignment]
            piece = connection.recv(65_536)
            if not piece:
                raise SystemExit("the flood was cut off")
            answered += piece.count(b"HTTP/1.1 ")
            connection.sendall(data)
        if (now := time.monotonic()) - told > 0.1:
            told = now
            print(now, answered, flush=True)


class Lines(threading.Thread):
    """Pairs of numbers that a program prints."""

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__(daemon=True)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        self.found = list[tuple[float, float]]()
        self.start()

    def run(self) -> None:
        """Read until its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            first, second = line.split()
            self.found.append((float(first), float(second)))

    def end(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        self.join()


class Victim:
    """Tenant beta: streams without end, and a short request now and then."""

    def __init__(self, appliance: Appliance, model: str) -> None:
        self.url, self.key, self.model = appliance.ready["http"], appliance.key("beta"), model
        self.tokens = list[float]()
        """When each token came."""
        self.firsts = list[tuple[float, float]]()
        """When each short request began, and its seconds to the first token."""
        self.ended = threading.Event()
        works = [self._compute] * STREAMS + [self._ask]
        self.threads = [threading.Thread(target=work, args=(number,)) for number, work in enumerate(works)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self.ended.set()
        for thread in self.threads:
            thread.join()

    def _body(self, number: int, tokens: int) -> bytes:
        fields = {"model": self.model, "prompt": [9 + number] * 16, "max_tokens": tokens, "stream": True}
        return json.dumps(fields | {"ignore_eos": True, "temperature": 0}).encode()

    def _answer(self, number: int, tokens: int) -> float:
        """One request; returns the seconds until its first piece with a token."""
        place, first, began = urlsplit(self.url), 0.0, time.monotonic()
        with socket.create_connection((place.hostname, place.port), timeout=120) as connection:
            connection.sendall(request_bytes(self.url, self.key, self._body(number, tokens)))
            text = b""
            while b"[DONE]" not in text and (piece := connection.recv(65_536)):
                first = first or (time.monotonic() - began if b'"text":"' in piece else 0.0)
                text = text[-16:] + piece
        if b"[DONE]" not in text:
            raise SystemExit(f"the victim was refused: {text!r}")
        return first

    def _compute(self, number: int) -> None:
        while not self.ended.is_set():
            self._answer(number, STREAM_TOKENS)
            self.tokens.extend([time.monotonic()] * STREAM_TOKENS)

    def _ask(self, number: int) -> None:
        while not self.ended.is_set():
            began = time.monotonic()
            self.firsts.append((began, self._answer(number, 1)))
            time.sleep(ASK_GAP_S)


def parts_of(appliance: Appliance, model: str) -> dict[str, list[int]]:
    """Processes of the parts, by name."""
    found: dict[str, list[int]] = {}
    for pid in tree([appliance.process.pid]):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        for word in ("gateway", "supervisor"):
            if f"child\0{word}" in command:
                found[word] = [pid]
    found["engine"] = tree([appliance.sandbox_pid("engine", model)])
    return found


def spent(parts: dict[str, list[int]]) -> dict[str, float]:
    """Seconds until now: processor time of each part, and how long the two loops were ready and had no core."""
    found = {}
    for name, pids in parts.items():
        ran = waited = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    took = (task / "schedstat").read_text().split()
                    ran, waited = ran + int(took[0]), waited + int(took[1]) * (int(task.name) == pid)
        found[name] = ran / 1e9
        if name != "engine":
            found[f"{name} ready"] = waited / 1e9
    return found


def take_turns(arms: list[Arm], parts: dict[str, list[int]], seconds: float) -> None:
    """Give the gateway's loop one nice value after the other, for so many seconds in all."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until or number % len(arms):
        arm = arms[number % len(arms)]
        if arm.niceness is not None:
            os.setpriority(os.PRIO_PROCESS, parts["gateway"][0], arm.niceness)
        time.sleep(SETTLE_S)
        begin, before = time.monotonic(), spent(parts)
        time.sleep(TURN_S - SETTLE_S)
        end, after = time.monotonic(), spent(parts)
        arm.spans.append((begin, end))
        arm.seconds += end - begin
        for name, value in after.items():
            arm.used[name] = arm.used.get(name, 0.0) + value - before[name]
        number += 1


def figures(arm: Arm, victim: Victim, flood: Lines | None, canary: Lines) -> dict[str, Any]:
    """What is printed of an arm."""
    answers = 0.0
    for begin, end in arm.spans if flood is not None else ():
        assert flood is not None
        inside = [count for moment, count in flood.found if begin <= moment < end]
        answers += inside[-1] - inside[0] if inside else 0
    return {
        "tokens_per_s": round(sum(map(arm.has, victim.tokens)) / arm.seconds, 1),
        "first_token_ms": quantiles([took for began, took in victim.firsts if arm.has(began)]),
        "flood_per_s": round(answers / arm.seconds),
        "percent_of_a_core": {name: round(100 * used / arm.seconds, 1) for name, used in arm.used.items()},
        "late_ms": quantiles([late for moment, late in canary.found if arm.has(moment)]),
    }


def prepare(cpus: set[int], *, grouped: bool, niceness: int | None = None) -> None:
    """Give a program the appliance's processors and cgroup, and have it end with the bench."""
    if niceness is not None:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.sched_setaffinity(0, cpus)
    if grouped:
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def group(*, used: bool) -> Iterator[None]:
    """A cgroup below the root for the time of a block."""
    if used:
        GROUP.mkdir(exist_ok=True)
    yield
    if used:
        GROUP.rmdir()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start an appliance, flood it and watch."""
    arms = [Arm(None)] if options.own else [Arm(NICENESS), Arm(0)]
    every = sorted(os.sched_getaffinity(0))
    own, clients = ({every[-1]}, {every[0]}) if options.one_core else (set(every), set(every))
    place = partial(prepare, own, grouped=options.grouped)
    with contextlib.ExitStack() as stack:
        stack.enter_context(group(used=options.grouped))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        saved = "--checkpoints", str(options.folder or folder / "saved")
        arguments = "--model", str(options.model), *saved
        appliance = stack.enter_context(running(folder / "state", *arguments, preexec_fn=place))
        model = options.model.name
        with appliance.openai("beta") as client:
            client.completions.create(model=model, prompt="hello", max_tokens=4, temperature=0)
        time.sleep(options.rest)  # Checkpoints are made.
        os.setpriority(os.PRIO_PROCESS, os.getpid(), CLIENT_NICENESS)
        os.sched_setaffinity(0, clients)
        canary = Lines([sys.executable, "-ISc", CANARY, str(CANARY_S)], preexec_fn=partial(place, niceness=0))
        stack.callback(canary.end)
        victim = Victim(appliance, model)
        stack.callback(victim.stop)
        flood = None
        if options.shape != "none":
            words = ["--client", urlsplit(appliance.ready["http"]).netloc, appliance.key("alpha"), options.shape]
            flood = Lines([sys.executable, __file__, "--model", "athanor-mini", *words])
            stack.callback(flood.end)
        time.sleep(BEFORE_S)
        parts = parts_of(appliance, model)
        decided = os.getpriority(os.PRIO_PROCESS, parts["gateway"][0])
        take_turns(arms, parts, 2 * options.seconds)
        hangs = appliance.log.read_text(errors="replace").count("sandbox hangs")
        found: dict[str, Any] = {
            f"nice {arm.niceness if arm.niceness is not None else decided}": figures(arm, victim, flood, canary)
            for arm in arms
        }
    how = {"shape": options.shape, "one_core": options.one_core, "grouped": options.grouped, "own_nice": decided}
    return how | found | {"hangs": hangs, "load": os.getloadavg()[0]}


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="keeps checkpoints for the next run")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each arm")
    parser.add_argument("--rest", type=float, default=20.0, help="seconds before the flood")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--grouped", action="store_true")
    parser.add_argument("--own", action="store_true", help="no turns: the gateway decides by itself")
    parser.add_argument("--shape", choices=("refused", "short", "none"), default="refused")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        address, key, shape = options.client
        send_flood(address, key, shape, str(options.model))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the appliance ends as well
    options.model = options.model.resolve()
    print(json.dumps(measure(options), indent=2), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
