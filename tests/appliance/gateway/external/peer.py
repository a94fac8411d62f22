"""An endpoint under the test's control, over a real socket, and a served external model in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.common.config import ModelConfig
from appliance.gateway.external.attach import ExternalModels
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from isolation.ipc.messages import Role
from tests.appliance.gateway.pairs import TEXT_READY, Pair, make_pair

WORDS = VocabularyTable((b"", *(bytes([one]) for one in range(32, 127)), b" the", b"ing"), False)
"""A special token, a token for each printable character, and two of several."""

Script = Callable[["Peer", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Peer:
    """Answers each request with its script."""

    script: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    gone: list[asyncio.Event] = field(default_factory=list)
    """Set for each connection once its client has closed it."""
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        gone = asyncio.Event()
        self.gone.append(gone)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head)
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            self.bodies.append(json.loads(await reader.readexactly(length)))
            answer = asyncio.create_task(self._answer(writer))
            await reader.read()
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        gone.set()
        writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        await self.script(self, writer)
        await writer.drain()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"


def event(**choice: Any) -> bytes:
    """One event with one choice."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """The last event but one."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def says(*parts: bytes, closes: bool = True) -> Script:
    """A script that sends these bytes, and closes."""

    async def script(_peer: Peer, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        await writer.drain()
        if closes:
            writer.close()

    return script


@contextlib.asynccontextmanager
async def peer(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """An endpoint that answers with a script."""
    one = Peer(script)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0, ssl=tls)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        await server.wait_closed()


@dataclass
class Served:
    """An external model, attached."""

    model: ModelSandboxes
    counts: Counter[str]
    models: ExternalModels

    @property
    def engine(self) -> EngineLink:
        """Its engine's link."""
        assert self.model.engine is not None
        return self.model.engine


@contextlib.asynccontextmanager
async def served(
    url: str, table: VocabularyTable | None = WORDS, max_context: int = 256, **external: Any
) -> AsyncIterator[Served]:
    """A model that the endpoint at ``url`` computes."""
    entry = ModelConfig.model_validate(
        {
            "name": "m",
            "path": "/models/m",
            "runner": "external",
            "max_context": max_context,
            "external": {"url": url, "model": "there", "timeout_s": 0.5, **external},
        }
    )
    text: Pair = make_pair(Role.TEXT, TEXT_READY)
    model = ModelSandboxes("m", "external")
    link = TextLink(text.host, TEXT_READY, 1, lambda _link, _reason, _fault: None)
    link.ready = type(TEXT_READY)(len(table.entries) if table else 300, True, table is not None, False)
    link.table = table
    model.set_text(link)
    counts: Counter[str] = Counter()
    models = ExternalModels(
        {"m": model}, lambda: (entry,), lambda _model, _link: None, lambda _name, kind: counts.update([kind])
    )
    running = asyncio.create_task(models.run())
    try:
        await asyncio.sleep(0)
        assert model.engine is not None, "it is attached at the first look"
        yield Served(model, counts, models)
    finally:
        model.close_links()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        text.guest.close()


def write_key(folder: Path, key: str) -> Path:
    """A file with an endpoint's key."""
    path = folder / "key"
    path.write_text(key)
    return path
