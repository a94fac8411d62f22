"""Entries of models.d: read behind those of athanor.yaml, and each problem at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.common.config_loader import load_config, resolve
from appliance.common.errors import ConfigError
from appliance.common.model_entries import MAX_FILES
from tests.appliance.common.test_config import GOOD, write


def entries(folder: Path, name: str, text: str) -> Path:
    """Write a file of models.d beside the configuration in a folder."""
    path = folder / "models.d" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_entries_follow_those_of_the_file_in_the_order_of_names(tmp_path: Path) -> None:
    """Two files with three entries; a relative path is taken from athanor.yaml's folder, and origins name the files.
    Control: without the folder there is the one model."""
    path = write(tmp_path, GOOD)
    assert [model.name for model in load_config(path, [], {}).models] == ["m"]
    second = entries(tmp_path, "b.yaml", "models:\n  - name: c\n    path: c\n")
    entries(tmp_path, "a.yaml", "models: [{name: a, path: /a}, {name: b, path: b, kv_bytes: 2097152}]\n")
    entries(tmp_path, "b.yaml~", "no entry")
    found = resolve(path, [], {})
    assert [model.name for model in found.config.models] == ["m", "a", "b", "c"]
    assert found.config.models[2].path == tmp_path / "b" and found.config.models[2].kv_bytes == 2 << 20
    assert found.origins["models[3].name"] == f"{second}:2:5"
    assert found.origins["models[3].kv_bytes"] == "default"


def test_a_file_without_models_is_enough_beside_entries(tmp_path: Path) -> None:
    """All models may be in models.d; with none anywhere the problem is that of athanor.yaml."""
    path = write(tmp_path, GOOD.replace("models:\n  - {name: m, path: model, dtype: float32}\n", ""))
    with pytest.raises(ConfigError, match=r"athanor.yaml:1:1: models"):
        load_config(path, [], {})
    entries(tmp_path, "a.yaml", "models: [{name: a, path: a}]\n")
    assert [model.name for model in load_config(path, [], {}).models] == ["a"]


def test_a_list_from_elsewhere_replaces_that_of_the_file_alone(tmp_path: Path) -> None:
    """A variable gives the list of athanor.yaml; entries of models.d come behind it with their own origins."""
    path, mine = write(tmp_path, GOOD), entries(tmp_path, "a.yaml", "models: [{name: a, path: a}]\n")
    found = resolve(path, [], {"ATHANOR_MODELS": "[{name: x, path: x}]"})
    assert [model.name for model in found.config.models] == ["x", "a"]
    assert (found.origins["models[0].name"], found.origins["models[1].name"]) == ("ATHANOR_MODELS", f"{mine}:1:11")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:\n  - name: a\n    pat: a\n", ":3:5: models[0].pat: unknown key; did you mean 'path'?"),
        ("models: [{name: a, path: a, kv_bytes: 1}]\n", ":1:39: models[0].kv_bytes: "),
        ("models:\n  - name: m\n    path: a\n", ":2:11: models[0].name: m is the name of a model at "),
        ("models: [{name: a, path: a}, {name: a, path: b}]\n", ":1:37: models[1].name: a is the name of a model at "),
        ("models: []\n", ":1:9: models: must be a list with one entry or more"),
        ("model: [{name: a}]\n", ":1:1: model: unknown key; a file of models.d has the key `models` alone"),
        ("- name: a\n", ":1:1: must be a mapping"),
        ("models: [{name: a\n", ":2:1: "),
        ("models: [{name: a}]\n", ":1:10: models[0]: a model needs a path, or the digest of a model of the cache"),
    ],
)
def test_a_problem_has_the_place_in_its_file(tmp_path: Path, text: str, said: str) -> None:
    """Each broken file is refused with its path, line and column."""
    path, broken = write(tmp_path, GOOD), entries(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, [], {})
    assert f"{broken}{said}" in str(refused.value)


def test_what_looks_like_an_entry_and_is_none_is_told(tmp_path: Path) -> None:
    """A file with another ending of YAML is refused and not passed over; so are more files than models."""
    path = write(tmp_path, GOOD)
    odd = entries(tmp_path, "a.yml", "models: [{name: a, path: a}]\n")
    with pytest.raises(ConfigError, match=r"a\.yml: files here end in \.yaml"):
        load_config(path, [], {})
    odd.unlink()
    for index in range(MAX_FILES + 1):
        entries(tmp_path, f"{index}.yaml", "models: [{name: a, path: a}]\n")
    with pytest.raises(ConfigError, match=rf"has {MAX_FILES + 1} files"):
        load_config(path, [], {})


def test_entries_lie_beside_the_link_that_was_named(tmp_path: Path) -> None:
    """Where athanor.yaml is a link that is swapped, `models.d` beside it stays. Control: without it the same file has
    its own models alone, whatever lies beside what the link leads to."""
    (tmp_path / "revision").mkdir()
    write(tmp_path / "revision", GOOD)
    entries(tmp_path / "revision", "b.yaml", "models: [{name: b, path: /b}]\n")
    (tmp_path / "athanor.yaml").symlink_to("revision/athanor.yaml")
    assert [model.name for model in load_config(tmp_path / "athanor.yaml", [], {}).models] == ["m"]
    entries(tmp_path, "a.yaml", "models: [{name: a, path: /a}]\n")
    assert [model.name for model in load_config(tmp_path / "athanor.yaml", [], {}).models] == ["m", "a"]
