"""What is served is what was signed: another model, image or policy in its place is refused by the supervisor, and told
by doctor."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.image.signature import sign
from appliance.common.policy_signature import sign_policy
from appliance.operator.doctor.facts import Running, ServiceFacts
from appliance.operator.doctor.finding import Severity
from appliance.operator.doctor.service_checks import check_image, check_model
from appliance.operator.doctor.service_facts import look_at_service
from appliance.supervisor.boot import boot
from appliance.supervisor.model_changes import read_models
from appliance.supervisor.policy_reader import DeclaredTenants
from appliance.supervisor.service import _checked
from isolation.errors import ImageError, SandboxStartError
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.keys.public_key import public_key_of
from isolation.keys.signing import key_of
from policy.files import read_sources
from tests.appliance.common.bundles import pem, sign_folder
from tests.appliance.common.image.samples import make_image
from tests.appliance.common.test_model_signature import RECORDED

OURS, THEIRS = key_of(bytes(32)), key_of(bytes([1] * 32))
MODEL_KEY, THEIR_KEY = (ec.derive_private_key(number, ec.SECP256R1()) for number in (21, 22))

POLICY = 'version: 1\ntenants:\n  alpha: {credentials: ["key:a"], models: ["m"]}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a signed model, a signed image and a signed policy, and a configuration that demands all three."""
    shutil.copytree(RECORDED, tmp_path / "m", copy_function=shutil.copyfile)
    sign_folder(tmp_path / "m", MODEL_KEY)
    digest = make_image(tmp_path / "image").digest
    sign(tmp_path / "image", OURS)
    (tmp_path / "policy.yaml").write_text(POLICY)
    sign_policy(read_sources(tmp_path / "policy.yaml"), tmp_path / "policy.yaml", OURS)
    (tmp_path / "athanor.yaml").write_text(
        f"models: [{{name: m, path: m}}]\nmodel_keys: [{public_key_of(pem(MODEL_KEY)).line}]\n"
        f"policy: policy.yaml\npolicy_keys: [{OURS.public.hex()}]\n"
        "credentials: credentials.json\npepper: pepper\nrun_dir: run\n"
        f"sandbox: {{image: image, image_digest: {digest}, image_keys: [{OURS.public.hex()}]}}\n"
    )
    return tmp_path


def config(place: Path) -> ApplianceConfig:
    """The configuration."""
    return load_config(place / "athanor.yaml")


def looked_at(place: Path) -> ServiceFacts:
    """What doctor sees."""
    return look_at_service(config(place), place / "athanor.yaml", Running(answers=False, admin=""), units=())


def test_a_swapped_model_is_refused_and_told(place: Path) -> None:
    """Other weights with a signature of their own: no boot begins. Before that the plan has the signer (control)."""
    text = (place / "athanor.yaml").read_text()
    (place / "athanor.yaml").write_text(text.partition("sandbox:")[0])  # The small image has no programs to plan with.
    runtime = UnsafeRuntime(place / "run")
    (planned,) = read_models(config(place), runtime)
    assert planned.files.signer == public_key_of(pem(MODEL_KEY)).id
    assert check_model(looked_at(place).models[0]).level is Severity.OK
    (place / "m/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")
    sign_folder(place / "m", THEIR_KEY)
    (planned,) = read_models(config(place), runtime)
    with pytest.raises(SandboxStartError, match=r"m/model\.sig does not hold"):
        boot(planned.plans[0], runtime, threading.Event())
    told = check_model(looked_at(place).models[0])
    assert (told.level, "model.sig does not hold" in told.what) == (Severity.PROBLEM, True)
    runtime.close()


def test_a_swapped_image_is_refused_and_told(place: Path) -> None:
    """Another whole image, signed by another key: the supervisor does not start. Before that it does (control)."""
    _checked(config(place))
    assert check_image(looked_at(place).image).level is Severity.OK
    shutil.rmtree(place / "image")
    make_image(place / "image", "other")
    sign(place / "image", THEIRS)
    with pytest.raises(ImageError, match="the configuration pins"):
        _checked(config(place))
    told = check_image(looked_at(place).image)
    assert (told.level, "the configuration pins" in told.what) == (Severity.PROBLEM, True)


def test_a_swapped_policy_is_refused_and_told(place: Path) -> None:
    """A policy with one tenant more, signed by another key: the one before stays in force. Before that it was taken
    (control)."""
    declared = DeclaredTenants(place / "policy.yaml", config(place).policy_keys)
    assert set(declared.read().tenants) == {"alpha"} and looked_at(place).policy.problems == ()
    path = place / "policy.yaml"
    path.write_text(POLICY + '  mallory: {credentials: ["key:m"], models: ["m"]}\n')
    path.with_name("policy.yaml.sig").unlink()
    sign_policy(read_sources(path), path, THEIRS)
    assert set(declared.read().tenants) == {"alpha"}
    assert not DeclaredTenants(path, config(place).policy_keys).read().tenants
    (problem,) = looked_at(place).policy.problems
    assert "not by any key of policy_keys" in problem
