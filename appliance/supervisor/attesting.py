"""The supervisor's end of attestations: it says, under the audit log's signature, what serves a tenant's requests.

An attestation names every model that the tenant may use, and every adapter that it has.

Every fact is one that the supervisor has for itself; of the gateway it takes the tenant, the model and the nonce, and
compares the first two with the policy files that it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from appliance.common.audit.attestation import MAX_ATTESTATION_BYTES, NONCE, Attestation, sign_attestation
from appliance.common.audit.log import AuditLog
from appliance.common.control import Attest, Attested
from appliance.common.errors import ConfigError, ControlError
from appliance.common.selftest_record import read_record
from appliance.common.version import VERSION
from appliance.supervisor.attested_models import ServedModel, attested_adapters, attested_models, usable_models
from appliance.supervisor.policy_reader import DeclaredTenants
from isolation.gvisor.runtime import Program, Runtime
from policy.model import PolicySet, Tenant

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """What an attestation says of the appliance, the same for all tenants."""

    models: Callable[[], Sequence[ServedModel]]
    """Gives the models that are served now, by name; called in a thread."""
    image: str
    """Digest of the sandboxes' image; empty where there is none."""
    region: str = ""
    """Region in which the appliance is; empty: none."""


class Attesting:
    """Answers questions for attestations, each some 100 us of work."""

    def __init__(self, audit: AuditLog | None, policy: DeclaredTenants, runtime: Runtime, facts: ServedFacts) -> None:
        """``audit`` signs; None where no log is kept. ``policy`` reads its files."""
        self._audit = audit
        self._policy = policy
        self._runtime = runtime
        self._facts = facts
        self._program: tuple[tuple[int, int, int], Program] | None = None
        """Identity of the program's file when it was hashed, and what it is."""

    def check(self, message: Attest) -> None:
        """Refuse what no gateway asks.

        Raises:
            ControlError: it is such a question.
        """
        if NONCE.fullmatch(message.nonce) is None:
            raise ControlError("a question for an attestation is not one that a gateway asks")

    def answer(self, message: Attest) -> Attested:
        """Return the attestation, or why there is none. Blocks."""
        audit = self._audit
        if audit is None:
            return Attested(message.request, "", "this appliance keeps no audit log, whose key would sign it")
        policy = self._policy.read()
        tenant = policy.tenants.get(message.tenant)
        usable = [] if tenant is None else usable_models(self._facts.models(), policy, tenant, self._facts.region)
        if tenant is None or message.model not in [one.name for one in usable]:
            return Attested(message.request, "", "the policy in the files does not give this tenant that model")
        try:
            program = self._read_program()
        except OSError as error:
            log.error("the program that runs sandboxes cannot be read", problem=str(error))
            return Attested(message.request, "", "the program that runs sandboxes cannot be read now")
        one = self._attestation(message, policy, tenant, usable, program, audit)
        text = audit.sign(lambda key: sign_attestation(one, key))
        if (size := len(text.encode())) > MAX_ATTESTATION_BYTES:
            log.error("an attestation is too large", tenant=tenant.id, size=size, most=MAX_ATTESTATION_BYTES)
            return Attested(message.request, "", f"it would have {size} bytes, more than a statement may have")
        return Attested(message.request, text, "")

    def _attestation(
        self,
        message: Attest,
        policy: PolicySet,
        tenant: Tenant,
        usable: Sequence[ServedModel],
        program: Program,
        audit: AuditLog,
    ) -> Attestation:
        return Attestation(
            log=audit.name,
            time=time.time_ns() // 1_000_000,
            nonce=message.nonce,
            tenant=tenant.id,
            model=message.model,
            isolation_class=tenant.isolation_class.value,
            policy=policy.digest,
            image=self._facts.image,
            runtime=self._runtime.label,
            program=program.name,
            program_digest=program.digest,
            flags=program.flags,
            limits=self._runtime.cgroups.describe(),
            version=VERSION,
            selftest=self._read_selftest(audit),
            models=attested_models(usable, tenant, self._runtime.label, program),
            adapters=attested_adapters(usable, tenant),
        )

    def _read_selftest(self, audit: AuditLog) -> str:
        """Return the record of the last self-test in one line; empty where there is none that can be read."""
        try:
            record = read_record(audit.directory)
        except ConfigError as error:
            log.error("the record of the last self-test cannot be read", problem=str(error))
            return ""
        return record.line() if record is not None else ""

    def _read_program(self) -> Program:
        """Hash the program's file again where it is another than before: it has some sixty megabytes."""
        path = self._runtime.program_file
        stat = path.stat() if path is not None else None
        identity = (stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat is not None else (0, 0, 0)
        if self._program is None or self._program[0] != identity:
            self._program = identity, self._runtime.program()
        return self._program[1]
