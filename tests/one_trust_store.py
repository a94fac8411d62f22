"""A pytest plugin: HTTP clients of the tests read the certificates of public authorities once, not once for each.

httpx reads all of them for every client that it makes, whether or not it ever speaks TLS: 50 ms of processor, for some
thousand clients in a run of the suite. A client that names its own certificates, or none, gets what it asks for.
"""

from __future__ import annotations

import functools
import os
import ssl
import sys
from collections.abc import Callable
from typing import Any

import pytest

TRANSPORTS = ("httpx._transports.default", "httpx2._transports.default")
"""The modules in which a client's TLS settings are made; the official clients of the API are on the second one."""

STORES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")
"""Environment variables that change what the settings hold: each value of them has settings of its own."""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Share the settings of clients that trust public authorities, where some test module has imported httpx."""
    for name in TRANSPORTS:
        transports: Any = sys.modules.get(name)
        if transports is not None and not hasattr(transports.create_ssl_context, "__wrapped__"):
            transports.create_ssl_context = shared(transports.create_ssl_context)


def shared(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """What makes TLS settings, but one object for all who ask for public authorities and nothing else."""

    @functools.cache
    def public(*_stores: str | None) -> ssl.SSLContext:
        return make()

    @functools.wraps(make)
    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None or not trust_env:
            return make(verify=verify, cert=cert, trust_env=trust_env)
        return public(*map(os.environ.get, STORES))

    return create
