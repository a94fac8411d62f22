"""A host that computes nothing, over TLS: ``python -m bench.fleet_mock PORT FOLDER``.

It answers as many tokens as are asked for, 2 ms apart, whole or as a stream; ``FOLDER`` has ``host.pem`` and
``host.key``.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from contextlib import suppress
from pathlib import Path

STEP_S = 0.002
"""Seconds between two tokens, as long as a step of the hosts beside which it stands."""

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"


async def _stream(writer: asyncio.StreamWriter, tokens: int) -> None:
    writer.write(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
    for number in range(tokens + 1):
        await asyncio.sleep(STEP_S)
        text = b'data: {"choices": [{"text": "x"}]}\n\n' if number < tokens else b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(text), text))
        await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _whole(writer: asyncio.StreamWriter, tokens: int) -> None:
    await asyncio.sleep(tokens * STEP_S)
    body = json.dumps({"choices": [{"text": "x" * tokens}]}).encode()
    writer.write(HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            asked = json.loads(await reader.readexactly(size) or b"{}")
            answer = _stream if asked.get("stream") else _whole
            await answer(writer, int(asked.get("max_tokens", 1)))
            await writer.drain()
    writer.close()


async def main(port: int, folder: Path) -> None:
    """Serve until the process is killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "host.pem", folder / "host.key")
    server = await asyncio.start_server(_serve, "127.0.0.1", port, ssl=context)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
