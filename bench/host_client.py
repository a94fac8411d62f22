"""The other end of ``bench/host.py``: N streams in a closed loop, counted as cheaply as Python can.

A process of its own. It reads one JSON object from standard input (``Load``'s fields) and writes one to standard output
(``Seen``'s). HTTP is spoken by a bare protocol that counts ``data:`` lines and keeps the moment of each read; gRPC by
``grpc.aio`` with messages left as bytes. What the server says it gave (``usage``) is added up and checked against what
was asked for.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODEL = "athanor-mini"
PROMPT = "Count from one to a great number:"
ANSWER_S = 120.0
GRPC_CHANNELS = 4

_COMMON: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0}
_OWN: dict[str, Any] = {"ignore_eos": True, "seed": 7, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Api:
    """One way to ask over HTTP, and how its answers are read."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    """Makes the request for a prompt and a number of output tokens."""
    text: bytes
    """Stands once in each event with text."""
    empty: bytes
    """Stands in an event whose text is empty besides."""
    usage: re.Pattern[bytes]
    end: bytes
    """Stands in the last 1,024 bytes of a whole answer."""


APIS = {
    "http": Api(
        "/v1/completions",
        lambda prompt, tokens: {**_COMMON, **_OWN, "prompt": prompt, "max_tokens": tokens},
        b'"text":"',
        b'"text":""',
        re.compile(rb'"completion_tokens":(\d+)'),
        b"data: [DONE]",
    ),
    "chat": Api(
        "/v1/chat/completions",
        lambda prompt, tokens: {
            **_COMMON,
            **_OWN,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
        },
        b'"delta":{"content":"',
        b'"delta":{"content":""',
        re.compile(rb'"completion_tokens":(\d+)'),
        b"data: [DONE]",
    ),
    "responses": Api(
        "/v1/responses",
        lambda prompt, tokens: {**_COMMON, "input": prompt, "max_output_tokens": tokens},
        b"event: response.output_text.delta",
        b"\0",
        re.compile(rb'"output_tokens":(\d+)'),
        b'"sequence_number":',
    ),
    "messages": Api(
        "/v1/messages",
        lambda prompt, tokens: {**_COMMON, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens},
        b'"type":"text_delta"',
        b"\0",
        re.compile(rb'"output_tokens":(\d+)'),
        b"event: message_stop",
    ),
}
"""Name of a front end -> the API by which it is asked."""


@dataclass(frozen=True)
class Load:
    """What to do: ``requests`` one after the other on each of ``streams``, with ``tokens`` output tokens each."""

    host: str
    port: int
    keys: list[str]
    streams: int
    requests: int
    tokens: int
    front_end: str = "http"
    repeats: int = 1
    """How often ``PROMPT`` is in a prompt."""
    arrive_s: float = 0.0
    """Time over which the streams begin, one after the other."""
    run_s: float = 0.0
    """Time for which each stream asks again, in place of ``requests``; 0: by that number."""


@dataclass
class Seen:
    """What came back; seconds."""

    tokens: int = 0
    chunks: int = 0
    """Events with text, or gRPC messages."""
    failures: int = 0
    closed: int = 0
    """Connections that the server closed while more was to be asked."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of this process."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Between two chunks of one answer."""
    firsts: array[float] = field(default_factory=lambda: array("d"))
    """From a request's last byte to its first text."""


class HttpStream(asyncio.Protocol):
    """One connection that asks again and again."""

    def __init__(self, load: Load, key: str, seen: Seen) -> None:
        self._seen = seen
        self._expected = load.tokens
        self._left = load.requests
        self._until = time.perf_counter() + load.run_s if load.run_s else 0.0
        self._api = api = APIS[load.front_end]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = json.dumps(api.body(PROMPT * load.repeats, load.tokens)).encode()
        head = (
            f"POST {api.path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._last = 0.0
        self._first = True
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._first, self._tail = True, b""
        self._last = time.perf_counter()
        self._transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Count; ask again after the end mark."""
        now = time.perf_counter()
        events = data.count(self._api.text) - data.count(self._api.empty)
        if events:
            self._seen.chunks += events
            (self._seen.firsts if self._first else self._seen.gaps).append(now - self._last)
            self._first, self._last = False, now
        self._tail = (self._tail + data)[-1024:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._ended()

    def _ended(self) -> None:
        usage = self._api.usage.search(self._tail)
        if usage is None or int(usage[1]) != self._expected or self._api.end not in self._tail:
            self._seen.failures += 1
        else:
            self._seen.tokens += int(usage[1])
        self._left = int(time.perf_counter() < self._until) if self._until else self._left - 1
        if self._left:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Over."""
        if self._left:
            self._seen.failures += self._left
            self._seen.closed += 1
        if not self.done.done():
            self.done.set_result(None)


async def run_http(load: Load, seen: Seen) -> None:
    """All streams, each over a connection of its own."""
    loop = asyncio.get_running_loop()
    began, made = loop.time(), []
    for index in range(load.streams):
        await asyncio.sleep(began + load.arrive_s * index / load.streams - loop.time())
        key = load.keys[index % len(load.keys)]
        made.append(await loop.create_connection(lambda key=key: HttpStream(load, key, seen), load.host, load.port))  # type: ignore[misc]
    async with asyncio.timeout(ANSWER_S + load.run_s):
        await asyncio.gather(*(protocol.done for _, protocol in made))


async def run_grpc(load: Load, seen: Seen) -> None:
    """All streams over a few channels."""
    import grpc

    from appliance.gateway.grpc.generated import inference_pb2 as pb

    text = PROMPT * load.repeats
    request = pb.GenerateRequest(model=MODEL, text=text, max_output_tokens=load.tokens, ignore_eos=True)
    request.sampling.temperature = 0
    request.sampling.seed = 7
    asked = request.SerializeToString()
    # Connections of their own: by default channels to one address share one, and a server bounds its streams.
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(f"{load.host}:{load.port}", own) for _ in range(GRPC_CHANNELS)]
    calls = [channel.unary_stream("/athanor.inference.v1.InferenceService/Generate") for channel in channels]

    async def stream(index: int) -> None:
        which, key = index % GRPC_CHANNELS, load.keys[index % len(load.keys)]
        for _ in range(load.requests):
            last, first, data = time.perf_counter(), True, b""
            messages = -2  # the first says that it began, the last that it ended
            async for message in calls[which](asked, metadata=(("authorization", f"Bearer {key}"),)):
                data, now = message, time.perf_counter()
                messages += 1
                if messages > -1:
                    (seen.firsts if first else seen.gaps).append(now - last)
                    first, last = False, now
            seen.chunks += messages
            used = pb.GenerateResponse.FromString(data).finished.usage.output_tokens
            seen.tokens += used
            seen.failures += used != load.tokens

    async with asyncio.timeout(ANSWER_S):
        await asyncio.gather(*map(stream, range(load.streams)))
    for channel in channels:
        await channel.close()


def main() -> int:
    """Run the load that standard input describes."""
    load = Load(**json.load(sys.stdin))
    seen = Seen()
    began, cpu = time.perf_counter(), time.process_time()
    runner = run_grpc if load.front_end == "grpc" else run_http
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(runner(load, seen))
    seen.wall_s, seen.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    json.dump(asdict(seen) | {"gaps": sorted(seen.gaps), "firsts": sorted(seen.firsts)}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
