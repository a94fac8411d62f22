"""The poster of one message: ``python -m appliance.fetch.post DESCRIPTOR`` posts what comes on an inherited socket.

It has a network, and neither files nor keys: the command that starts it (``athanor audit witness``) opens no connection
itself, and judges the answer. One line of JSON, ``{"url": ..., "body": ...}``, comes, and one goes: ``{"status": ...,
"body": ...}`` or ``{"problem": ...}``. Redirects are not followed, and no proxy is asked.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import resource
import signal
import socket
import ssl
import sys
from urllib.parse import urlsplit

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38

TIMEOUT_S = 20.0
"""Seconds for a connection, and for each piece of the answer."""

MAX_LINE_BYTES = 1 << 18
"""Most bytes of what comes: a checkpoint with its signatures and 63 hashes have 30 KB."""

MAX_ANSWER_BYTES = 1 << 14
"""Most bytes of an answer: a few signature lines, or a number."""


def main(argv: list[str]) -> int:
    """Post the message of an inherited socket; gives the exit status."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(argv[0])) as connection:
        os.set_inheritable(connection.fileno(), False)
        with connection.makefile("rb") as lines:
            wish = json.loads(lines.readline(MAX_LINE_BYTES))
        try:
            status, body = post(wish["url"], wish["body"].encode())
            answer: dict[str, str | int] = {"status": status, "body": body.decode("utf-8", "replace")}
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer = {"problem": str(error) or type(error).__name__}
        connection.sendall(json.dumps(answer).encode() + b"\n")
    return 0


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """Post bytes; gives the status and at most ``MAX_ANSWER_BYTES`` of the answer.

    Raises:
        OSError, http.client.HTTPException: there is no answer.
        ValueError: the address is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError("an address begins with https:// or http://, and has no credentials in it")
    if parts.scheme == "https":
        context = ssl.create_default_context()
        client: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=TIMEOUT_S, context=context
        )
    else:
        client = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        client.request("POST", parts.path or "/", body, {"Content-Type": "text/plain; charset=utf-8"})
        answer = client.getresponse()
        return answer.status, answer.read(MAX_ANSWER_BYTES)
    finally:
        client.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
