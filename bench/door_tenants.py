"""The tenants of ``bench/door.py``: requests at a steady rate over HTTP and gRPC, on kept connections and on new ones.

A process of its own, so that its event loop waits for nobody else's. It reads one JSON object from standard input
(``Work``'s fields) and writes a JSON line once it is connected, one for each request that begins (``begun``, the moment
at which it was due) and one for each that has ended (``Asked``'s fields). A request is due at a fixed moment, whatever
became of those before it, and its time to first token counts from then: with a new connection, that connection's making
is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.gateway.grpc.generated import inference_pb2 as pb
from bench.stranger_frames import GENERATE, http_request

TOKENS = 16
"""Output tokens of a request."""

PERIOD_S = 1.0
"""Between two requests of a lane. A tenant has four lanes: HTTP and gRPC, kept and new."""

DEADLINE_S = 10.0
"""After so long a request has failed."""

MODEL = "athanor-mini"


@dataclass(frozen=True, slots=True)
class Work:
    """Whom to ask, and as whom."""

    http: tuple[str, int]
    grpc: str
    keys: tuple[str, ...]
    authority: str
    """File with the certificate that TLS is verified with; empty where there is no TLS."""
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; moments are of CLOCK_MONOTONIC, in seconds."""

    due: float
    ended: float
    api: str
    kept: bool
    """Whether its connection was open before it was due."""
    ttft: float
    """Seconds to the first token; 0 of one that failed before."""
    failure: str
    """Empty of a request that was answered to its end."""


class RequestFailed(Exception):
    """The answer was an error, or not whole."""


FirstToken = Callable[[], None]
"""Called when a request's first token is here."""

Ask = Callable[[FirstToken], Awaitable[None]]


class KeptHttp:
    """HTTP connections that are kept; one more is opened only in place of one that failed."""

    def __init__(self, work: Work, key: str, context: ssl.SSLContext | None) -> None:
        self._work, self._key, self._context = work, key, context
        self._numbers = itertools.count(1)
        self._free: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Have a connection before anybody asks."""
        self._free = await self._connect()

    async def ask(self, first_token: FirstToken) -> None:
        """Ask on the kept connection, one request after the other.

        Raises:
            RequestFailed: the answer was an error, or not whole.
            OSError: the connection was lost.
        """
        async with self._turn:
            if not self.is_open:
                self._free = await self._connect()
            assert self._free is not None
            pair, self._free = self._free, None
            await self._talk(*pair, first_token)
            self._free = pair

    async def ask_anew(self, first_token: FirstToken) -> None:
        """Ask on a new connection, and close it.

        Raises:
            RequestFailed: the answer was an error, or not whole.
            OSError: no connection came about, or it was lost.
        """
        reader, writer = await self._connect()
        await self._talk(reader, writer, first_token)
        writer.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection is there, as far as was heard."""
        return self._free is not None and not self._free[0].at_eof() and not self._free[1].is_closing()

    @property
    def is_busy(self) -> bool:
        """Whether a request is on its connection now."""
        return self._turn.locked()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._work.http
        return await asyncio.open_connection(host, port, ssl=self._context)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_token: FirstToken) -> None:
        prompt = f"Count from {next(self._numbers)}:"
        fields = {"model": self._work.model, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        body = json.dumps(fields | {"ignore_eos": True, "temperature": 0}).encode()
        framing = [
            ("authorization", f"Bearer {self._key}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
        ]
        try:
            writer.write(http_request("POST", "/v1/completions", framing, body))
            await _read_stream(reader, first_token)
        except BaseException:
            writer.transport.abort()
            raise


async def _read_stream(reader: asyncio.StreamReader, first_token: FirstToken) -> None:
    seen = b""
    while not seen.endswith(b"0\r\n\r\n"):
        piece = await reader.read(65_536)
        if not piece:
            raise RequestFailed("the connection ended" + (" in the answer" if seen else ""))
        if b'"text":"' in piece and b'"text":"' not in seen:
            first_token()
        seen += piece
        if not seen.startswith(b"HTTP/1.1 200 "[: len(seen)]):
            raise RequestFailed(seen[:12].decode(errors="replace"))
    if b"data: [DONE]" not in seen:
        raise RequestFailed("the stream is not whole")


class KeptGrpc:
    """A gRPC channel that is kept. Channels share no connection, and no call is tried twice."""

    OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))

    def __init__(self, work: Work, key: str) -> None:
        self._work, self._key = work, key
        self._numbers = itertools.count(1)
        self._channel = self._connect()

    async def open(self) -> None:
        """Have a connection before anybody asks."""
        await self._channel.channel_ready()

    @property
    def is_open(self) -> bool:
        """Whether the channel has its connection."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    @property
    def is_busy(self) -> bool:
        """Never: a connection has room for many calls."""
        return False

    async def ask(self, first_token: FirstToken) -> None:
        """Ask on the kept channel, which makes itself a connection where it has none.

        Raises:
            RequestFailed: the answer was an error, or not whole.
        """
        await self._talk(self._channel, first_token)

    async def ask_anew(self, first_token: FirstToken) -> None:
        """Ask on a new channel, and close it.

        Raises:
            RequestFailed: the answer was an error, or not whole.
        """
        channel = self._connect()
        try:
            await self._talk(channel, first_token)
        finally:
            await channel.close()

    def _connect(self) -> Any:
        if not self._work.authority:
            return grpc.aio.insecure_channel(self._work.grpc, self.OPTIONS)
        credentials = grpc.ssl_channel_credentials(Path(self._work.authority).read_bytes())
        return grpc.aio.secure_channel(self._work.grpc, credentials, self.OPTIONS)

    async def _talk(self, channel: Any, first_token: FirstToken) -> None:
        text = f"Count from {next(self._numbers)}:"
        request = pb.GenerateRequest(model=self._work.model, text=text, max_output_tokens=TOKENS, ignore_eos=True)
        request.sampling.temperature = 0
        call = channel.unary_stream(GENERATE, response_deserializer=pb.GenerateResponse.FromString)(
            request.SerializeToString(), metadata=(("authorization", f"Bearer {self._key}"),), timeout=DEADLINE_S
        )
        came = 0
        finished = False
        try:
            async for message in call:
                came += 1
                if came == 2:  # the first says that it began
                    first_token()
                finished = message.HasField("finished")
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name}: {error.details()}"[:200]) from None
        if not finished:
            raise RequestFailed("the stream is not whole")


def _tell(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Lane:
    """A request each period, for ever, each told when it has ended."""

    def __init__(self, client: KeptHttp | KeptGrpc, api: str, *, kept: bool) -> None:
        self._client = client
        self._api = api
        self._kept = kept
        self._well = True
        """Whether the last request was answered: then its connection was open behind it."""
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, offset_s: float) -> None:
        """Ask for ever."""
        start = time.monotonic() + offset_s
        for number in itertools.count():
            due = start + number * PERIOD_S
            await asyncio.sleep(due - time.monotonic())
            task = asyncio.get_running_loop().create_task(self._one(due))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _one(self, due: float) -> None:
        """One request. A connection that was lost since the last one fails it; it is asked all the same, so that there
        is a connection for the next."""
        first = 0.0
        _tell({"begun": due})

        def first_token() -> None:
            nonlocal first
            first = first or time.monotonic() - due

        client, held = self._client, self._kept and self._well
        failure = "the open connection was lost" if held and not (client.is_open or client.is_busy) else ""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await (client.ask if self._kept else client.ask_anew)(first_token)
        except TimeoutError:
            failure = failure or f"no whole answer in {DEADLINE_S:g} s"
        except (OSError, RequestFailed) as error:
            failure = failure or str(error) or type(error).__name__
        self._well = not failure
        _tell(asdict(Asked(due, time.monotonic(), self._api, held, first, failure)))


async def run(work: Work) -> None:
    """All lanes of all tenants, evenly over a period."""
    with contextlib.suppress(OSError):
        os.nice(-5)  # before all else on this core; without root it goes without
    context = ssl.create_default_context(cafile=work.authority) if work.authority else None
    lanes = []
    for key in work.keys:
        for api, client in (("http", KeptHttp(work, key, context)), ("grpc", KeptGrpc(work, key))):
            await client.open()
            lanes += [Lane(client, api, kept=True), Lane(client, api, kept=False)]
    _tell({})
    await asyncio.gather(*(lane.run(number * PERIOD_S / len(lanes)) for number, lane in enumerate(lanes)))


def main() -> None:
    """Work as standard input says, until the process is killed."""
    fields = json.load(sys.stdin)
    uvloop.run(run(Work(tuple(fields.pop("http")), keys=tuple(fields.pop("keys")), **fields)))


if __name__ == "__main__":
    main()
