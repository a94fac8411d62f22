"""HTTP without a client library: requests that no well-behaved client sends, and responses as bytes."""

from __future__ import annotations

import asyncio
import contextlib
import re


async def talk(port: int, request: bytes, timeout_s: float = 10.0) -> bytes:
    """Send these bytes to a local port; return everything received until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request_bytes(method: str, target: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """Build an HTTP/1.1 request with ``Connection: close``; header values may be anything."""
    lines = [f"{method} {target} HTTP/1.1", "connection: close", f"content-length: {len(body)}"]
    if not any(name.lower() == "host" for name, _ in headers):
        lines.append("host: localhost")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """Return the response's status; 0 when the connection was closed without one."""
    head = answer[:12]
    return int(head[9:12]) if head.startswith(b"HTTP/1.1 ") and head[9:12].isdigit() else 0


def body_of(answer: bytes) -> bytes | None:
    """Return the complete body; None when the connection was closed before its announced end."""
    head, _, body = answer.partition(b"\r\n\r\n")
    announced = re.search(rb"(?im)^content-length: *(\d+)", head)
    return body if announced is None or len(body) >= int(announced[1]) else None
