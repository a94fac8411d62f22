"""GGUF files to folders: the same model, the same tokenizer, the same ids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file, save_file

from appliance.common.catalog import embedded_model
from engine.config import EngineConfig
from engine.convert.__main__ import FILES, convert
from engine.convert.rope import llama3_divisors
from engine.core.offline import generate
from engine.errors import ModelLoadError
from engine.startup.load import load_engine
from tests.engine.convert.write_gguf import Kind, write_embedded, write_gguf
from tests.engine.support import submit
from tests.engine.text.test_tokenizer import vectors


def converted(source: Path, folder: Path, dtype: str = "auto") -> dict[str, Any]:
    """Convert a file in this process."""
    folder.mkdir()
    fd = os.open(source, os.O_RDONLY)
    outputs = {name: os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644) for name in FILES}
    try:
        return convert(fd, source.name, outputs, dtype)
    finally:
        for one in (fd, *outputs.values()):
            os.close(one)


def greedy(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Ids that the engine gives."""
    values = {"model_dir": str(folder), "model_digest": "00", "kv_bytes": 16 << 20}
    engine = load_engine(EngineConfig(**values), warm=False)
    return [generate(engine, [submit(1, prompt, count)])[1].token_ids for prompt in prompts]


def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """A folder's tokenizer."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def texts(count: int, seed: int = 0) -> list[str]:
    """Lines with everything that tokenizers stumble over."""
    rng = np.random.default_rng(seed)
    parts = [
        "the",
        "Once upon a time",
        " ",
        "  ",
        "\n",
        "\n\n ",
        "\t",
        "don't",
        "I'LL",
        "12345",
        "3.14",
        "\u00e9t\u00e9",
        "e\u0301",
        "\u4f60\u597d",
        "\U0001f600",
        "<s>",
        "<0x41>",
        "\u2581",
        "...",
        "a_b",
        "\x00",
        "\u0130",
        "_",
        "x" * 40,
    ]
    return ["".join(rng.choice(parts, rng.integers(0, 12))) for _ in range(count)]


def test_a_trained_model_comes_back_with_the_ids_of_the_reference(shared_data: Path, tmp_path: Path) -> None:
    """stories260K through a GGUF file of float32: tensors bit by bit, tokenizer, and the reference's greedy ids."""
    origin = shared_data / "models" / "stories260K-hf"
    write_gguf(tmp_path / "a.gguf", origin)
    done = converted(tmp_path / "a.gguf", tmp_path / "made")
    assert done["dtype"] == "float32"
    before, after = load_file(origin / "model.safetensors"), load_file(tmp_path / "made" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    old, new = tokenizer(origin), tokenizer(tmp_path / "made")
    assert json.loads(old.to_str())["model"] == json.loads(new.to_str())["model"]
    for text in texts(500):
        assert old.encode(text).ids == new.encode(text).ids, text
        assert old.decode(old.encode(text).ids) == new.decode(new.encode(text).ids)
    lines = json.loads((shared_data / "expected" / "greedy_fp32.json").read_text())["stories260K"]
    found = greedy(tmp_path / "made", [line["prompt_ids"] for line in lines], 64)
    # The folder's own stop id ends an output that the original goes on with; up to there ids are the same.
    for line, ids in zip(lines, found, strict=True):
        assert ids == line["greedy_ids"][: len(ids)]
        assert len(ids) == 64 or ids[-1] in json.loads((tmp_path / "made" / "config.json").read_text())["eos_token_id"]


def test_the_embedded_model_comes_back_as_it_was(tmp_path: Path) -> None:
    """athanor-mini through bfloat16: tensors bit by bit, description, template, tokenizer and greedy ids."""
    origin, made = embedded_model(), tmp_path / "made"
    write_embedded(tmp_path / "f32", tmp_path / "a.gguf", Kind.BF16)
    assert converted(tmp_path / "a.gguf", made)["dtype"] == "bfloat16"
    before, after = load_torch(origin / "model.safetensors"), load_torch(made / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((one / "config.json").read_text()) for one in (origin, made))
    for key in set(old) & set(new) - {"eos_token_id"}:
        assert old[key] == new[key], key
    assert set(new["eos_token_id"]) == set(json.loads((origin / "generation_config.json").read_text())["eos_token_id"])
    template = json.loads((origin / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((made / "tokenizer_config.json").read_text())["chat_template"] == template
    assert tokenizer(origin).to_str() == tokenizer(made).to_str()
    prompts = [tokenizer(origin).encode(text).ids for text in ("<|im_start|>user\nhello<|im_end|>\n", "what is")]
    assert greedy(made, prompts, 24) == greedy(origin, prompts, 24)


def load_torch(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of any dtype."""
    from safetensors.torch import load_file as load

    return load(path)


PACKED = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4]


@pytest.mark.parametrize("kind", PACKED, ids=lambda one: one.name)
def test_packed_weights_are_what_the_library_unpacks(kind: Kind, shared_data: Path, tmp_path: Path) -> None:
    """Every tensor of a packed file is the reference's float32 exactly, rows in the published order; the embedding
    among them. In bfloat16 it is that rounded to nearest even."""
    origin = shared_data / "models" / "stories260K-hf"
    meant = write_gguf(tmp_path / "a.gguf", origin, kind=kind)
    converted(tmp_path / "a.gguf", tmp_path / "wide", "float32")
    converted(tmp_path / "a.gguf", tmp_path / "made", "bfloat16")
    wide, made = (
        load_torch(tmp_path / "wide" / "model.safetensors"),
        load_torch(tmp_path / "made" / "model.safetensors"),
    )
    assert wide.keys() == meant.keys()
    for name, one in meant.items():
        assert torch.equal(wide[name], torch.from_numpy(one)), name
        assert torch.equal(made[name], torch.from_numpy(one).bfloat16()), name


def tiny(folder: Path, family: str, **changes: object) -> transformers.PreTrainedModel:
    """A random model of a family on disk, in float32, with the embedded model's tokenizer."""
    torch.manual_seed(0)
    classes = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    values = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4_096,
        "max_position_embeddings": 256,
        "head_dim": 16,
        "tie_word_embeddings": False,
        **changes,
    }
    config = getattr(transformers, f"{classes[family]}Config")(**values)
    model = getattr(transformers, f"{classes[family]}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded_model() / name).read_bytes())
    return model


def with_old_rope(folder: Path, **changes: object) -> None:
    """Put the base of the rotary frequencies where the writer looks for it."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_every_architecture_has_the_logits_of_its_origin(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Random models of each family, biases, ties and head norms among them: transformers computes the same logits
    from the converted folder, bit by bit."""
    origin, made = tmp_path / "origin", tmp_path / "made"
    model = tiny(origin, family, **changes)
    with_old_rope(origin)
    write_gguf(tmp_path / "a.gguf", origin)
    converted(tmp_path / "a.gguf", made)
    again = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    assert type(again) is type(model)
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_scaling_of_llama_3_is_found_again(factor: float, tmp_path: Path) -> None:
    """Files hold only what follows from it; divisors that nothing published gives are refused, ones mean none."""
    origin = tmp_path / "origin"
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8_192,
    }
    model = tiny(origin, "llama", rope_parameters=scaling, head_dim=64)
    with_old_rope(origin)
    # Divisors of the reference itself: frequencies without scaling through those with it.
    frequencies = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
    divisors = (frequencies / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert np.allclose(divisors, llama3_divisors(500_000.0, 64, factor), rtol=1e-5)
    assert len(set(divisors.tolist())) > 2

    def file(name: str, values: np.ndarray) -> Path:
        write_gguf(tmp_path / name, origin, change=lambda one: one.add_tensor("rope_freqs.weight", values))
        return tmp_path / name

    converted(file("a.gguf", divisors), tmp_path / "made")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    with pytest.raises(ModelLoadError, match="no published model"):
        converted(file("b.gguf", divisors * np.float32(1.01)), tmp_path / "odd")
    converted(file("c.gguf", np.ones(32, np.float32)), tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["rope_scaling"] is None


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    """The kinds that files name become those of config.json, and transformers computes the same with them."""
    for kind, extra in (("linear", {}), ("yarn", {"original_max_position_embeddings": 64})):
        origin = tmp_path / kind
        scaling = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **extra}
        model = tiny(origin, "llama", rope_parameters=scaling)
        with_old_rope(origin)

        def scale(writer: gguf.GGUFWriter, kind: str = kind) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(4.0)
            if kind == "yarn":
                writer.add_rope_scaling_orig_ctx_len(64)

        write_gguf(tmp_path / f"{kind}.gguf", origin, change=scale)
        converted(tmp_path / f"{kind}.gguf", tmp_path / f"{kind}-made")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-made", dtype=torch.float32).eval()
        ids = torch.arange(3, 40).unsqueeze(0)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.full
def test_a_large_byte_level_vocabulary_gives_the_published_ids(shared_data: Path, tmp_path: Path) -> None:
    """Qwen2's 151,936 tokens through a file: its 46 published vectors, and our own lines, give the same ids."""
    origin = tmp_path / "origin"
    sizes = {"hidden_size": 8, "head_dim": 2, "num_hidden_layers": 1, "tie_word_embeddings": True}
    tiny(origin, "qwen2", vocab_size=151_936, **sizes)
    with_old_rope(origin)
    published = json.loads((shared_data / "tokenizers" / "qwen2.tokenizer.json").read_text())
    published["model"]["vocab"] |= {one["content"]: one["id"] for one in published["added_tokens"]}
    published["normalizer"] = {"type": "NFC"}  # as Qwen publishes it; the shared file is without
    old = tokenizers.Tokenizer.from_str(json.dumps(published))
    published["model"]["merges"] = [
        one.split(" ") if isinstance(one, str) else one for one in published["model"]["merges"]
    ]
    (origin / "tokenizer.json").write_text(json.dumps(published))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    (origin / "tokenizer_config.json").write_text(json.dumps(settings))
    write_gguf(tmp_path / "a.gguf", origin, pre="qwen2")
    converted(tmp_path / "a.gguf", tmp_path / "made")
    new = tokenizer(tmp_path / "made")
    pairs = vectors(shared_data / "tokenizers")
    assert len(pairs) == 46
    for text, ids in pairs:
        assert new.encode(text).ids == ids
    for text in texts(300):
        assert new.encode(text).ids == old.encode(text).ids


Change = Callable[[gguf.GGUFWriter], None]


def said(key: str, value: object) -> Change:
    """Set a value of the header, in place of what is there."""

    def change(writer: gguf.GGUFWriter) -> None:
        kind = (
            gguf.GGUFValueType.BOOL
            if isinstance(value, bool)
            else gguf.GGUFValueType.UINT32
            if isinstance(value, int)
            else gguf.GGUFValueType.FLOAT32
            if isinstance(value, float)
            else gguf.GGUFValueType.ARRAY
            if isinstance(value, list)
            else gguf.GGUFValueType.STRING
        )
        writer.kv_data[0][key] = gguf.GGUFValue(value, kind)

    return change


def without(key: str) -> Change:
    """Leave a value out."""
    return lambda writer: writer.kv_data[0].pop(key)  # type: ignore[return-value]


REFUSED: dict[str, tuple[Change, str]] = {
    "architecture": (said("general.architecture", "mamba"), "supported are: llama, qwen2, qwen3"),
    "split": (said("split.count", 3), "one part of several"),
    "experts": (said("llama.expert_count", 8), "mixtures"),
    "no width": (without("llama.embedding_length"), "llama.embedding_length"),
    "width of text": (said("llama.embedding_length", "64"), "llama.embedding_length"),
    "false width": (said("llama.embedding_length", 128), r"tensor token_embd\.weight has shape"),
    "false heads": (said("llama.attention.head_count", 3), "has shape"),
    "no heads": (said("llama.attention.head_count", 0), "head_count"),
    "false layers": (said("llama.block_count", 6), r"lacks tensor blk\.5"),
    "fewer layers": (said("llama.block_count", 4), r"'blk\.4\..* more, which"),
    "endless layers": (said("llama.block_count", 1 << 31), "block_count"),
    "odd rotation": (said("llama.rope.dimension_count", 4), "dimension_count"),
    "rotary kind": (said("llama.rope.scaling.type", "longrope"), "none, linear or yarn"),
    "yarn with more": (said("llama.rope.scaling.type", "yarn"), "factor"),
    "tokenizer kind": (said("tokenizer.ggml.model", "t5"), "supported are: gpt2, llama"),
    "no tokens": (without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
    "too few tokens": (said("tokenizer.ggml.tokens", ["a", "b"]), "token_type"),
    "too many tokens": (said("tokenizer.ggml.tokens", [str(one) for one in range(513)]), "513 tokens"),
    "a token twice": (said("tokenizer.ggml.tokens", ["a"] * 512), "twice"),
    "a long token": (said("tokenizer.ggml.tokens", ["x" * 600, *map(str, range(511))]), "over 512"),
    "unknown types": (said("tokenizer.ggml.token_type", [9] * 512), "unknown type"),
    "equal scores": (said("tokenizer.ggml.scores", [0.0] * 512), "exactly"),
    "scores of text": (said("tokenizer.ggml.scores", "high"), "array of 512 numbers"),
    "end beyond": (said("tokenizer.ggml.eos_token_id", 512), "eos_token_id"),
    "alignment": (said("general.alignment", 24), "power of two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_told(name: str, shared_data: Path, tmp_path: Path) -> None:
    """A file of another kind, or one whose header contradicts itself, is refused with what is wrong."""
    change, message = REFUSED[name]
    write_gguf(tmp_path / "a.gguf", shared_data / "models" / "stories260K-hf", change=change)
    with pytest.raises(ModelLoadError, match=message):
        converted(tmp_path / "a.gguf", tmp_path / "made")


def test_a_merge_of_no_token_and_an_unknown_cut_are_refused(tmp_path: Path) -> None:
    """Byte-level vocabularies: merges must be of tokens, and how text is cut must be known."""
    origin = tmp_path / "origin"
    tiny(origin, "llama")
    with_old_rope(origin)
    for name, change, message in (
        ("a", said("tokenizer.ggml.merges", ["a b", "zzz q"]), "no token"),
        ("b", said("tokenizer.ggml.merges", ["nospace"]), "no token"),
        ("c", said("tokenizer.ggml.pre", "something-new"), "supported are: "),
        ("d", without("tokenizer.ggml.pre"), "supported are: "),
    ):
        write_gguf(tmp_path / f"{name}.gguf", origin, change=change)
        with pytest.raises(ModelLoadError, match=message):
            converted(tmp_path / f"{name}.gguf", tmp_path / name)


def test_numbers_that_are_not_finite_or_too_large_are_refused_by_name(tmp_path: Path) -> None:
    """A NaN in the file, and a number that half precision cannot hold: the message names the tensor."""
    origin = tmp_path / "origin"
    tiny(origin, "llama")
    with_old_rope(origin)
    tensors = load_file(origin / "model.safetensors")
    for value, dtype in ((np.nan, "float32"), (np.inf, "float32"), (1e5, "float16"), (3.4e38, "bfloat16")):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = value
        save_file(tensors, origin / "model.safetensors")
        write_gguf(tmp_path / "a.gguf", origin)
        with pytest.raises(ModelLoadError, match=r"blk\.1\.ffn_up\.weight"):
            converted(tmp_path / "a.gguf", tmp_path / f"made-{value}", dtype)
