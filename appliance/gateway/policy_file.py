"""The policy in force and its replacement: read, check, fetch what it needs, then switch in one step, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime
from pathlib import Path

import structlog

from appliance.common.clocks import Clocks
from appliance.common.collection import no_collection
from appliance.common.errors import ApplianceError, ConfigError
from appliance.common.figures import counted
from appliance.common.keys import KeyTable
from appliance.common.kv_shares import account_names
from appliance.common.policy_signature import check_signed
from appliance.common.shadow_status import ShadowStatus
from appliance.common.status import PolicyStatus, ReloadOutcome
from appliance.gateway.front.key_file import KeyFile, KeyRead
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.shadow import Shadow
from policy.errors import PolicyError
from policy.files import overlooked, read_shadow, read_sources, shadow_file
from policy.host_part import host_part
from policy.loader import load_policy
from policy.model import PolicySet
from policy.references import dangling

log = structlog.get_logger()

Prepare = Callable[[PolicySet], Awaitable[list[str]]]
"""Makes what a policy needs beforehand; returns what is wrong with it."""

FetchNamespaces = Callable[[list[str]], Awaitable[dict[str, bytes]]]


ACCOUNTS_A_TURN = 500
"""Accounts that are brought under a new policy in one turn of the event loop: some 4 ms at most."""

FREED_A_TURN = 2_000
"""Tenants and keys of before that are freed in one turn likewise: some 2 ms."""

MAX_WARNINGS = 20
"""Most warnings of one reload: a policy of a thousand tenants may have one for each."""


class PolicyFile:
    """The policy file with its drop-ins (or a folder of these) and the credentials beside it."""

    def __init__(
        self,
        policy: Path,
        credentials: Path,
        pepper: Path,
        models: Collection[str],
        signers: Collection[str] = (),
        hosts: int = 1,
    ) -> None:
        """``models``: names of the models that are served. ``signers``: public keys, one of which must have signed the
        policy; none where it needs no signature. ``hosts`` share its limits, of which this one has its part."""
        self._hosts = hosts
        self._signers = signers
        self._models = models
        self._policy, self._credentials, self._pepper = policy, credentials, pepper
        self._loaded_at = time.monotonic()
        self._last_error: str | None = None
        self._last_attempt_at = self._loaded_at
        self.shadow: PolicySet | None = None
        """Policy that shall decide beside the one in force, as of the last look."""
        self._shadow_problems: tuple[str, ...] = ()
        self.key_file = KeyFile(credentials, pepper)
        """API keys in force, and their files."""
        self._gone: list[object] = []
        """Tenants and keys that are in force no more, and not freed yet."""
        self.overlooked: tuple[str, ...] = ()
        """A line for each file among the drop-ins that is no part of the policy, as of the last look."""

    def load(self) -> PolicySet:
        """Return the policy, checked; its API keys are then in force.

        Raises:
            PolicyError, ConfigError: as ``read``.
        """
        policy, keys = self.read()
        self.key_file.adopt(keys)
        self.shadow, self._shadow_problems = self._read_shadow()
        return policy

    @property
    def keys(self) -> KeyTable:
        """API keys in force."""
        return self.key_file.keys

    def read(self) -> tuple[PolicySet, KeyRead]:
        """Return policy and API keys, checked.

        Raises:
            PolicyError: the policy is wrong; each problem with file, line and column.
            ConfigError: the credentials cannot be used, or the policy is not signed as it must be.
        """
        try:
            sources = read_sources(self._policy)
            self.overlooked = tuple(overlooked(self._policy))
        except OSError as error:
            named = error.filename or self._policy
            raise ConfigError(f"cannot read {named}: {(error.strerror or str(error)).lower()}") from error
        check_signed(sources, self._policy, self._signers)
        for line in self.overlooked:
            log.warning("a file beside the policy is not read", said=line)
        policy = host_part(load_policy(sources), self._hosts)
        return policy, self.key_file.read(self._credentials, self._pepper)

    def use(self, credentials: Path, pepper: Path, models: Collection[str]) -> None:
        """Read the keys from these files from now on; ``models`` are served, or will be in a moment."""
        self._credentials, self._pepper, self._models = credentials, pepper, models

    def refused(self, digest: str, problems: tuple[str, ...]) -> ReloadOutcome:
        """Remember and return the outcome of a reload that changed nothing."""
        self._last_attempt_at = time.monotonic()
        self._last_error = problems[0] if problems else "unknown"
        log.error("reload refused", problems=problems)
        return ReloadOutcome(
            ok=False,
            digest=digest,
            problems=problems,
            message="what was to be reloaded is not usable; what was in force before stays so",
        )

    async def reload(self, ledger: Ledger, fetch: FetchNamespaces, prepare: Prepare) -> ReloadOutcome:
        """Replace policy and keys together, in one turn of the event loop; ``settle`` does the rest. A problem changes
        nothing and is reported.

        The files are read, checked and compared in a thread: a policy of ten thousand tenants takes a second, in which
        all running answers would stand still. A thread suffices, a process of its own would only add a copy of the
        result: the reader calls the parser for a few bytes at a time, so the event loop gets its turn.
        """
        try:
            policy, keys, warnings, shadow = await asyncio.to_thread(self._read_and_compare)
            if found := await prepare(policy):
                raise ConfigError("\n".join(found))
            await asyncio.sleep(0)  # what prepares looks at every tenant, and what follows does so again
            namespaces = await fetch(account_names(policy))
        except (PolicyError, ApplianceError) as error:
            return self.refused(ledger.policy.digest, tuple(str(error).splitlines()))
        self._gone = [*ledger.policy.tenants.values(), *self.keys.records.values()]
        ledger.replace(policy, namespaces)
        self.key_file.adopt(keys)
        self.shadow, self._shadow_problems = shadow
        self._loaded_at = self._last_attempt_at = time.monotonic()
        self._last_error = None
        log.info("policy reloaded", digest=policy.digest, tenants=len(policy.tenants))
        return ReloadOutcome(
            ok=True,
            digest=policy.digest,
            message=f"policy {policy.digest[:12]} with {counted(len(policy.tenants), 'tenant')} is in force",
            warnings=(*(f"shadow policy: {line}" for line in self._shadow_problems), *warnings),
        )

    async def settle(self, ledger: Ledger) -> None:
        """Do what is left after a reload, a little in each turn of the event loop: bring accounts under the policy, and
        free what was in force before. In the turn of the switch it would hold up all running answers."""
        for _ in iter(lambda: ledger.catch_up(ACCOUNTS_A_TURN), False):
            await asyncio.sleep(0)
        while self._gone:
            del self._gone[-FREED_A_TURN:]
            await asyncio.sleep(0)

    def shadow_status(self, shadow: Shadow | None) -> ShadowStatus:
        """Return what the shadow policy would have decided, or that there is none."""
        file = str(shadow_file(self._policy))
        return ShadowStatus(file=file, problems=self._shadow_problems) if shadow is None else shadow.status(file)

    def _read_shadow(self) -> tuple[PolicySet | None, tuple[str, ...]]:
        """Return the shadow policy, or why what is there is none. It is no reason to refuse anything."""
        try:
            sources = read_shadow(self._policy)
            return (None if sources is None else host_part(load_policy(sources), self._hosts)), ()
        except (OSError, PolicyError) as error:
            problems = tuple(str(error).splitlines())[:MAX_WARNINGS]
            log.warning("the shadow policy is not taken", problems=problems)
            return None, problems

    def _read_and_compare(self) -> tuple[PolicySet, KeyRead, tuple[str, ...], tuple[PolicySet | None, tuple[str, ...]]]:
        """Return policy, API keys, warnings, and the shadow policy with its problems; runs in a thread.

        Raises:
            PolicyError, ConfigError: as ``read``.
        """
        with no_collection():
            policy, keys = self.read()
            return policy, keys, self._warnings(policy, keys.table), self._read_shadow()

    def _warnings(self, policy: PolicySet, keys: KeyTable) -> tuple[str, ...]:
        """What is worth a look in a policy, a line each, and no more than ``MAX_WARNINGS``."""
        loose = dangling(policy, self._models, keys.in_force(datetime.now(UTC)))
        told = (*self.overlooked, *map(str, loose))
        rest = len(told) - MAX_WARNINGS
        return (*told[:MAX_WARNINGS], *((f"and {rest} more: athanor policy check {self._policy}",) if rest > 0 else ()))

    def status(self, policy: PolicySet, clocks: Clocks) -> PolicyStatus:
        """Return the state of the policy for status."""
        return PolicyStatus(
            digest=policy.digest,
            loaded_at=clocks.unix(self._loaded_at),
            file=str(self._policy),
            last_error=self._last_error,
            last_attempt_at=clocks.unix(self._last_attempt_at),
        )
