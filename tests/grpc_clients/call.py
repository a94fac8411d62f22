"""One call of a gRPC client of the tests, and its answer: values that go to each client as JSON and come back from it.

A client needs nothing of the gateway but an address, so the same calls judge any implementation of the server.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

MODELS, GENERATE, CHECK, WATCH, REFLECT = "models", "generate", "check", "watch", "reflect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a client does, and with which proofs."""

    address: str
    """HOST:PORT."""
    do: str = MODELS
    """One of the names above."""
    key: str | None = None
    """API key for the metadata."""
    ca: Path | None = None
    """PEM file of the server's authority. None: plain text."""
    certificate: Path | None = None
    """PEM file of the client's own certificate; ``private_key`` goes with it."""
    private_key: Path | None = None
    model: str = "athanor-mini"
    text: str = "The sandbox"
    text_bytes: int = 0
    """Bytes of a prompt of one letter; 0 sends ``text``."""
    max_output_tokens: int = 8
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 60.0
    """The call's deadline."""
    cancel_after: int = 0
    """Deltas after which the client cancels; 0 never."""
    service: str = ""
    """Service of a health check."""

    def but(self, **changes: Any) -> Call:
        """Return the call with other values."""
        return replace(self, **changes)

    def document(self) -> dict[str, Any]:
        """Return it as the JSON that other languages' clients read."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the client saw."""

    code: str = "OK"
    """Name of the status."""
    message: str = ""
    reason: str = ""
    """``ErrorInfo.reason``; empty where the status has no details."""
    domain: str = ""
    error_request_id: str = ""
    """``RequestInfo.request_id``."""
    violations: list[str] = field(default_factory=list)
    """Fields that ``BadRequest`` names."""
    resource: str = ""
    """``ResourceInfo.resource_name``."""
    quota: list[str] = field(default_factory=list)
    """Descriptions of ``QuotaFailure``."""
    request_id: str = ""
    """``x-request-id`` of the initial metadata."""
    events: list[str] = field(default_factory=list)
    """Kinds of the events of a generation, repeated ones once."""
    deltas: int = 0
    text: str = ""
    output_tokens: int = 0
    models: list[str] = field(default_factory=list)
    status: str = ""
    """Answer of a health check; of a watch the first one."""
    services: list[str] = field(default_factory=list)
    """What reflection lists."""

    @classmethod
    def read(cls, document: dict[str, Any]) -> Answer:
        """Return the answer in a client's JSON; what the client does not know keeps its default."""
        known = {one.name for one in fields(cls)}
        assert document.keys() <= known, document.keys() - known
        return cls(**document)
