"""Models that the configuration demands signatures of: what is planned, what boots, what a change is answered."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.common.config_loader import load_config, resolve
from appliance.common.errors import ConfigError, ModelDigestError
from appliance.common.served_models import models_digest
from appliance.operator.doctor.facts import Running
from appliance.operator.doctor.service_facts import look_at_service
from appliance.supervisor.boot import boot
from appliance.supervisor.model_changes import ModelChanges, ServedNow, read_models
from appliance.supervisor.model_keepers import ModelKeepers
from isolation.errors import SandboxStartError
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.keys.public_key import public_key_of
from tests.appliance.common.bundles import pem
from tests.appliance.common.test_model_signature import RECORDED, SIGNER

LINE = public_key_of(SIGNER).line
OTHER = public_key_of(pem(ec.derive_private_key(9, ec.SECP256R1()))).line

FILE = """\
models:
  - name: m
    path: m
%s
policy: policy.yaml
credentials: credentials.json
pepper: pepper
run_dir: run
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a signed model."""
    shutil.copytree(RECORDED, tmp_path / "m", copy_function=shutil.copyfile)
    return tmp_path


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[UnsafeRuntime]:
    """A runtime that isolates nothing; nothing is started in it."""
    made = UnsafeRuntime(tmp_path / "run")
    yield made
    made.close()


def write(place: Path, keys: str) -> Path:
    """A configuration with these lines about keys."""
    path = place / "athanor.yaml"
    path.write_text(FILE % keys)
    return path


@pytest.mark.parametrize("keys", [f"    signed_by: [{LINE}]", f"model_keys: [{LINE}]"])
def test_the_signer_is_planned_and_another_is_refused_at_boot(place: Path, runtime: UnsafeRuntime, keys: str) -> None:
    """Both keys of the configuration demand it. With another key no boot begins, and the reason names the bundle; so it
    is where the weights were swapped after the start."""
    (planned,) = read_models(load_config(write(place, keys)), runtime)
    assert planned.files.signer == public_key_of(SIGNER).id
    (refused,) = read_models(load_config(write(place, keys.replace(LINE, OTHER))), runtime)
    with pytest.raises(SandboxStartError, match=r"m/model\.sig does not hold: it is not signed by any of the keys"):
        boot(refused.plans[0], runtime, threading.Event())
    (place / "m/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")
    with pytest.raises(SandboxStartError, match=r"model\.safetensors is not what it was at the start") as swapped:
        boot(planned.plans[0], runtime, threading.Event())
    assert isinstance(swapped.value.__cause__, ModelDigestError)
    assert not (place / "run/ipc").exists()


def test_a_models_own_keys_count_in_place_of_all_models(place: Path) -> None:
    """The key of all is for models that name none; a text that is no key is refused with its place."""
    config = load_config(write(place, f"    signed_by: [{LINE}]\nmodel_keys: [{OTHER}]"))
    assert config.keys_for(config.models[0]) == (LINE,)
    config = load_config(write(place, f"model_keys: [{OTHER}]"))
    assert config.keys_for(config.models[0]) == (OTHER,)
    block = "".join(f"\n        {line}" for line in SIGNER.splitlines())
    config = load_config(write(place, f"    signed_by:\n      - |{block}"))
    assert config.models[0].signed_by == (LINE,)
    with pytest.raises(ConfigError, match=r"athanor\.yaml:4:.*signed_by\[0\]: not a public key"):
        load_config(write(place, "    signed_by: [abc]"))


def test_a_change_to_an_unsigned_model_is_refused_where_it_is_written(place: Path, runtime: UnsafeRuntime) -> None:
    """A reload that brings such a model changes nothing; one that is signed is found good (control)."""

    def plan(keys: str) -> Any:
        found = resolve(write(place, keys))
        changes = ModelChanges(
            found.config,
            ModelKeepers(lambda _plan: pytest.fail("nothing boots"), lambda: None),
            runtime,
            lambda _message, _fds: True,
            lambda _entry: None,
            lambda: found,
        )
        return changes._plan(models_digest(found.config.models), {}, frozenset(), ServedNow({}, frozenset()))

    assert [one.files.signer for one in plan(f"    signed_by: [{LINE}]")[1]] == [public_key_of(SIGNER).id]
    with pytest.raises(ConfigError, match=r"athanor\.yaml:4:5: model m: .*does not hold"):
        plan(f"    signed_by: [{OTHER}]")


def test_doctor_looks_at_the_signature(place: Path) -> None:
    """Who has signed, or why nobody who may has."""
    for key, signer, problem in ((LINE, public_key_of(SIGNER).id, ""), (OTHER, "", "does not hold")):
        config = load_config(path := write(place, f"model_keys: [{key}]"))
        running = Running(answers=False, admin="127.0.0.1:1")
        (model,) = look_at_service(config, path, running, units=()).models
        assert (model.signer, problem in model.unsigned) == (signer, True)
