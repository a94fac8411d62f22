"""The supervisor's attestations: facts of its own, for models that the policy gives the tenant, and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from appliance.common.audit.attestation import Attestation, read_attestation
from appliance.common.audit.log import AuditLog, open_log
from appliance.common.control import Attest, Attested
from appliance.common.errors import ControlError
from appliance.common.policy_signature import sign_policy
from appliance.common.selftest_record import NAME, SelftestRecord, write_record
from appliance.supervisor.attesting import Attesting, ServedFacts
from appliance.supervisor.policy_reader import DeclaredTenants
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.keys.signing import load_or_make
from policy.files import read_sources
from policy.loader import load_policy

POLICY = """
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["small"], class: dedicated}
  beta: {credentials: ["key:b"], models: ["big*"]}
"""
NONCE = "9f86d081884c7d65"
SIGNERS = {"small": "55" * 32, "big": "", "other": ""}


@pytest.fixture
def audit(tmp_path: Path):
    """An audit log."""
    log = open_log(tmp_path / "audit")
    yield log
    log.close()


@pytest.fixture
def runtime(tmp_path: Path):
    """A runtime without isolation, which says so."""
    made = UnsafeRuntime(tmp_path / "run")
    yield made
    made.close()


def make(tmp_path: Path, audit: AuditLog | None, runtime) -> Attesting:
    """Attesting with two served models, one of them not in the policy of anybody."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    facts = ServedFacts({"small": "11" * 32, "big": "22" * 32, "other": "33" * 32}, SIGNERS, "44" * 32)
    return Attesting(audit, DeclaredTenants(path), runtime, facts)


def read(answer: Attested, audit: AuditLog) -> Attestation:
    """The attestation in an answer."""
    assert answer.problem == ""
    return read_attestation(answer.text.encode(), audit.verifier)


def test_it_says_what_the_supervisor_knows(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """Digests of model, image and policy, the class of the tenant, the nonce; that nothing isolates is told."""
    found = read(make(tmp_path, audit, runtime).answer(Attest("req_1", "alpha", "small", NONCE)), audit)
    assert (found.tenant, found.model, found.model_digest) == ("alpha", "small", "11" * 32)
    assert found.model_signer == "55" * 32
    assert (found.isolation_class, found.nonce, found.image) == ("dedicated", NONCE, "44" * 32)
    assert found.policy == load_policy(read_sources(tmp_path / "policy.yaml")).digest
    assert (found.runtime, found.program, found.flags) == ("unsafe/none", "", ())


def test_it_names_the_last_recorded_self_test(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """None before one is recorded; then the newest, without a restart; a file that is no record is told in the log and
    not quoted."""
    asked = make(tmp_path, audit, runtime)
    assert read(asked.answer(Attest("req_1", "alpha", "small", NONCE)), audit).selftest == ""
    for at in (1_790_812_800, 1_790_812_801):
        write_record(audit.directory, SelftestRecord(at, "0.1.0", "short", (61, 1, 2, 9)))
    found = read(asked.answer(Attest("req_2", "alpha", "small", NONCE)), audit)
    counts = "61 pass, 1 fail, 2 absent, 9 not run"
    assert found.selftest == f"2026-10-01T00:00:01Z, version 0.1.0, short form: {counts}"
    (audit.directory / NAME).write_text('{"version": "by hand"}')
    assert read(asked.answer(Attest("req_3", "alpha", "small", NONCE)), audit).selftest == ""


@pytest.mark.parametrize(
    ("tenant", "model"),
    [("alpha", "big"), ("beta", "small"), ("gamma", "small"), ("alpha", "none"), ("alpha", "other")],
)
def test_what_the_policy_does_not_give_is_not_attested(
    tmp_path: Path, audit: AuditLog, runtime, tenant: str, model: str
) -> None:
    """Another's model, an unknown tenant, an unknown model: one answer for all. Control: the tenant's own."""
    asked = make(tmp_path, audit, runtime)
    answer = asked.answer(Attest("req_1", tenant, model, NONCE))
    assert (answer.text, answer.problem) == ("", "the policy in the files does not give this tenant that model")
    assert asked.answer(Attest("req_1", "beta", "big", NONCE)).text


def test_a_model_is_attested_to_a_tenant_with_an_adapter_alone(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """It is served by the model whose adapter it has. Control: by no other."""
    asked = make(tmp_path, audit, runtime)
    (tmp_path / "policy.yaml").write_text(POLICY.replace('["big*"]', '["none"], adapters: ["small:fit"]'))
    assert read(asked.answer(Attest("req_1", "beta", "small", NONCE)), audit).model == "small"
    assert asked.answer(Attest("req_1", "beta", "big", NONCE)).text == ""


def test_an_edited_policy_is_attested_anew(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """The digest is that of the files as they are now."""
    asked = make(tmp_path, audit, runtime)
    first = read(asked.answer(Attest("req_1", "alpha", "small", NONCE)), audit)
    (tmp_path / "policy.yaml").write_text(POLICY.replace("dedicated", "shared"))
    second = read(asked.answer(Attest("req_1", "alpha", "small", NONCE)), audit)
    assert first.policy != second.policy
    assert (first.isolation_class, second.isolation_class) == ("dedicated", "shared")


def test_an_unsigned_policy_grants_nothing(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """Where policies must be signed the supervisor reads no other, as the gateway does: it keeps the one before, at the
    begin none. Control: without keys it follows the file."""
    key, path = load_or_make(tmp_path / "key")[0], tmp_path / "policy.yaml"
    make(tmp_path, audit, runtime)
    declared = DeclaredTenants(path, [key.public.hex()])
    assert not declared.read().tenants
    sign_policy(read_sources(path), path, key)
    assert set(declared.read().tenants) == {"alpha", "beta"}
    path.write_text(POLICY.replace("beta:", "gamma:"))
    assert set(declared.read().tenants) == {"alpha", "beta"}
    assert set(DeclaredTenants(path).read().tenants) == {"alpha", "gamma"}


def test_without_an_audit_log_nothing_is_signed(tmp_path: Path, runtime) -> None:
    """The answer says why."""
    answer = make(tmp_path, None, runtime).answer(Attest("req_1", "alpha", "small", NONCE))
    assert (answer.text, "keeps no audit log" in answer.problem) == ("", True)


def test_a_nonce_that_is_none_is_refused(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """It costs the attachment; a right question does not (control)."""
    asked = make(tmp_path, audit, runtime)
    asked.check(Attest("r", "alpha", "small", NONCE))
    with pytest.raises(ControlError):
        asked.check(Attest("r", "alpha", "small", "x"))


@pytest.fixture
def gvisor(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path):
    """The runtime of every shipped appliance."""
    made = GvisorRuntime(find_runsc((runsc_path,)), tmp_path_factory.mktemp("gv"))
    yield made
    made.close()


@pytest.mark.runsc
def test_a_real_runtime_is_named_with_its_digest_and_flags(
    tmp_path: Path, audit: AuditLog, gvisor: GvisorRuntime
) -> None:
    """runsc's release, the digest of its file, and flags without a path of this machine. A program that was replaced is
    hashed again."""
    asked = make(tmp_path, audit, gvisor)
    found = read(asked.answer(Attest("req_1", "alpha", "small", NONCE)), audit)
    assert found.runtime == "gvisor/systrap"
    assert found.program == f"runsc {gvisor.runsc.version}"
    assert found.program_digest == hashlib.sha256(gvisor.runsc.path.read_bytes()).hexdigest()
    assert "--network=none" in found.flags
    assert not any("/" in flag for flag in found.flags)
