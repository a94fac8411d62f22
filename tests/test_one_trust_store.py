"""Clients of the tests share the certificates of public authorities, and nothing else of TLS."""

from __future__ import annotations

import ssl
from typing import Any

import httpx
import pytest

from tests.one_trust_store import STORES, shared


def test_only_clients_that_trust_public_authorities_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object serves all who ask for nothing special; who names certificates, none, or another store by the
    environment gets settings of its own."""
    made: list[dict[str, Any]] = []

    def make(**asked: Any) -> ssl.SSLContext:
        made.append(asked)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    for name in STORES:
        monkeypatch.delenv(name, raising=False)
    create = shared(make)
    public = create()
    assert create(verify=True, cert=None, trust_env=True) is public and made == [{}]
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for asked in ({"verify": False}, {"verify": own}, {"cert": "file"}, {"trust_env": False}):
        assert create(**asked) is not public
    monkeypatch.setenv("SSL_CERT_FILE", "other")
    assert create() is not public and create() is create() and len(made) == 6
    monkeypatch.delenv("SSL_CERT_FILE")
    assert create() is public


def test_clients_of_this_run_share() -> None:
    """The plugin is there: two clients have one object. Control: one that verifies nobody has another."""

    def settings(client: httpx.Client) -> ssl.SSLContext:
        found = client._transport._pool._ssl_context  # type: ignore[attr-defined]
        assert isinstance(found, ssl.SSLContext)
        return found

    with httpx.Client() as one, httpx.Client() as other, httpx.Client(verify=False) as trusting:
        assert settings(one) is settings(other)
        assert settings(one).verify_mode is ssl.CERT_REQUIRED
        assert settings(trusting) is not settings(one)
