"""TLS of two ports: contexts made of the configured files, and made anew when a file has changed.

A new context is used by connections that come from then on. Nothing is changed in one that is in use: its session
tickets would let a client resume what an authority vouched for that is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from appliance.common.certificate_dates import read_validity
from appliance.common.errors import StartError
from appliance.common.listen_config import ClientCertificates, TlsConfig
from appliance.gateway.front.key_file import Stamp, stamp_of

log = structlog.get_logger()

Dates = tuple[float, float] | None
"""Unix times at which a certificate begins and ends to be valid."""


class CertificateDates:
    """Dates of the certificate in use; None where there is none, or they cannot be read."""

    def __init__(self, tls: TlsConfig | None) -> None:
        self.dates: Dates = None
        if tls is not None:
            self.read(tls)

    def __call__(self) -> Dates:
        """Return the dates."""
        return self.dates

    def read(self, tls: TlsConfig) -> None:
        """Read them of the certificate's file; blocks."""
        try:
            self.dates = read_validity(tls.certificate)
        except (OSError, ValueError):
            self.dates = None  # serving with it reports why


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """Contexts of both ports."""

    http: ssl.SSLContext
    grpc: ssl.SSLContext
    authorities: str
    """Digest of the file of the clients' authorities; empty where there is none."""


class TlsFiles:
    """Files of one section ``tls``."""

    def __init__(self, tls: TlsConfig, loaded: Callable[[TlsConfig], None] = lambda _tls: None) -> None:
        """``loaded`` is called, in a thread, when the files have been read."""
        self._tls = tls
        self._loaded = loaded
        self._stamp: Stamp = ()
        self.problem = ""
        """Why the files as they are now are not in use; empty where they are."""

    def load(self) -> TlsContexts:
        """Return contexts of the files as they are; blocks.

        Raises:
            StartError: a file is missing, or is not what it should be.
        """
        tls = self._tls
        self._stamp = self._look()
        contexts = TlsContexts(
            _context(tls, "http/1.1", tls.http_clients), _context(tls, "h2", tls.grpc_clients), _digest(tls.client_ca)
        )
        self._loaded(tls)
        self.problem = ""
        return contexts

    async def renewed(self) -> TlsContexts | None:
        """Return new contexts where a file has changed since the last look, and all of them can be used together; a
        certificate that is there before its key is no reason for an error that lasts."""
        if self._look() == self._stamp:
            return None
        try:
            contexts = await asyncio.to_thread(self.load)
        except StartError as error:
            self.problem = error.message
            log.error("the TLS files cannot be used; those in use stay so", problem=error.message)
            return None
        log.info("TLS files read again", certificate=str(self._tls.certificate))
        return contexts

    def _look(self) -> Stamp:
        tls = self._tls
        return stamp_of(tls.certificate, tls.key, *(() if tls.client_ca is None else (tls.client_ca,)))


def _context(tls: TlsConfig, protocol: str, clients: ClientCertificates) -> ssl.SSLContext:
    """TLS for one protocol.

    Raises:
        StartError: a file is missing, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError):
        raise StartError(
            f"the certificate {tls.certificate} and the key {tls.key} cannot be used: one is missing or not PEM, or "
            f"they do not belong together; `athanor doctor` says which"
        ) from None
    if tls.client_ca is None or clients == "off":
        return context
    # Over HTTP the lack of a certificate is answered, so that the caller learns what is asked for, and probes of health
    # need none; gRPC's clients are ended in the handshake.
    context.verify_mode = ssl.CERT_REQUIRED if clients == "required" and protocol == "h2" else ssl.CERT_OPTIONAL
    try:
        context.load_verify_locations(tls.client_ca)
    except (OSError, ssl.SSLError):
        raise StartError(f"the clients' authority {tls.client_ca} cannot be used: it is missing or not PEM") from None
    return context


def peer_certificate(transport: asyncio.BaseTransport) -> tuple[bool, tuple[str, ...]]:
    """Return whether a peer has shown a certificate of a known authority, and the URI names in it."""
    names = peer_names(transport)
    return names is not None, tuple(name for kind, name in names or () if kind == "URI")


def peer_names(transport: asyncio.BaseTransport) -> tuple[tuple[str, str], ...] | None:
    """Return the alternative names of a peer's verified certificate, each with its kind; None where it has shown
    none."""
    shown: dict[str, Any] = transport.get_extra_info("peercert") or {}
    return tuple(shown.get("subjectAltName", ())) if shown else None


def _digest(path: Path | None) -> str:
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
