"""A server that answers at once what routers ask of one: ``python -m bench.split_mock PORT``. It computes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

MODEL = "athanor-mini"

WORK_S = 0.05
"""Seconds that it takes for a prompt, or an answer."""


async def mock(port: int) -> None:
    """Serve what routers ask of a server: its health, its model, and completions."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                size = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                await reader.readexactly(size)
                document: dict[str, object] = {"status": "ok", "data": [{"id": MODEL, "object": "model"}]}
                document |= {"object": "list", "model_path": MODEL, "served_model_name": MODEL}
                if head.startswith("post"):
                    await asyncio.sleep(WORK_S)
                    choice = {"index": 0, "text": "yes", "finish_reason": "length"}
                    usage = {"prompt_tokens": 700, "completion_tokens": 12, "total_tokens": 712}
                    document = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
                    document |= {"choices": [choice], "usage": usage, "kv_transfer_params": {"remote_host": "x"}}
                body = json.dumps(document).encode()
                kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(mock(int(sys.argv[1])))
