"""Operators on other machines: whether their listeners take connections, and whose proofs open these."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator

from appliance.common.addresses import split_address
from appliance.common.config import ApplianceConfig
from appliance.common.errors import reason_of
from appliance.common.figures import counted
from appliance.operator.doctor.finding import Area, Finding, Subject
from appliance.operator.doctor.remote_facts import RemoteListener, RemoteOperators

CONNECT_S = 2.0
"""Seconds that a connection may take; nothing is said on it."""

UNIT = "athanor-operator.service"
"""Unit of the operator's API, which as shipped has no network."""

_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - an address that is looked at, not bound
"""Address of this machine to connect to where a listener is on all of them."""


def look_at_remote_operators(config: ApplianceConfig, units: Collection[str]) -> RemoteOperators | None:
    """Connect to the listeners for operators elsewhere; None where none are configured. ``units`` are the names of our
    installed units."""
    section = config.remote_operators
    if section is None:
        return None
    fetching = [one.name for one in section.tokens if one.keys_url] if section.grpc and UNIT in units else []
    tenants = config.listen.tls.client_ca if config.listen.tls is not None else None
    authority = section.tls.client_ca
    return RemoteOperators(
        listeners=tuple(_look(key, address) for key, address in section.addresses()),
        listed=len({name for _, name in section.listed()}),
        fetching=tuple(fetching),
        shared_authority=str(authority) if authority is not None and authority == tenants else "",
    )


def _look(key: str, address: str) -> RemoteListener:
    host, port = split_address(address)
    try:
        socket.create_connection((_EVERY.get(host, host), port), CONNECT_S).close()
    except OSError as error:
        return RemoteListener(key=key, address=address, problem=reason_of(error))
    return RemoteListener(key=key, address=address)


def check_remote_operators(found: RemoteOperators) -> Iterator[Finding]:
    """Return what is to be said of operators elsewhere. Pure."""
    subject = Subject(Area.ACCESS, "operators elsewhere")
    for one in found.listeners:
        if one.problem:
            process = "the gateway" if one.key == "admin" else "the operator's API"
            mend = "athanor logs    # of the gateway" if one.key == "admin" else f"systemctl status {UNIT}"
            yield subject.warning(
                f"nothing takes connections at {one.address} (remote_operators.{one.key}): {one.problem}",
                means=f"{process} does not run, or could not listen there; this machine's own ways work",
                mend=f"{mend}; docs/admin-api.md has its socket unit" if one.key == "grpc" else mend,
            )
        else:
            yield subject.ok(f"{one.key} takes connections at {one.address}")
    if not found.listed:
        yield subject.warning(
            "nobody has a role",
            means="every request from elsewhere is refused",
            mend="remote_operators: {viewers: [...]}    # in athanor.yaml",
        )
    else:
        yield subject.ok(f"{counted(found.listed, 'credential')} with a role")
    if found.shared_authority:
        yield subject.warning(
            f"{found.shared_authority} signs tenants' certificates too (listen.tls.client_ca)",
            means="whoever can have a tenant's certificate made can try for an operator's name",
            mend="remote_operators: {tls: {client_ca: FILE}}    # of an authority for operators alone",
        )
    if found.fetching:
        yield subject.note(
            f"keys of {', '.join(found.fetching)} are fetched, and {UNIT} has no network as shipped",
            means="their tokens are refused by the operator's API; the admin listener takes them",
            mend="keys_file in place of keys_url, or a drop-in that gives the unit a network",
        )
