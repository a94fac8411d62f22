"""A provider of tokens for tests: real keys, real signatures, and an https address that misbehaves on demand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.appliance.gateway.front.pki import Pki

ISSUER = "https://login.example.com/"
AUDIENCE = "athanor"
NOW = 1_800_000_000


def encoded(data: bytes) -> str:
    """Unpadded base64url."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def make_key(kind: str) -> Any:
    """A private key of RS256, ES256 or EdDSA."""
    if kind == "RS256":
        return rsa.generate_private_key(65_537, 2_048)
    return ec.generate_private_key(ec.SECP256R1()) if kind == "ES256" else ed25519.Ed25519PrivateKey.generate()


def public_jwk(kind: str, key: Any, kid: str, **more: Any) -> dict[str, Any]:
    """The public half as providers publish it."""
    found = json.loads(jwt.get_algorithm_by_name(kind).to_jwk(key.public_key()))
    return {**found, "kid": kid, "use": "sig", "alg": kind, **more}


@dataclass
class Provider:
    """Keys by id, and tokens signed with them."""

    keys: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def add(self, kid: str, kind: str = "ES256") -> None:
        """Make a key."""
        self.keys[kid] = kind, make_key(kind)

    def published(self) -> bytes:
        """The JWK set."""
        return json.dumps({"keys": [public_jwk(kind, key, kid) for kid, (kind, key) in self.keys.items()]}).encode()

    def claims(self, now: float = NOW, **changes: Any) -> dict[str, Any]:
        """Claims that hold; a change to None leaves one out."""
        found = {"iss": ISSUER, "aud": AUDIENCE, "sub": "team-a", "iat": now, "nbf": now, "exp": now + 600, **changes}
        return {name: value for name, value in found.items() if value is not None}

    def token(self, kid: str, claims: dict[str, Any] | None = None, **header: Any) -> str:
        """A token of these claims signed with a key."""
        said = {"alg": self.keys[kid][0], "kid": kid, "typ": "JWT", **header}
        return self.signed(kid, json.dumps(said).encode(), json.dumps(claims or self.claims()).encode())

    def signed(self, kid: str, header: bytes, payload: bytes) -> str:
        """A token of exactly these bytes, signed with a key."""
        kind, key = self.keys[kid]
        text = f"{encoded(header)}.{encoded(payload)}"
        return f"{text}.{encoded(jwt.get_algorithm_by_name(kind).sign(text.encode(), key))}"


@dataclass
class Address:
    """An https address of keys."""

    url: str
    answer: bytes = b""
    """What is sent, head and body."""
    pause_s: float = 0.0
    """Between two bytes of it."""
    fetched: int = 0

    def publish(self, body: bytes, status: str = "200 OK") -> None:
        """Answer with this."""
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
        self.answer = head.encode() + body


@contextlib.asynccontextmanager
async def published(pki: Pki) -> AsyncIterator[Address]:
    """Serve an address with the certificate of this authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.files.certificate, pki.files.key)
    found = Address("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.fetched += 1
        with contextlib.suppress(ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in (
                [found.answer[i : i + 1] for i in range(len(found.answer))] if found.pause_s else [found.answer]
            ):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(found.pause_s)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    found.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys?v=1"
    try:
        yield found
    finally:
        server.close()
