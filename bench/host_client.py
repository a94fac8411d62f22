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
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODEL = "athanor-mini"
PROMPT = "Count from one to a great number:"
ANSWER_S = 120.0
GRPC_CHANNELS = 4
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


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


@dataclass
class Seen:
    """What came back; seconds."""

    tokens: int = 0
    chunks: int = 0
    """Events with text, or gRPC messages."""
    failures: int = 0
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
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": PROMPT * load.repeats,
                "max_tokens": load.tokens,
                "stream": True,
                "ignore_eos": True,
                "temperature": 0,
                "seed": 7,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
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
        events = data.count(b'"text":"') - data.count(b'"text":""')
        if events:
            self._seen.chunks += events
            (self._seen.firsts if self._first else self._seen.gaps).append(now - self._last)
            self._first, self._last = False, now
        self._tail = (self._tail + data)[-1024:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._ended()

    def _ended(self) -> None:
        usage = _USAGE.search(self._tail)
        if usage is None or int(usage[1]) != self._expected or b"data: [DONE]" not in self._tail:
            self._seen.failures += 1
        else:
            self._seen.tokens += int(usage[1])
        self._left -= 1
        if self._left:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Over."""
        if self._left:
            self._seen.failures += self._left
        if not self.done.done():
            self.done.set_result(None)


async def run_http(load: Load, seen: Seen) -> None:
    """All streams, each over a connection of its own."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda key=key: HttpStream(load, key, seen), load.host, load.port)  # type: ignore[misc]
        for key in (load.keys[index % len(load.keys)] for index in range(load.streams))
    ]
    async with asyncio.timeout(ANSWER_S):
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
