"""The model's description: ranges, defaults, stop ids, and refusals that say what is supported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.kv.layout import FULL, Reach
from engine.errors import ModelLoadError
from engine.model.checkpoint.config import MAX_JSON_BYTES, ModelConfig
from engine.model.checkpoint.registry import FAMILIES, load_model_config
from engine.model.layers.rotary import RopeScaling

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def load(folder: Path, generation: object = None, **changes: object) -> ModelConfig:
    """Read a good description with changes; None removes a key."""
    values = {name: value for name, value in {**GOOD, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(str(folder))


def load_of(folder: Path, name: str, **changes: object) -> ModelConfig:
    """The same for an architecture, whose description may lie in a section of the file."""
    if not name.endswith("ForConditionalGeneration"):
        return load(folder, architectures=[name], **changes)
    text = {key: value for key, value in {**GOOD, **changes}.items() if key != "architectures"}
    (folder / "config.json").write_text(json.dumps({"architectures": [name], "text_config": text}))
    return load_model_config(str(folder))


def test_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    """What a config.json may leave out has the value that transformers gives it; null counts as left out."""
    config = load(tmp_path, num_key_value_heads="absent", head_dim=None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (8, 8, 1e-6)
    assert config.rope == RopeScaling()
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


@pytest.mark.parametrize(
    ("own", "generation", "stop_ids"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, {"eos_token_id": [7, 8]}, {2, 7, 8}),
        ("absent", {"eos_token_id": 5}, {5}),
        ("absent", {}, set()),
        (None, {"eos_token_id": None}, set()),
        ([2, 100_000], None, {2}),
    ],
)
def test_stop_ids_come_from_both_files(own: object, generation: object, stop_ids: set[int], tmp_path: Path) -> None:
    """An id or a list of them, in either file; ids outside the vocabulary can never be drawn and are left out."""
    assert load(tmp_path, generation, eos_token_id=own).stop_ids == stop_ids


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -1),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", "absent"),
        ("hidden_size", 1 << 40),
        ("hidden_size", 65),
        ("intermediate_size", 1 << 19),
        ("num_hidden_layers", 513),
        ("num_hidden_layers", []),
        ("num_attention_heads", 1_025),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 7),
        ("head_dim", 2_048),
        ("vocab_size", 1 << 21),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 2),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", 1),
        ("eos_token_id", -1),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", list(range(300))),
        ("rope_theta", 0),
        ("rope_theta", "10000"),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "longrope"}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": -2}),
        ("rope_scaling", {"rope_type": "linear", "factor": True}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_is_out_of_range_is_refused(key: str, value: object, tmp_path: Path) -> None:
    """Every number has a type and a range; the message names config.json and the key's meaning."""
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load(tmp_path, **{key: value})


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", ["LlamaForCausalLM", "X"], [3]])
def test_an_unknown_architecture_is_told_what_is_supported(names: object, tmp_path: Path) -> None:
    """Nothing is guessed: the error lists the architectures of this build."""
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, architectures=names)
    assert all(name in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 100_000, '{"a": ' + "9" * 9_999 + "}", " " * (MAX_JSON_BYTES + 1)]
)
def test_a_malformed_file_is_refused(text: str, tmp_path: Path) -> None:
    """No JSON, no object, too deep, too large: a load error."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A directory without a description is a load error without a path in it."""
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        load_model_config(str(tmp_path))
    assert str(tmp_path) not in str(caught.value)


def test_old_and_new_layouts_of_rotary_parameters_mean_the_same(tmp_path: Path) -> None:
    """``rope_theta`` with ``rope_scaling`` (type or rope_type), and ``rope_parameters``, are read alike."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128}
    old = load(tmp_path, rope_theta=5e5, rope_scaling={"type": "yarn", **yarn})
    new = load(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn})
    assert old.rope == new.rope
    assert (old.rope.kind, old.rope.theta, old.rope.original_positions) == ("yarn", 5e5, 128)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_out_of_range_is_refused_by_every_family(name: str, tmp_path: Path) -> None:
    """Each family checks the common fields; control: the good description is read."""
    assert load_of(tmp_path, name).architecture == name
    for key, value in (
        ("hidden_size", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("hidden_act", "gelu"),
        ("vocab_size", 0),
        ("rms_norm_eps", 2),
        ("rope_theta", 0),
    ):
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            load_of(tmp_path, name, **{key: value})


@pytest.mark.parametrize("key_and_value", [("sliding_window", 0), ("sliding_window", -1), ("sliding_window", 1.5)])
@pytest.mark.parametrize("name", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_has_a_range(name: str, key_and_value: tuple[str, object], tmp_path: Path) -> None:
    """A window is a positive integer where it is used."""
    with pytest.raises(ModelLoadError, match="sliding_window"):
        load(tmp_path, architectures=[name], use_sliding_window=True, **dict([key_and_value]))


def test_windows_are_where_the_description_puts_them(tmp_path: Path) -> None:
    """Mistral: in every layer, 4,096 where the key is absent, none where it is null. Qwen: only when asked for, from a
    layer on or by a list."""
    window = Reach("window", 16)

    def reaches(name: str, **changes: object) -> list[Reach]:
        return [layer.reach for layer in load(tmp_path, architectures=[name], **changes).kv_layers]

    assert reaches("MistralForCausalLM", sliding_window=16) == [window] * 5
    assert reaches("MistralForCausalLM", sliding_window=None) == [FULL] * 5
    assert reaches("MistralForCausalLM") == [Reach("window", 4_096)] * 5
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        used = {"use_sliding_window": True, "sliding_window": 16}
        assert reaches(name, sliding_window=16, max_window_layers=3) == [FULL] * 5
        assert reaches(name, **used, max_window_layers=3) == [FULL] * 3 + [window] * 2
        types = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
        assert reaches(name, **used, layer_types=types) == [window, FULL, window, FULL, FULL]


@pytest.mark.parametrize("types", [["full_attention"] * 4, ["x"] * 5, "full", [3] * 5, ["sliding_attention"] * 5])
def test_layer_types_are_checked(types: object, tmp_path: Path) -> None:
    """One known word a layer, and no window without a length."""
    with pytest.raises(ModelLoadError, match="layer_types"):
        load(tmp_path, architectures=["Qwen2ForCausalLM"], layer_types=types)
