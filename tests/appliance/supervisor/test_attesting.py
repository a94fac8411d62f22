"""The supervisor's attestations: facts of its own, for models that the policy gives the tenant, and nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.audit.attestation import MAX_NONCE, Attestation, read_attestation
from appliance.common.audit.log import AuditLog, open_log
from appliance.common.control import Attest, Attested
from appliance.common.errors import ControlError
from appliance.common.policy_signature import sign_policy
from appliance.common.selftest_record import NAME, SelftestRecord, write_record
from appliance.supervisor import attesting
from appliance.supervisor.attested_models import ServedModel, attested_models
from appliance.supervisor.attesting import Attesting, ServedFacts
from appliance.supervisor.policy_reader import DeclaredTenants
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.runtime import Program
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.keys.signing import load_or_make
from policy.files import read_sources
from policy.loader import Source, load_policy
from policy.schema import MAX_ADAPTERS

POLICY = """
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["small"], class: dedicated}
  beta: {credentials: ["key:b"], models: ["big*"]}
"""
NONCE = "9f86d081884c7d65"
SERVED = (
    ServedModel("big", "22" * 32, gpu=True, adapters={"big:fit": "66" * 32}),
    ServedModel("far", "77" * 32, external=True),
    ServedModel("other", "33" * 32),
    ServedModel("small", "11" * 32, "55" * 32, adapters={"small:fit": "88" * 32, "small:theirs": "99" * 32}),
)
"""Models that are served: one on a GPU, one outside of the appliance, one in the policy of nobody."""


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
    """Attesting with these models."""
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    facts = ServedFacts(lambda: SERVED, "44" * 32, "eu-central")
    return Attesting(audit, DeclaredTenants(path), runtime, facts)


def read(answer: Attested, audit: AuditLog) -> Attestation:
    """The attestation in an answer."""
    assert answer.problem == ""
    return read_attestation(answer.text.encode(), audit.verifier)


def test_it_says_what_the_supervisor_knows(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """Digests of model, image and policy, the class of the tenant, the nonce; that nothing isolates is told."""
    found = read(make(tmp_path, audit, runtime).answer(Attest("req_1", "alpha", "small", NONCE)), audit)
    assert (found.tenant, found.model, found.asked.digest) == ("alpha", "small", "11" * 32)
    assert found.asked.signer == "55" * 32
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
    found = read(asked.answer(Attest("req_1", "beta", "small", NONCE)), audit)
    assert (found.model, names(found)) == ("small", (["small"], ["small:fit"]))
    assert asked.answer(Attest("req_1", "beta", "big", NONCE)).text == ""


def names(one: Attestation) -> tuple[list[str], list[str]]:
    """Models and adapters that an attestation names."""
    return [model.name for model in one.models], [adapter.name for adapter in one.adapters]


GRANTS = {
    "one": ('["small"]', (["small"], [])),
    "all": ('["*"]', (["big", "far", "other", "small"], [])),
    "adapters": (
        '["small"], adapters: ["small:fit", "big:fit", "small:gone"]',
        (["big", "small"], ["big:fit", "small:fit"]),
    ),
    "alias": ('["small", "fast"]', (["other", "small"], [])),
    "outside": ('["*"], class: strict, kv: {reservation: 20%}', (["big", "other", "small"], [])),
    "allowed": (
        '["*"], class: strict, kv: {reservation: 20%}, external: allow',
        (["big", "far", "other", "small"], []),
    ),
    "region": ('["*"], model_regions: [{models: ["b*"], regions: ["us"]}]', (["far", "other", "small"], [])),
}


@pytest.mark.parametrize("name", GRANTS)
def test_it_names_what_the_tenant_may_use_and_nothing_of_others(
    tmp_path: Path, audit: AuditLog, runtime, name: str
) -> None:
    """Every model and adapter of the tenant's own: by pattern, by an alias, by an adapter alone; not one outside of the
    appliance, or kept to another region, that it may not use; nothing else of what is served stands anywhere in the
    text. A second tenant has the rest, adapters included (control), and what it has changes no byte of the first's."""
    asked, path = make(tmp_path, audit, runtime), tmp_path / "policy.yaml"
    grant, (models, adapters) = GRANTS[name]
    route = "routes: {fast: {to: [{model: other}]}}\n"
    rest = "  beta: {{credentials: ['key:b'], models: ['*'], adapters: {}}}\n"
    text = f"version: 1\n{route}tenants:\n  alpha: {{credentials: ['key:a'], models: {grant}}}\n"
    seen = []
    for others in ("[]", '["small:theirs", "small:fit", "big:fit"]'):
        path.write_text(text + rest.format(others))
        answer = asked.answer(Attest("req_1", "alpha", "small", NONCE))
        found = read(answer, audit)
        assert names(found) == (models, adapters)
        digests = {one.digest for one in SERVED} | {digest for one in SERVED for digest in one.adapters.values()}
        stated = {one.digest for one in (*found.models, *found.adapters)}
        assert not any(digest in answer.text for digest in digests - stated)
        assert stated <= digests
        seen.append(replace(found, time=0, policy=""))
    assert seen[0] == seen[1]
    told = read(asked.answer(Attest("req_2", "beta", "small", NONCE)), audit)
    assert names(told) == (["big", "far", "other", "small"], ["big:fit", "small:fit", "small:theirs"])


def test_it_tells_where_each_model_runs(tmp_path: Path, audit: AuditLog, runtime) -> None:
    """A model outside of the appliance is told; flags of a GPU's sandbox are those of models with one: of the tenant's
    own engine where it has one, which other tenants' statements do not follow."""
    own = replace(SERVED[0], own=frozenset(["alpha"]))
    program = Program("runsc 1", "ab", ("--network=none",), ("--nvproxy",))
    for tenant, flags in (("alpha", ()), ("beta", ("--nvproxy",))):
        policy = load_policy(
            [Source("p", f"version: 1\ntenants: {{{tenant}: {{credentials: ['key:a'], models: ['*']}}}}")]
        )
        found = attested_models([own, *SERVED[1:]], policy.tenants[tenant], "gvisor/systrap", program)
        assert [one.flags for one in found] == [flags, (), (), ()]
        assert [one.sandbox for one in found] == ["gvisor/systrap", "outside", "gvisor/systrap", "gvisor/systrap"]
    path = tmp_path / "policy.yaml"
    asked = make(tmp_path, audit, runtime)
    path.write_text(POLICY.replace('"big*"', '"*"'))
    found = read(asked.answer(Attest("req_1", "beta", "big", NONCE)), audit)
    assert [one.sandbox for one in found.models] == ["unsafe/none", "outside", "unsafe/none", "unsafe/none"]


def test_the_largest_fits(tmp_path: Path, audit: AuditLog, runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many models on GPUs and adapters as there may be, with the longest names. One that were larger than may be is
    not sent, and the answer says so (control)."""
    first = f"{0:0128}"
    own = {f"{first}:{number:063}": "ef" * 32 for number in range(MAX_ADAPTERS)}
    served = [ServedModel(f"{number:0128}", "ab" * 32, "cd" * 32, gpu=True, adapters=own) for number in range(64)]
    flags = ("--nvproxy", "--nvproxy-allowed-driver-capabilities=compute,utility")
    monkeypatch.setattr(runtime, "program", lambda: Program("runsc 20990101", "ab" * 32, ("--flag=word",) * 16, flags))
    path = tmp_path / "policy.yaml"
    grant = f"models: ['*'], adapters: {json.dumps(list(own))}"
    path.write_text(f"version: 1\ntenants:\n  {'a' * 63}: {{credentials: ['key:a'], {grant}}}\n")
    asked = Attesting(audit, DeclaredTenants(path), runtime, ServedFacts(lambda: served, "44" * 32))
    question = Attest("req_1", "a" * 63, first, "9" * MAX_NONCE)
    found = read(asked.answer(question), audit)
    assert (len(found.models), len(found.adapters)) == (64, MAX_ADAPTERS)
    monkeypatch.setattr(attesting, "MAX_ATTESTATION_BYTES", 60_000)
    answer = asked.answer(question)
    assert (answer.text, "more than a statement may have" in answer.problem) == ("", True)


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
    extra = gvisor.program().gpu_flags
    assert extra[0] == "--nvproxy" and not set(extra) & set(found.flags)
