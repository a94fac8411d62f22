"""The configuration that runs, and the file that it came from: read again with each reload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.common.config import ApplianceConfig
from appliance.common.config_changes import Changes, changes
from appliance.common.operator_config import OperatorApiConfig, RemoteOperatorsConfig

Reread = Callable[[], ApplianceConfig]
"""Reads file, variables and options as at the start; raises ``ConfigError``."""


class ConfigFile:
    """The configuration in force; ``reread`` None: nobody knows where it came from, and it never changes."""

    def __init__(self, config: ApplianceConfig, reread: Reread | None) -> None:
        self._reread = reread
        self.running = config
        """What is in force, with what reloads have applied."""

    async def look(self) -> Changes:
        """What has changed since. Nothing is applied.

        Raises:
            ConfigError: the file is not usable; each problem with its place.
        """
        wanted = self.running if self._reread is None else await asyncio.to_thread(self._reread)
        return changes(self.running, wanted)

    def remote_operators(self) -> RemoteOperatorsConfig | None:
        """The section about operators on other machines in force."""
        return self.running.remote_operators

    def operator_api(self) -> OperatorApiConfig | None:
        """The section about users of this machine in force."""
        return self.running.operator_api

    def adopt(self, found: Changes) -> None:
        """Put the live keys of ``found`` in force."""
        self.running = found.config
