"""What stands before Google's storage in tests: it lets in who signs with the key of a service account.

Google's storage has S3's way to read and list objects (its XML API); no package registry has a server that speaks it,
so SeaweedFS answers behind this gate, which checks what Google checks: a token that the account's key has signed, for
storage, and not yet over (https://google.aip.dev/auth/4111).
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ACCOUNT = "athanor@tests.iam.gserviceaccount.com"
SCOPES = tuple(f"https://www.googleapis.com/auth/{one}" for one in ("cloud-platform", "devstorage.read_only"))
"""What lets a token read objects."""


def make_key() -> RSAPrivateKey:
    """A new key of a service account."""
    return generate_private_key(65_537, 2_048)


def write_account(path: Path, key: RSAPrivateKey) -> Path:
    """Write the file that Google gives out for a service account."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    values = {"type": "service_account", "client_email": ACCOUNT, "private_key_id": "1", "private_key": pem}
    path.write_text(json.dumps(values))
    path.chmod(0o600)
    return path


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate on loopback."""

    endpoint: str
    let_in: list[str] = field(default_factory=list)
    """Requests that went through, by their targets."""


@contextmanager
def guard(storage: str, key: RSAPrivateKey) -> Iterator[Gate]:
    """Let through to ``storage``, without its credentials, what the key has signed; all else gets the status 401."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    gate = Gate(f"http://127.0.0.1:{server.server_port}")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not is_signed(self.headers["authorization"] or "", key):
                self.send_response(401)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            gate.let_in.append(self.path)
            inside = http.client.HTTPConnection(urlsplit(storage).netloc)
            ranges = {"range": self.headers["range"]} if self.headers["range"] else {}
            inside.request(self.command, self.path, headers=ranges)
            answer = inside.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "date", "server", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("content-length", answer.getheader("content-length") or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server.RequestHandlerClass = Handler
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield gate
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_signed(authorization: str, key: RSAPrivateKey) -> bool:
    """Whether a header has a token of the account, signed with its key, for storage, that is in force."""
    scheme, _, token = authorization.partition(" ")
    parts = token.split(".")
    if scheme.lower() != "bearer" or len(parts) != 3:
        return False
    signed, signature = token.rpartition(".")[0], parts[2]
    try:
        key.public_key().verify(_decode(signature), signed.encode(), PKCS1v15(), SHA256())
    except InvalidSignature:
        return False
    claims = json.loads(_decode(parts[1]))
    return (
        claims["iss"] == ACCOUNT
        and claims["iat"] - 60 <= time.time() < claims["exp"] <= claims["iat"] + 3_600
        and claims["scope"] in SCOPES
    )


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
