"""What a collector that is down costs: paired segments with one that answers and one that does not.

A null engine in its real sandboxes, a few streams in a closed loop, every request traced and sent. Segments of one
fixed load alternate in the order up, down, down, up, so that a drift of the machine falls on both; ``down`` is a closed
port, ``silent`` one that takes connections and never answers. Given are, for each pair, how much longer a request took
and how much more processor time the gateway used, as medians over the pairs; what failed; what became of the spans.

``python bench/exporter_down.py [--pairs 14] [--requests 60] [--silent] [--json]``; 14 pairs are down for a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator.demo import choose_ports
from appliance.selftest.processes import CpuClock
from bench.host import Served, drive, null_appliance

STREAMS = 4
TOKENS = 32
STEP_US = 2_000
STOP_S = 8.0
"""In which the whole appliance has ended, its exporters' 3 s included."""


class Handler(BaseHTTPRequestHandler):
    """Takes whatever is sent; a connection for each export, so that none outlives a collector that is stopped."""

    def do_POST(self) -> None:
        """An empty answer is a full success (OTLP specification)."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Collector:
    """A collector on one port that comes and goes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: ThreadingHTTPServer | None = None
        self._mute: socket.socket | None = None

    def become(self, state: str) -> None:
        """``up``, ``down`` or ``silent``."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._mute is not None:
            self._mute.close()
        self._server = self._mute = None
        if state == "up":
            self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        elif state == "silent":
            self._mute = socket.create_server(("127.0.0.1", self._port), backlog=64, reuse_port=False)


def segment(served: Served, clock: CpuClock, requests: int) -> dict[str, float]:
    """One load: seconds a request, gateway microseconds a request, failures."""
    before = clock.read()
    seen = drive(served, "http", STREAMS, requests, TOKENS)
    after = clock.read()
    return {
        "request_s": seen["wall_s"] / requests,
        "first_s": statistics.median(seen["firsts"]),
        "gateway_us": (after["gateway"] - before["gateway"]) / (requests * STREAMS) / 1e3,
        "failures": seen["failures"],
    }


def spans(served: Served) -> dict[str, float]:
    """What became of spans so far."""
    text = httpx.get(served.ready["admin"] + "/metrics", timeout=10).text
    pattern = r'^athanor_telemetry_(dropped|sent)_spans_total(?:{athanor_reason="(\w+)"})? (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return {reason or kind: float(value) for kind, reason, value in found}


def measure(pairs: int, requests: int, state: str) -> dict[str, Any]:
    """All segments, and the figures."""
    (port,) = choose_ports((0,))
    collector = Collector(port)
    os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"http://127.0.0.1:{port}/v1/traces"
    rows: dict[str, list[dict[str, float]]] = {"up": [], state: []}
    with null_appliance(STEP_US) as served:
        clock = CpuClock(served.process.pid, served.sandboxes())
        collector.become("up")
        segment(served, clock, requests // 4)
        for pair in range(pairs):
            for now in ("up", state) if pair % 2 == 0 else (state, "up"):
                collector.become(now)
                rows[now].append(segment(served, clock, requests))
        collector.become(state)
        segment(served, clock, requests // 4)
        became = spans(served)
        began = time.monotonic()
    stopped_s = time.monotonic() - began
    collector.become("down")

    def excess(what: str) -> float:
        both = zip(rows["up"], rows[state], strict=True)
        return statistics.median(down[what] / up[what] - 1 for up, down in both)

    return {
        "pairs": pairs,
        "state": state,
        "seconds_down": sum(row["request_s"] for row in rows[state]) * requests,
        "requests": 2 * pairs * requests * STREAMS,
        "failures": sum(row["failures"] for both in rows.values() for row in both),
        "request_time": excess("request_s"),
        "first_token": excess("first_s"),
        "gateway_time": excess("gateway_us"),
        "up": {what: statistics.median(row[what] for row in rows["up"]) for what in rows["up"][0]},
        "spans": became,
        "stopped_s": stopped_s,
    }


def main() -> int:
    """Measure and print; the status is 1 where a request failed or the stop took too long."""
    parser = argparse.ArgumentParser(description="What a collector that is down costs.")
    parser.add_argument("--pairs", type=int, default=14)
    parser.add_argument("--requests", type=int, default=60, help="of each stream, in each segment")
    parser.add_argument("--silent", action="store_true", help="it takes connections and never answers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.pairs, arguments.requests, "silent" if arguments.silent else "down")
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(
            f"{figures['state']} for {figures['seconds_down']:.0f} s; {figures['requests']} requests, "
            f"{figures['failures']:.0f} failed"
        )
        print(
            f"request {figures['request_time']:+.2%}, first token {figures['first_token']:+.2%}, "
            f"gateway's processor {figures['gateway_time']:+.2%} (medians of {figures['pairs']} pairs)"
        )
        print(f"spans: {figures['spans']}; stopped after {figures['stopped_s']:.1f} s")
    return int(figures["failures"] > 0 or figures["stopped_s"] > STOP_S)


if __name__ == "__main__":
    sys.exit(main())
