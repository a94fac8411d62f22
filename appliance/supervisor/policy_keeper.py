"""Keeps the text of each policy that comes into force, however it was put there.

The gateway reports the digest of what it has put in force; the supervisor reads the files for itself and keeps them if
their digest is that one. A gateway that was taken over can so have no text kept that is not in the files. Of a policy
whose files were replaced before they were read the history has the digest alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

import structlog

from appliance.common.audit.entry import Entry
from appliance.common.errors import ConfigError
from appliance.common.policy_history import MAX_UNREAD, POLICY_DIGEST, PolicyHistory, relative
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
        self._wanted: deque[tuple[str, str, int]] = deque(maxlen=MAX_UNREAD)
        """Digest, who put it in force, and when (ms), the oldest first: of more the history would keep none."""
        self._more = asyncio.Event()
        self._kept: list[Source] = []
        self._kept_digest = ""

    def note(self, one: Entry) -> None:
        """Take an entry of the gateway; those of policies that came into force are followed up."""
        if one.kind != "policy" or one.fields["outcome"] != "ok":
            return
        digest, by = str(one.fields["policy"]), str(one.fields["by"])
        if POLICY_DIGEST.fullmatch(digest):
            self._wanted.append((digest, by, time.time_ns() // 1_000_000))
            self._more.set()

    async def run(self) -> None:
        """Keep what comes into force, until cancelled. However many reports come, one is followed up at a time."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._wanted:
                await asyncio.to_thread(self._keep, *self._wanted.popleft())

    def _keep(self, digest: str, by: str, now_ms: int) -> None:
        try:
            if not self._read(digest, by, now_ms) and self._history.record_unread(digest, now_ms, by):
                self._kept, self._kept_digest = [], ""  # What was kept last is not the newest any more.
                log.warning("the policy in force is not the one in its files any more; its text is lost", digest=digest)
        except ConfigError as error:
            log.error("the policy in force is not kept", problem=str(error).partition("\n")[0])

    def _read(self, digest: str, by: str, now_ms: int) -> bool:
        """Keep the files if they are the policy of this digest; returns whether they are.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            sources = read_sources(self._policy)
            if digest != (self._kept_digest if sources == self._kept else load_policy(sources).digest):
                return False
            if sources == self._kept:
                return True
            files, named = relative(sources, self._policy)
            signatures = signature_file(self._policy)
            if signatures.is_file():  # going back needs them too
                files[signatures.name] = signatures.read_text(encoding="ascii", errors="replace")
        except (OSError, PolicyError, ConfigError) as error:
            log.error("the policy in force cannot be read", problem=str(error).partition("\n")[0])
            return False
        kept = self._history.record(digest, files, named, now_ms, by)
        self._kept, self._kept_digest = sources, digest
        log.info("policy kept", digest=digest, new=kept)
        return True
