"""The demo's state directory and models: what would do harm or cannot be is refused before anything is started."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError, StartError
from appliance.common.lock import exclusive
from appliance.operator import demo
from appliance.operator.demo import DemoOptions, choose_models, claim, prepare_keys, run, write_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o644)
    return folder


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_of_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    """`--state-dir .` or `/tmp` by mistake: neither made private nor cleaned up."""
    (tmp_path / "thesis.txt").write_text("x")
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="new or empty"):
        run(DemoOptions(state_dir=tmp_path), lambda _ready: None)
    assert mode(tmp_path) == 0o755 and sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


def test_new_empty_and_own_directories_are_taken_and_made_private(tmp_path: Path) -> None:
    """Also names with spaces and letters beyond ASCII; the configuration written there can be read."""
    state = tmp_path / "my \u03b1thanor: #1" / "state"
    for _ in range(2):
        claim(state)
        options = DemoOptions(http_port=0, grpc_port=0, admin_port=0)
        config = load_config(write_config(state, options, choose_models(())))
        assert mode(state) == 0o700 and config.policy == state / "policy.yaml"


def test_checkpoints_lie_in_the_state_directory_or_where_it_is_said_or_nowhere(tmp_path: Path) -> None:
    """By default a demo keeps them for itself; several may share a directory; and they can be off."""
    claim(tmp_path)
    ports = {"http_port": 0, "grpc_port": 0, "admin_port": 0}
    asked = [{}, {"checkpoints": tmp_path / "shared"}, {"no_checkpoints": True}]
    written = [write_config(tmp_path, DemoOptions(**ports, **one), choose_models(())).read_bytes() for one in asked]
    found = []
    for data in written:
        (tmp_path / "again.yaml").write_bytes(data)
        found.append(load_config(tmp_path / "again.yaml").sandbox.checkpoints)
    assert found == [tmp_path / "checkpoints", tmp_path / "shared", None]


def test_two_demos_on_one_directory_are_told_apart(tmp_path: Path) -> None:
    """The second one ends with a clear error and has changed nothing."""
    claim(tmp_path)
    with exclusive(tmp_path / demo.LOCK, "it"), pytest.raises(StartError, match="another athanor is using"):
        run(DemoOptions(state_dir=tmp_path), lambda _ready: None)
    assert not (tmp_path / demo.CONFIG).exists()


def test_a_model_is_named_as_its_folder_and_checked_first(model: Path, tmp_path: Path) -> None:
    """A missing file, a name that is taken and one that cannot be: each is said at once, with the option."""
    assert choose_models((model,))["tiny"] == model
    twin = tmp_path / "other" / "tiny"
    twin.parent.mkdir()
    twin.symlink_to(model)
    with pytest.raises(ConfigError, match="named tiny is served already"):
        choose_models((model, twin))
    odd = tmp_path / "my model"
    model.rename(odd)
    with pytest.raises(ConfigError, match="is no name for one"):
        choose_models((odd,))
    fine = odd.rename(tmp_path / "tiny")
    (fine / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        choose_models((fine,))


def test_keys_are_kept_and_damage_is_said(tmp_path: Path) -> None:
    """The same keys at the next start; a damaged file is named with its mend."""
    first = prepare_keys(tmp_path)
    assert prepare_keys(tmp_path) == first
    assert all(mode(tmp_path / name) == 0o600 for name in ("keys.json", "credentials.json", "pepper"))
    for damage in ("{", json.dumps({"alpha": "x"}), "[]"):
        (tmp_path / "keys.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"keys\.json is damaged"):
            prepare_keys(tmp_path)
