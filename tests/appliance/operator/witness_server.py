"""A witness: ``python witness_server.py ORIGIN=LOGKEY NAME SEED`` prints its address, and serves until it is ended.

A program of its own, by the specification (C2SP tlog-witness), with nothing of the appliance: it verifies the log's
signature and the consistency proof with ``other_tree``. What it cosigned last is in its memory.
"""

from __future__ import annotations

import base64
import http.server
import struct
import sys
import time
from hashlib import sha256
from typing import ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.appliance.common.audit import other_tree


class Witness(http.server.BaseHTTPRequestHandler):
    """One request."""

    keys: ClassVar[dict[str, str]] = {}
    seen: ClassVar[dict[str, tuple[int, bytes]]] = {}
    name = ""
    key: Ed25519PrivateKey

    def do_POST(self) -> None:
        """Answer add-checkpoint."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        status, body = self.judge(text) if self.path == "/w/add-checkpoint" else (404, "")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def judge(self, text: str) -> tuple[int, str]:
        """Status and body of the answer."""
        head, _, note = text.partition("\n\n")
        first, *lines = head.split("\n")
        old, proof = int(first.removeprefix("old ")), [base64.b64decode(one) for one in lines]
        origin = note.split("\n", 1)[0]
        if origin not in self.keys:
            return 404, ""
        try:
            _, size, root = other_tree.open_note(note, self.keys[origin])
        except AssertionError:
            return 403, ""
        before, known = self.seen.get(origin, (0, b""))
        if old > size:
            return 400, ""
        if old != before:
            return 409, f"{before}\n"
        if old == size and root != known:
            return 409, f"{before}\n"
        if (old == 0 and proof) or (old and not other_tree.continues(old, size, known, root, proof)):
            return 422, ""
        self.seen[origin] = (size, root)
        now = int(time.time())
        body = note.partition("\n\n")[0] + "\n"
        signature = self.key.sign(f"cosignature/v1\ntime {now}\n{body}".encode())
        public = self.key.public_key().public_bytes_raw()
        mark = sha256(f"{self.name}\n".encode() + b"\4" + public).digest()[:4]
        signed = base64.b64encode(mark + struct.pack(">Q", now) + signature).decode()
        return 200, f"\u2014 {self.name} {signed}\n"

    def log_message(self, *_given: object) -> None:
        """Say nothing."""


def main(argv: list[str]) -> None:
    """Serve."""
    origin, _, key = argv[0].partition("=")
    Witness.keys, Witness.name = {origin: key}, argv[1]
    Witness.key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(argv[2]))
    server = http.server.HTTPServer(("127.0.0.1", 0), Witness)
    print(f"http://127.0.0.1:{server.server_port}/w", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
