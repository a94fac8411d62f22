"""Section ``operator_api`` of the configuration: who may do what on the operator's gRPC socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from appliance.common.config_section import Section

MAX_NAMES = 64
"""Most users and groups of one role."""

Account = Annotated[str, Field(pattern=r"^@?[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?$")]
"""User of this machine, or a group behind an ``@``: by name, or by number."""

Accounts = Annotated[tuple[Account, ...], Field(max_length=MAX_NAMES, strict=False)]


class OperatorApiConfig(Section):
    """The operator's gRPC API (docs/admin-api.md) on a Unix socket. Root and the service's own user have every role;
    others have the roles that are listed for them, by user name or number, and by group with an `@` before it."""

    socket: Path | None = Field(default=None, strict=False)
    """The socket; its folder must be open to those who are to connect. Left out: `operator-api.sock` in run_dir."""
    viewers: Accounts = ()
    """Accounts that may read."""
    operators: Accounts = ()
    """Accounts that may drain the appliance and change models and requests, and read."""
    security: Accounts = ()
    """Accounts that may change policy and keys and forget tenants, and read."""
