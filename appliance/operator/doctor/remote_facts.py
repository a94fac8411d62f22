"""Facts about operators on other machines, as the configuration has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListener:
    """A listener for operators on other machines."""

    key: str
    """Key of ``remote_operators`` with its address."""
    address: str
    problem: str = ""
    """Why it takes no connection; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOperators:
    """What their listeners and proofs are."""

    listeners: tuple[RemoteListener, ...]
    listed: int
    """Credentials that have a role."""
    fetching: tuple[str, ...] = ()
    """Issuers whose keys the operator's API is to fetch, while its unit brings no network."""
    shared_authority: str = ""
    """File of the operators' authorities where it is that of tenants' too."""
