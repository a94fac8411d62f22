"""The supervisor's end of attestations: it says, under the audit log's signature, what serves a tenant's requests.

Every fact is one that the supervisor has for itself; of the gateway it takes the tenant, the model and the nonce, and
compares the first two with the policy files that it reads. One question is answered at a time, in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from appliance.common.audit.attestation import NONCE, Attestation, sign_attestation
from appliance.common.audit.log import AuditLog
from appliance.common.control import Attest, Attested, Control
from appliance.common.errors import ControlError
from appliance.common.version import VERSION
from appliance.supervisor.policy_reader import DeclaredTenants
from isolation.gvisor.runtime import Program, Runtime
from policy.routes import reachable

log = structlog.get_logger()

MAX_WAITING = 64
"""Questions that wait for their answers, each some 100 us of work; more are not kept, and the gateway's wait for them
ends."""

MAX_ID_CHARS = 64
"""Longest id of a request; a gateway's have 28 characters."""

Publish = Callable[[Control, tuple[int, ...]], bool]


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """What an attestation says of the appliance, the same for all tenants."""

    models: Mapping[str, str]
    """Digest of each served model's files."""
    image: str
    """Digest of the sandboxes' image; empty where there is none."""


class Attesting:
    """Answers questions for attestations; its coroutine and callbacks run in one event loop."""

    def __init__(
        self, audit: AuditLog | None, policy: Path, runtime: Runtime, facts: ServedFacts, publish: Publish
    ) -> None:
        """``audit`` signs; None where no log is kept. ``policy`` is the configured path; ``publish`` sends to the
        gateway."""
        self._audit = audit
        self._policy = DeclaredTenants(policy)
        self._runtime = runtime
        self._facts = facts
        self._publish = publish
        self._waiting: deque[Attest] = deque()
        self._more = asyncio.Event()
        self._program: tuple[tuple[int, int, int], Program] | None = None
        """Identity of the program's file when it was hashed, and what it is."""

    def take(self, message: Attest) -> None:
        """Take a question. Of more than can wait nothing is kept.

        Raises:
            ControlError: it is none that a gateway asks.
        """
        if NONCE.fullmatch(message.nonce) is None or len(message.request) > MAX_ID_CHARS:
            raise ControlError("a question for an attestation is not one that a gateway asks")
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
            self._more.set()

    def gateway_left(self) -> None:
        """Forget what a gateway that is gone asked."""
        self._waiting.clear()

    async def run(self) -> None:
        """Answer questions as they come, until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                self._publish(await asyncio.to_thread(self.answer, self._waiting.popleft()), ())

    def answer(self, message: Attest) -> Attested:
        """Return the attestation, or why there is none. Blocks."""
        audit = self._audit
        if audit is None:
            return Attested(message.request, "", "this appliance keeps no audit log, whose key would sign it")
        policy = self._policy.read()
        tenant = policy.tenants.get(message.tenant)
        digest = self._facts.models.get(message.model)
        if tenant is None or digest is None or not reachable(policy.routes, tenant.models, (message.model,)):
            return Attested(message.request, "", "the policy in the files does not give this tenant that model")
        try:
            program = self._read_program()
        except OSError as error:
            log.error("the program that runs sandboxes cannot be read", problem=str(error))
            return Attested(message.request, "", "the program that runs sandboxes cannot be read now")
        one = Attestation(
            log=audit.name,
            time=time.time_ns() // 1_000_000,
            nonce=message.nonce,
            tenant=tenant.id,
            model=message.model,
            model_digest=digest,
            isolation_class=tenant.isolation_class.value,
            policy=policy.digest,
            image=self._facts.image,
            runtime=self._runtime.label,
            program=program.name,
            program_digest=program.digest,
            flags=program.flags,
            limits=self._runtime.cgroups.describe(),
            version=VERSION,
        )
        return Attested(message.request, audit.sign(lambda key: sign_attestation(one, key)), "")

    def _read_program(self) -> Program:
        """Hash the program's file again where it is another than before: it has some sixty megabytes."""
        path = self._runtime.program_file
        stat = path.stat() if path is not None else None
        identity = (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat is not None else (0, 0, 0)
        if self._program is None or self._program[0] != identity:
            self._program = identity, self._runtime.program()
        return self._program[1]
