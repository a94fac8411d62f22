"""Sources of the configuration: precedence, origins, and problems that name their source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig
from appliance.common.config_handover import Handover, sealed, unsealed
from appliance.common.config_keys import keys
from appliance.common.config_loader import load_config, resolve
from appliance.common.errors import ConfigError
from tests.appliance.common.test_config import GOOD, write

SPILLING = GOOD + "sandbox: {cores: 1, spill: {memory: 1}}\nkeys: {root_key: r, keyring: k}\n"


def test_every_key_has_a_meaning_and_every_quantity_a_unit() -> None:
    """Each key has a description, and each number says what it counts."""
    assert [key.name for key in keys().values() if len(key.meaning) < 10] == []
    assert [key.name for key in keys().values() if "whole number," in key.type and not key.unit] == []


def test_options_stand_over_variables_over_the_file(tmp_path: Path) -> None:
    """One key in all sources, then without the option, then without the variable, then in none."""
    path = write(tmp_path, GOOD + "sandbox: {cores: 1}\n")
    environment = {"ATHANOR_SANDBOX__CORES": "2", "PATH": "/bin"}
    assert load_config(path, ["sandbox.cores=3"], environment).sandbox.cores == 3
    assert load_config(path, [], environment).sandbox.cores == 2
    assert load_config(path, [], {}).sandbox.cores == 1
    assert load_config(write(tmp_path, GOOD), [], {}).sandbox.cores == 0


def test_sections_are_merged_and_lists_edited(tmp_path: Path) -> None:
    """A variable changes one key of a section or of a list's entry and leaves the others; one past the end adds one."""
    path = write(tmp_path, SPILLING)
    config = load_config(
        path,
        ["models[0].kv_bytes=2097152", "models.1.path=other"],
        {"ATHANOR_SANDBOX": "{own_texts: 7, spill: {disk: 5, directory: d}}", "ATHANOR_MODELS__1__NAME": "second"},
    )
    assert (config.sandbox.cores, config.sandbox.own_texts) == (1, 7)
    assert config.sandbox.spill is not None
    assert (config.sandbox.spill.memory, config.sandbox.spill.disk) == (1, 5)
    assert config.sandbox.spill.directory == tmp_path / "d"
    first, second = config.models
    assert (first.name, first.dtype, first.kv_bytes) == ("m", "float32", 2 << 20)
    assert (second.name, second.path) == ("second", tmp_path / "other")


def test_a_whole_list_is_replaced(tmp_path: Path) -> None:
    """A variable with a list takes the place of the file's list."""
    models = "[{name: a, path: p}, {name: b, path: q, gpu: [0]}]"
    config = load_config(write(tmp_path, GOOD), [], {"ATHANOR_MODELS": models})
    assert [model.name for model in config.models] == ["a", "b"]
    assert config.models[1].gpu == (0,)


@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("models[0].name=7", "7"),
        ("models[0].name=a-b", "a-b"),
        ("models[0].gpu=off", "off"),
        ("models[0].gpu=[1, 2]", (1, 2)),
        ("models[0].truncates=false", False),
    ],
)
def test_text_stands_as_it_is_and_the_rest_is_yaml(tmp_path: Path, option: str, found: object) -> None:
    """A name that looks like a number is a name; numbers, lists and truth are read as in the file."""
    model = load_config(write(tmp_path, GOOD), [option], {}).models[0]
    assert getattr(model, option.partition("=")[0].rpartition(".")[2]) == found


def test_an_empty_value_takes_an_optional_key_away(tmp_path: Path) -> None:
    """The section of the file is gone; text becomes empty."""
    path = write(tmp_path, SPILLING + "audit: {directory: log}\n")
    config = load_config(path, ["audit="], {"ATHANOR_SANDBOX__SPILL": "", "ATHANOR_SANDBOX__RUNSC": ""})
    assert (config.audit, config.sandbox.spill, config.sandbox.runsc) == (None, None, "")


def test_relative_paths_of_every_source_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    """The same rule for all three sources, and for runsc, which is text."""
    path = write(tmp_path, GOOD + "sandbox: {runsc: bin/runsc}\n")
    assert load_config(path, [], {}).sandbox.runsc == str(tmp_path / "bin/runsc")
    assert load_config(path, ["sandbox.runsc=/usr/bin/runsc"], {}).sandbox.runsc == "/usr/bin/runsc"
    config = load_config(path, ["listen.admin=unix:a.sock"], {"ATHANOR_POLICY": "p.yaml"})
    assert (config.listen.admin, config.policy) == (f"unix:{tmp_path}/a.sock", tmp_path / "p.yaml")
    assert load_config(write(tmp_path, GOOD), [], {}).sandbox.runsc == ""


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (
            [],
            {"ATHANOR_SANDBOX__CORE": "2"},
            "ATHANOR_SANDBOX__CORE: unknown variable; did you mean ATHANOR_SANDBOX__CORES",
        ),
        (
            [],
            {"ATHANOR_MODELS__3__NAM": "x"},
            "ATHANOR_MODELS__3__NAM: unknown variable; did you mean ATHANOR_MODELS__0__NAME",
        ),
        (
            [],
            {"ATHANOR_sandbox__cores": "2"},
            "ATHANOR_sandbox__cores: unknown variable; did you mean ATHANOR_SANDBOX__CORES",
        ),
        ([], {"ATHANOR_": "2"}, "ATHANOR_: unknown variable"),
        ([], {"ATHANOR_SANDBOX__CORES": "many"}, "ATHANOR_SANDBOX__CORES: sandbox.cores: "),
        ([], {"ATHANOR_SANDBOX__CORES": "[1"}, "ATHANOR_SANDBOX__CORES: '[1' is not YAML"),
        ([], {"ATHANOR_SANDBOX": "{coers: 2}"}, "ATHANOR_SANDBOX: sandbox.coers: unknown key; did you mean 'cores'"),
        ([], {"ATHANOR_MODELS__5__NAME": "x"}, "ATHANOR_MODELS__5__NAME: there is no entry 5"),
        ([], {"ATHANOR_MODELS__1__NAME": "x"}, "ATHANOR_MODELS__1__NAME: models[1]: a model needs a path"),
        ([], {"ATHANOR_AUDIT__KEY": "x"}, "ATHANOR_AUDIT__KEY: audit.directory: this key is required"),
        ([], {"ATHANOR_LISTEN__HTTP": "x"}, "ATHANOR_LISTEN__HTTP: listen.http: 'x' is not HOST:PORT"),
        ([], {"ATHANOR_SANDBOX__IMAGE": "x"}, "ATHANOR_SANDBOX__IMAGE: sandbox: image and image_digest go together"),
        ([], {"ATHANOR_SANDBOX__SPILL__MEMORY": "1"}, "athanor.yaml:1:1: : sandbox.spill needs keys"),
        (["models[0]={}"], {}, "--set models[0]: models[0].name: this key is required"),
        (["models=3"], {}, "--set models: models: must be a list, found 3"),
        (["sandbox.cores=many"], {}, "--set sandbox.cores: sandbox.cores: must be a number, found 'many'"),
        (["sandbox.coers=2"], {}, "--set sandbox.coers: unknown key; did you mean sandbox.cores"),
        (["sandbox.cores"], {}, "--set sandbox.cores: must be KEY=VALUE"),
        (["sandbox.cores=x"], {"ATHANOR_SANDBOX__CORES": "y"}, "--set sandbox.cores: sandbox.cores: "),
        (["models[0].kv_bytes=-1"], {}, "--set models[0].kv_bytes: models[0].kv_bytes: must be at least"),
        (["sandbox.cores=2"], {"ATHANOR_MODELS__0__DTYPE": "x"}, "ATHANOR_MODELS__0__DTYPE: models[0].dtype: "),
    ],
)
def test_problems_name_their_source(tmp_path: Path, options: list[str], environment: dict[str, str], said: str) -> None:
    """A variable by its name, an option as it was written; what concerns the whole keeps the file's place."""
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, GOOD), options, environment)
    assert said in raised.value.message
    assert ":3:" not in raised.value.message


def test_a_problem_of_the_whole_names_what_stands_over_the_file(tmp_path: Path) -> None:
    """The file alone is right; the message says which variable made it wrong."""
    with pytest.raises(ConfigError, match=r"needs keys.*\(with ATHANOR_SANDBOX__SPILL__MEMORY over the file\)"):
        load_config(write(tmp_path, GOOD), [], {"ATHANOR_SANDBOX__SPILL__MEMORY": "1"})


def test_the_files_own_problems_keep_their_place(tmp_path: Path) -> None:
    """An override elsewhere does not take the blame for the file; an override of the wrong key mends it."""
    path = write(tmp_path, GOOD.replace("float32", "int3"))
    with pytest.raises(ConfigError, match=r"athanor\.yaml:3:\d+: models\[0\]\.dtype"):
        load_config(path, ["sandbox.cores=2"], {})
    assert load_config(path, ["models[0].dtype=auto"], {}).models[0].dtype == "auto"


def test_origins_are_told(tmp_path: Path) -> None:
    """Place in the file, variable, option and default, one of each."""
    path = write(tmp_path, GOOD)
    found = resolve(path, ["sandbox.cores=3"], {"ATHANOR_MODELS__0__DTYPE": "auto"}).origins
    assert found["models[0].name"] == f"{path}:3:6"
    assert found["models[0].dtype"] == "ATHANOR_MODELS__0__DTYPE"
    assert found["sandbox.cores"] == "--set sandbox.cores"
    assert found["sandbox.memory_bytes"] == "default"
    assert found["policy"] == f"{path}:4:1"


def test_children_get_what_was_resolved(tmp_path: Path) -> None:
    """The configuration is equal on the other side, for each reader, and the file cannot be changed."""
    path = write(tmp_path, SPILLING.replace("dtype: float32", "gpu: [0, 2]") + "audit: {directory: log}\n")
    config = load_config(path, ["wipe_memory=false"], {})
    given = Handover(config=config, options=("wipe_memory=false",), environment={"ATHANOR_SANDBOX__CORES": "2"})
    with sealed(given) as fd:
        for _ in range(2):
            assert unsealed(os.dup(fd)) == given
        with pytest.raises(OSError):
            os.write(fd, b"x")
    assert type(config) is ApplianceConfig


def test_what_is_no_configuration_is_not_taken(tmp_path: Path) -> None:
    """A child given anything else says so."""
    (tmp_path / "odd").write_text("{}")
    with pytest.raises(ConfigError, match="not understood"):
        unsealed(os.open(tmp_path / "odd", os.O_RDONLY))
