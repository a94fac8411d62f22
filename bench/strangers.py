"""Attacks of strangers on the two listeners: who has no credential, many addresses, and as much time as they like.

Each attack is a row of ``ATTACKS``: what it does, its rate, which is fixed, and how many connections it has at once.
None needs a credential. ``bench/door.py`` runs one in a process of its own:

    python bench/strangers.py rapid-reset --http HOST:PORT --grpc HOST:PORT --addresses 64 [--tls]

The process ends when it is killed. It writes a JSON line every half a second: what it has done so far (``Counts``), and
the seconds of processor time that it took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import stranger_acts as acts
from bench import stranger_frames as frames
from bench.stranger_wire import Assault, Place, raise_descriptors, trusting_context

TELL_S = 0.5
"""Between two lines of what was done."""

NICENESS = 15
"""Of an attacker's process: it shares its core with the tenants' clients, which are to lose time by the gateway's fault
alone."""

MOST_ADDRESSES = 64

HELD = 1_500
"""Connections to one port of an attack that is about connections: more than HTTP takes in all (1,024)."""

HELD_TLS = 1_000
FLOODING = 64
"""Connections of an attack that is about what is sent: one for each address."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the table. ``run`` is one connection after the other, for ever; it is given its number."""

    name: str
    does: str
    rate: float
    """Units a second of all its connections together."""
    unit: str
    connections: int
    run: acts.Run
    needs_tls: bool = False


_PING = frames.frame(frames.PING, 0, 0, bytes(8))
_EMPTY_PART = frames.frame(frames.CONTINUATION, 0, 1)
_EMPTY_DATA = frames.frame(frames.DATA, 0, 1)

ATTACKS = {
    attack.name: attack
    for attack in (
        Attack(
            "silent",
            "connections to both ports that say nothing",
            1_000,
            "connections",
            2 * HELD,
            acts.holding(acts.nothing),
        ),
        Attack(
            "tls-unfinished",
            "handshakes of TLS that stop after half or all of the first message",
            300,
            "handshakes",
            HELD_TLS,
            acts.holding(acts.half_hello, plain=True),
            needs_tls=True,
        ),
        Attack(
            "tls-idle",
            "whole handshakes, then nothing",
            50,
            "handshakes",
            HELD_TLS,
            acts.holding(acts.nothing),
            needs_tls=True,
        ),
        Attack("tls-churn", "whole handshakes, then the end", 50, "handshakes", 16, acts.churning(plain=False), True),
        Attack(
            "h2-idle",
            "preface and SETTINGS, then nothing",
            200,
            "connections",
            HELD,
            acts.holding(acts.h2_opening, acts.grpc_only),
        ),
        Attack(
            "hpack-references",
            "3,000 references to an entry of 3.9 KB in each HEADERS, on 200 streams",
            200,
            "header blocks",
            16,
            acts.flooding(acts.hpack_bombs),
        ),
        Attack(
            "continuation-empty",
            "headers that never end, in empty frames",
            10_000,
            "frames",
            FLOODING,
            acts.flooding(acts.continuations(_EMPTY_PART, 50)),
        ),
        Attack(
            "continuation-full",
            "headers that never end, in frames of 16 KB",
            500,
            "frames",
            FLOODING,
            acts.flooding(acts.continuations(frames.full_continuation(1), 2)),
        ),
        Attack(
            "rapid-reset",
            "calls that are cancelled at once",
            2_000,
            "pairs",
            FLOODING,
            acts.flooding(acts.pairs(frames.reset_pair)),
        ),
        Attack(
            "made-reset",
            "calls that the server is made to cancel, by a window of nothing more",
            2_000,
            "pairs",
            FLOODING,
            acts.flooding(acts.pairs(frames.error_pair)),
        ),
        Attack(
            "ping",
            "PING; every other connection reads no answer",
            5_000,
            "frames",
            FLOODING,
            acts.flooding(acts.repeating(_PING), deaf=True),
        ),
        Attack(
            "settings",
            "SETTINGS; every other connection reads no answer",
            5_000,
            "frames",
            FLOODING,
            acts.flooding(acts.repeating(frames.settings((4, 65_535))), deaf=True),
        ),
        Attack("priority", "PRIORITY", 10_000, "frames", FLOODING, acts.flooding(acts.repeating(frames.priority(3)))),
        Attack(
            "window",
            "WINDOW_UPDATE of one byte",
            10_000,
            "frames",
            FLOODING,
            acts.flooding(acts.repeating(frames.window(0))),
        ),
        Attack(
            "empty-data",
            "empty DATA without an end",
            10_000,
            "frames",
            FLOODING,
            acts.flooding(acts.on_open_stream(_EMPTY_DATA)),
        ),
        Attack(
            "slow-head",
            "a byte a second of an HTTP head",
            200,
            "connections",
            HELD,
            acts.holding(acts.slow_head, acts.http_only),
        ),
        Attack(
            "slow-body",
            "a byte a second of an HTTP body",
            200,
            "connections",
            HELD,
            acts.holding(acts.slow_body, acts.http_only),
        ),
        Attack(
            "slow-frames",
            "a byte a second of HTTP/2: preface, HEADERS or DATA",
            200,
            "connections",
            HELD,
            acts.holding(acts.slow_frames, acts.grpc_only),
        ),
        Attack(
            "slow-tls",
            "a byte a second of a handshake, or of a record behind it",
            50,
            "handshakes",
            HELD_TLS,
            acts.holding(acts.slow_tls, plain=True),
            needs_tls=True,
        ),
        Attack(
            "slow-reader",
            "thousands of answers that are read at some KB a second, over HTTP/2 with a window of 0",
            100,
            "connections",
            300,
            acts.holding(acts.slow_reader, reads=False),
        ),
        Attack("churn", "connect and close, every other one with a reset", 500, "connections", 32, acts.churning()),
        Attack(
            "half-request",
            "connect, a part of a request, close",
            300,
            "connections",
            32,
            acts.churning(b"GET / HT", plain=False),
        ),
        Attack("oversize-heads", "HTTP heads of 200 KB", 40, "heads", FLOODING, acts.heads_without_end),
        Attack(
            "chunk-extensions",
            "bodies of a byte a chunk, each with 1 KB of extension",
            2_000,
            "chunks",
            FLOODING,
            acts.flooding(acts.chunk_extensions, acts.to_http),
        ),
        Attack(
            "pipelining",
            "HTTP requests without a pause; every other connection reads no answer",
            1_000,
            "requests",
            FLOODING,
            acts.flooding(acts.pipelined, acts.to_http, deaf=True),
        ),
        Attack(
            "wrong-keys-http",
            "HTTP requests with a wrong key",
            300,
            "requests",
            FLOODING,
            acts.flooding(acts.wrong_requests, acts.to_http),
        ),
        Attack(
            "wrong-keys-grpc", "gRPC calls with a wrong key", 300, "calls", FLOODING, acts.flooding(acts.wrong_calls)
        ),
    )
}
"""Every attack, by name. Rates are what one core can send beside the tenants' clients, and no more than what one
customer's line carries: none of them needs more than 70 Mbit/s."""


def addresses(family: int, number: int) -> tuple[str, ...]:
    """Source addresses, none of which is a tenant's: of loopback, or of as many /64 networks."""
    if family == 4:
        return tuple(f"127.0.2.{at}" for at in range(1, number + 1))
    return tuple(f"fd00:0:0:{at:x}::1" for at in range(1, number + 1))


async def attack(assault: Assault, row: Attack) -> None:
    """Keep the attack going for ever, and tell what it has done."""

    async def tell() -> None:
        while True:
            line = asdict(assault.counts) | {"at": time.monotonic(), "cpu_s": time.process_time()}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            await asyncio.sleep(TELL_S)

    await asyncio.gather(tell(), *(row.run(assault, number) for number in range(row.connections)))


def main() -> None:
    """Run one attack."""
    parser = argparse.ArgumentParser(description="One attack, until the process is killed.")
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--http", required=True, metavar="HOST:PORT")
    parser.add_argument("--grpc", required=True, metavar="HOST:PORT")
    parser.add_argument("--addresses", type=int, default=MOST_ADDRESSES)
    parser.add_argument("--tls", action="store_true", help="the listeners speak TLS")
    options = parser.parse_args()
    raise_descriptors()
    os.nice(NICENESS)
    row = ATTACKS[options.attack]
    http, grpc = (
        Place(host.strip("[]"), int(port), alpn)
        for (host, _, port), alpn in ((options.http.rpartition(":"), "http/1.1"), (options.grpc.rpartition(":"), "h2"))
    )
    family = 6 if ":" in http.host else 4
    contexts = {alpn: trusting_context(alpn) for alpn in ("http/1.1", "h2")} if options.tls else None
    assault = Assault(http, grpc, addresses(family, options.addresses), row.rate, contexts and contexts.__getitem__)
    uvloop.run(attack(assault, row))


if __name__ == "__main__":
    main()
