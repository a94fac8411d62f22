"""Keeps the text of each policy that comes into force, however it was put there.

The gateway reports the digest of what it has put in force; the supervisor reads the files for itself and keeps them if
their digest is that one. A gateway that was taken over can so have no text kept that is not in the files.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from appliance.common.audit.entry import Entry
from appliance.common.errors import ConfigError
from appliance.common.policy_history import PolicyHistory, relative
from appliance.common.policy_signature import signature_file
from policy.errors import PolicyError
from policy.files import read_sources
from policy.loader import Source, load_policy

log = structlog.get_logger()


class PolicyKeeper:
    """Keeps versions of one policy; ``note`` is called and ``run`` runs in one event loop."""

    def __init__(self, policy: Path, history: PolicyHistory) -> None:
        """``policy`` is the configured path."""
        self._policy = policy
        self._history = history
        self._wanted = self._by = ""
        self._more = asyncio.Event()
        self._kept: list[Source] = []

    def note(self, one: Entry) -> None:
        """Take an entry of the gateway; those of policies that came into force are followed up."""
        if one.kind == "policy" and one.fields["outcome"] == "ok":
            self._wanted, self._by = str(one.fields["policy"]), str(one.fields["by"])
            self._more.set()

    async def run(self) -> None:
        """Keep what comes into force, until cancelled. However many reports come, one is followed up at a time."""
        while True:
            await self._more.wait()
            self._more.clear()
            await asyncio.to_thread(self._keep, self._wanted, self._by)

    def _keep(self, digest: str, by: str) -> None:
        try:
            sources = read_sources(self._policy)
            if sources == self._kept:
                return
            if load_policy(sources).digest != digest:
                log.warning("the policy in force is not the one in its files any more; it is not kept", digest=digest)
                return
            files, named = relative(sources, self._policy)
            signatures = signature_file(self._policy)
            if signatures.is_file():  # going back needs them too
                files[signatures.name] = signatures.read_text(encoding="ascii", errors="replace")
            kept = self._history.record(digest, files, named, time.time_ns() // 1_000_000, by)
            self._kept = sources
        except (OSError, PolicyError, ConfigError) as error:
            log.error("the policy in force is not kept", problem=str(error).partition("\n")[0])
        else:
            log.info("policy kept", digest=digest, new=kept)
