"""What metering costs the host: processor time and waiting of a request, with and without a limit of spend.

``python bench/metering.py`` runs a gateway's ledger and audit feed, and a supervisor's recorder with its log and usage
book, in two processes on a real control socket and a real disk. Each request is admitted, reserved, settled and written
to the log, without sandboxes, sockets of clients or a model: what is left is the account. Three ways alternate: without
prices, with prices, and with prices and a limit of spend, for which the reservation has to be on disk.
Counted is the processor time of both processes, and the time from a reservation to its confirmation. Each round gives a
difference to its own run without prices: printed are their medians with 95 % intervals, by token of ``bench.host``'s
requests, and as a share of ``WHOLE_US``, the processor time of one token of a whole appliance with a null engine, so of
its throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.audit.log import open_log
from appliance.common.control import SpendReserved, Spent, Welcome
from appliance.gateway.generate_request import Principal
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.request.audited_calls import AuditedCalls, Call, Charge
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.sandboxes.spend_records import SpendRecords
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.supervisor.audit import Recorder
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.metering import open_metering
from bench.intervals import told as interval_told
from policy.loader import Source, load_policy

TOKENS = 100
"""Output tokens of each request; the cost of a request is divided by them."""

HOST_TOKENS = 256
"""Output tokens of a request of ``bench/host.py`` and ``bench/metered_host.py``: metering costs by request."""

WHOLE_US = 24.0
"""Processor time of a token of all processes with the null engine, HTTP, 64 streams, least of several (RESULTS)."""

PROMPT = 200
PRICES = "prices: {currency: EUR, rules: [{models: ['*'], input: 1, cached_input: 0.1, output: 2}]}\n"
WAYS = {"no prices": ("", ""), "prices": (PRICES, ""), "limit of spend": (PRICES, "spend_per_month: 1000000, ")}
"""Way -> prices and limits of its policy."""

LIMITS = "requests_per_minute: 1000000, tokens_per_minute: 1000000000, concurrency: 4096"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one way."""

    gateway_us: float
    """Processor time of a request."""
    supervisor_us: float
    waits_ms: tuple[float, ...]
    """From reservation to confirmation."""


def supervise(folder: Path, pipe: Connection) -> None:
    """The supervisor's part, until the pipe has a word; answers with its processor time."""

    async def run() -> None:
        audit = open_log(folder / "audit")
        server: ControlServer
        metering = open_metering(folder / "audit", audit.name, audit.size, lambda *sent: server.publish(*sent))
        recorder = Recorder(audit, lambda state: server.publish(state, ()), metering=metering)
        metering.written = recorder.flush
        server = ControlServer(
            folder / "c", Welcome(1, "s", "l", []), lambda: None, lambda: None, lambda _: None, on_audited=recorder.take
        )
        server.on_spend = metering.take
        server.open()
        tasks = [asyncio.create_task(recorder.run()), asyncio.create_task(metering.run())]
        while True:
            pipe.send(processor_s())
            word = await asyncio.to_thread(pipe.recv)
            if word == "stop":
                break
            await recorder.flush()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        await recorder.close()
        metering.close()

    asyncio.run(run())


def processor_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class House:
    """A gateway's account beside a supervisor."""

    def __init__(self, folder: Path) -> None:
        self.pipe, end = multiprocessing.get_context("fork").Pipe()
        self.child = multiprocessing.get_context("fork").Process(target=supervise, args=(folder, end))
        self.child.start()
        self.pipe.recv()
        self.link = SupervisorLink(folder / "c")
        self.ledgers = {name: Ledger(policy(*texts), {"t": b"k" * 32}) for name, texts in WAYS.items()}
        self.spend = SpendRecords(self.link.tell, self.ledgers["limit of spend"].spends.take)
        self.feed = AuditFeed(self.link.report)
        self.calls = AuditedCalls(self.feed, {"m"})
        self.number = 0

    def take(self, message: object, _fds: tuple[int, ...]) -> None:
        """Take what the supervisor says."""
        if isinstance(message, SpendReserved):
            self.spend.take_reserved(message)
        elif isinstance(message, Spent):
            self.spend.take_spent(message)

    def supervisor_s(self) -> float:
        """Processor time of the supervisor, once it has written what it has."""
        self.pipe.send("flush")
        return float(self.pipe.recv())

    async def request(self, way: str, waits: list[float]) -> None:
        """Account for one request."""
        self.number += 1
        call = Call(f"req_{os.getpid():08x}{self.number:016x}", "m", "chat")
        one = self.ledgers[way].admit("t", "m", TOKENS)
        one.reserve(PROMPT, TOKENS, 10_000)
        if one.reserved_cost:
            began = time.perf_counter()
            await self.spend.reserve(call.request_id, "t", one.reserved_cost)
            waits.append(1000 * (time.perf_counter() - began))
        price = one.cost(PROMPT, 0, TOKENS)
        charge = Charge(PROMPT, 0, TOKENS, price, reserved=one.reserved_cost > 0)
        self.calls.served(Principal("t", "key:k"), call, one.decision, charge, None)
        one.settle(PROMPT, TOKENS)

    async def run(self, way: str, requests: int, together: int) -> Figures:
        """Account for many requests, so many at once."""
        waits: list[float] = []
        before, supervisor = processor_s(), self.supervisor_s()

        async def some() -> None:
            for _ in range(requests // together):
                await self.request(way, waits)
                await asyncio.sleep(0)

        await asyncio.gather(*(some() for _ in range(together)))
        while self.feed.flush():  # noqa: ASYNC110 - the feed tells nobody
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        gateway = processor_s() - before
        return Figures(1e6 * gateway / requests, 1e6 * (self.supervisor_s() - supervisor) / requests, tuple(waits))


def policy(prices: str, limits: str):  # type: ignore[no-untyped-def]
    """A policy of one tenant."""
    text = (
        f"version: 1\n{prices}tenants: {{t: {{credentials: ['key:k'], models: ['*'], limits: {{{limits}{LIMITS}}}}}}}\n"
    )
    return load_policy([Source("p.yaml", text)])


async def measure(folder: Path, requests: int, rounds: int) -> None:
    """Run all ways in turn, and print the medians."""
    house = House(folder)
    attached = asyncio.create_task(house.link.run(house.take, lambda: None))
    while house.link.socket is None:  # noqa: ASYNC110 - the link tells nobody
        await asyncio.sleep(0.01)
    print(f"{requests} requests of {PROMPT} and {TOKENS} tokens, {rounds} rounds; us of processor time a request")
    print(f"{'':>16} {'at once':>8} {'gateway':>8} {'supervisor':>11} {'both, a token':>14}   wait p50, p99 in ms")
    for together in (1, 64):
        found: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in sorted(WAYS, reverse=bool(number % 2)):
                found[way].append(await house.run(way, requests, together))
        for way, several in found.items():
            gateway, supervisor = (
                median(getattr(one, name) for one in several) for name in ("gateway_us", "supervisor_us")
            )
            waits = sorted(wait for one in several for wait in one.waits_ms)
            told = f"{median(waits):.2f}, {quantiles(waits, n=100)[98]:.2f}" if waits else "-"
            both = (gateway + supervisor) / TOKENS
            print(f"{way:>16} {together:>8} {gateway:>8.0f} {supervisor:>11.0f} {both:>14.2f}   {told}")
        for way in list(WAYS)[1:]:
            pairs = zip(found[way], found["no prices"], strict=True)
            more = [
                (one.gateway_us + one.supervisor_us - other.gateway_us - other.supervisor_us) / HOST_TOKENS
                for one, other in pairs
            ]
            share = interval_told([100 * value / WHOLE_US for value in more])
            print(f"{way:>16} {together:>8} {interval_told(more, 3)} us a token more, {share} % of throughput")
    attached.cancel()
    house.pipe.send("stop")
    house.child.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000, help="requests of each run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way, in alternating order")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(Path(name), given.requests, given.rounds))
