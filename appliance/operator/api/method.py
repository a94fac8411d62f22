"""A method of the operator's API: its message, and the function that answers it. The role that it needs is in
``appliance.common.operator_roles``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.operator_roles import OperatorRole

TENANT = "tenant"
"""Field of a request that names a tenant."""


class ChangeTurn(StrEnum):
    """What a method changes: methods that change the same have turns."""

    POLICY = "policy"
    KEYS = "keys"
    MODELS = "models"
    REQUESTS = "requests"


@dataclass(slots=True)
class Work:
    """What a method knows beside its request."""

    config_path: Path
    """The appliance's athanor.yaml."""
    roles: frozenset[OperatorRole]
    """Roles of the caller."""
    given_by: str = "operator_api"
    """Section of the configuration that gives roles to this caller."""
    later: Callable[[], None] | None = None
    """What is left to do when the answer is on its way; set by the method. It has the method's turn."""

    def config(self) -> ApplianceConfig:
        """Read the configuration, as the commands do.

        Raises:
            ConfigError: it cannot be used.
        """
        return load_config(self.config_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method."""

    request: type[Message]
    answer: Callable[[Any, Work], Message]
    """Called in a thread; may block."""
    turn: ChangeTurn | None = None
    """None: it changes nothing."""
    subject: str = ""
    """Field of the request that names what it is about, for the audit log, which hides the name of a tenant
    (``TENANT``); of a list all are told."""
