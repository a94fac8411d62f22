"""Checkpoints read into 8-bit floating point: rounded, taken as they are, or refused; and the engines that are."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.common.loading import Loaded
from engine.backends.cuda.load import build
from engine.backends.cuda.runtime.presence import check_architecture
from engine.config import EngineConfig
from engine.core.offline import generate
from engine.errors import ConfigurationError, ModelLoadError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.staging import RingStaging
from engine.model.checkpoint.weights import unread_model
from engine.model.layers.decoder import Decoder
from engine.model.layers.scaled import E4M3, LARGEST, multiply_few, multiply_rounded, round_rows
from engine.startup.load import assemble, load_engine
from isolation.ipc.sampling import Sampling
from tests.engine.model import test_quantised as formats
from tests.engine.model.families.table import save_reference
from tests.engine.model.test_quantised_loading import CONFIG, METHODS, checkpoint, write
from tests.engine.model.test_quantised_scheme import compressed
from tests.engine.model.test_weights import tensors_for
from tests.engine.support import submit

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LAYER = "model.layers.0."
ROWS = {"q_proj": slice(0, 64), "k_proj": slice(64, 96), "v_proj": slice(96, 128)}
"""Of attention's one matrix, by published map."""


class Passed:
    """A mark that is passed at once."""

    def record(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is waited for."""


def read(folder: Path, *, ring: bool = False, config: ModelConfig = CONFIG) -> tuple[Decoder, int]:
    """The model with its maps in 8 bits, and the bytes that were told before any was taken."""
    told: list[int] = []
    with unread_model(str(folder), config, dtype="bfloat16", device=CPU, scaled=True, room=told.append) as unread:
        if ring:
            with ThreadPoolExecutor(2) as pool:
                staging = RingStaging(pool, torch.empty(4 * 1_024, dtype=torch.uint8), [Passed() for _ in range(4)])
                unread.fill(staging=staging)
                staging.close()
        else:
            unread.fill()
        return unread.model, told[0]


def held(model: Decoder) -> dict[str, tuple[Tensor, Tensor]]:
    """Numbers and scales of the first layer's published maps."""
    attention, mlp = (one.block for one in model.layers[0].sublayers)
    found = {f"{LAYER}self_attn.{name}": (attention.qkv, part) for name, part in ROWS.items()}
    half = len(mlp.gate_up.loaded) // 2
    found |= {
        f"{LAYER}self_attn.o_proj": (attention.out.linear, slice(None)),
        f"{LAYER}mlp.gate_proj": (mlp.gate_up, slice(0, half)),
        f"{LAYER}mlp.up_proj": (mlp.gate_up, slice(half, None)),
        f"{LAYER}mlp.down_proj": (mlp.down.linear, slice(None)),
    }
    return {name: (linear.loaded[part], linear.scale[part]) for name, (linear, part) in found.items()}


@pytest.mark.parametrize("ring", [False, True], ids=["buffer", "ring"])
def test_whole_matrices_are_rounded_row_by_row(ring: bool, tmp_path: Path) -> None:
    """Every map of a layer has the numbers and scales of its rows in bfloat16, however they were read; embedding, head
    and norms stay as they are; and what was told of the memory is what it takes."""
    tensors = tensors_for(CONFIG)
    write(tmp_path, tensors, None)
    (tmp_path / "config.json").unlink()
    model, told = read(tmp_path, ring=ring)
    for name, (numbers, scale) in held(model).items():
        asked, asked_scale = round_rows(tensors[f"{name}.weight"].bfloat16())
        assert torch.equal(numbers.float(), asked.float()), name
        assert torch.equal(scale, asked_scale.squeeze(1)), name
        meant = tensors[f"{name}.weight"]
        # Half of a step: a sixteenth of a number, or of the least one of its row.
        bound = meant.abs() / 14 + meant.abs().amax(1, keepdim=True) / LARGEST / 2**7
        assert ((numbers.float() * scale.unsqueeze(1) - meant).abs() <= bound).all()
    assert model.embedding.weight.dtype == model.head.linear.loaded.dtype == torch.bfloat16
    linears = model._linears
    own = sum(one.loaded.nbytes + (0 if one.scale is None else one.scale.nbytes) for one in linears)
    norms = 2 * (2 * CONFIG.num_layers + 1) * CONFIG.hidden_size
    assert told == own + model.embedding.weight.nbytes + norms


STORED: dict[str, dict[str, Any]] = {
    "one scale": compressed("float-quantized", type="float", strategy="tensor"),
    "a scale an output": compressed("float-quantized", type="float", strategy="channel"),
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
}


@pytest.mark.parametrize("form", STORED)
def test_published_numbers_are_taken_as_they_are(form: str, tmp_path: Path) -> None:
    """Checkpoints of llm-compressor and AutoFP8: bit for bit the stored numbers, one scale of a map for each of its
    outputs where it has one, and fixed scales of activations are not used. Control: the same read into bfloat16 is what
    they mean."""
    stored: dict[str, Tensor] = {}
    asked: dict[str, tuple[Tensor, Tensor]] = {}
    for number, (name, tensor) in enumerate(tensors_for(CONFIG).items()):
        if "proj" not in name:
            stored[name] = tensor
            continue
        outputs, inputs = tensor.shape
        numbers = formats.fp8_bytes((outputs, inputs), "F8_E4M3", number).view(E4M3)
        one = form != "a scale an output"
        scale = torch.tensor(0.5 + number) if one else formats.random(outputs, 1, seed=number).abs()
        stem = name.removesuffix(".weight")
        stored |= {name: numbers, f"{stem}.weight_scale": scale, f"{stem}.input_scale": torch.tensor(0.1)}
        asked[stem] = numbers, scale.reshape(-1).expand(outputs)
    write(tmp_path, stored, STORED[form])
    for name, (numbers, scale) in held(read(tmp_path)[0]).items():
        assert torch.equal(numbers.view(torch.uint8), asked[name][0].view(torch.uint8)), name
        assert torch.equal(scale, asked[name][1]), name


@pytest.mark.parametrize("method", METHODS)
def test_other_packings_are_rounded_anew(method: str, tmp_path: Path) -> None:
    """Blocks of fp8, 4 bits and 8: what they mean, in bfloat16, is rounded as any matrix."""
    _stored, meant = checkpoint(tmp_path, method)
    for name, (numbers, scale) in held(read(tmp_path)[0]).items():
        asked, asked_scale = round_rows(meant[f"{name}.weight"].bfloat16())
        assert torch.equal(numbers.float(), asked.float()), name
        assert torch.equal(scale, asked_scale.squeeze(1)), name


@pytest.mark.parametrize("ring", [False, True], ids=["buffer", "ring"])
def test_what_is_no_number_is_refused_by_name(ring: bool, tmp_path: Path) -> None:
    """A NaN in a map that is rounded, and a scale that is infinite beside numbers that are taken as they are."""
    tensors = tensors_for(CONFIG)
    tensors[f"{LAYER}mlp.up_proj.weight"][7, 3] = math.nan
    write(tmp_path, tensors, None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match="mlp.up_proj.weight holds a number that is not finite"):
        read(tmp_path, ring=ring)
    stem = f"{LAYER}mlp.up_proj"
    tensors[f"{stem}.weight"] = torch.zeros(96, 64).to(E4M3)
    tensors[f"{stem}.weight_scale"] = torch.tensor(math.inf)
    write(tmp_path, tensors, STORED["one scale"])
    with pytest.raises(ModelLoadError, match="up_proj.weight_scale' holds a scale that is not finite"):
        read(tmp_path, ring=ring)
    tensors[f"{stem}.weight_scale"] = torch.tensor(1.0)
    write(tmp_path, tensors, STORED["one scale"])
    read(tmp_path, ring=ring)
    tensors[f"{stem}.weight"][5, 6] = math.nan
    write(tmp_path, tensors, STORED["one scale"])
    with pytest.raises(ModelLoadError, match="mlp.up_proj.weight holds a number that is not finite"):
        read(tmp_path, ring=ring)


def test_both_products_are_those_of_the_stored_numbers() -> None:
    """Against float64: rows as they are, rounded rows, biases; a broken row spoils no other."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 48, generator=generator).bfloat16()
    weight, scale = round_rows(torch.randn(32, 48, generator=generator))
    flat, bias = scale.squeeze(1), torch.randn(32, generator=generator).bfloat16()
    meant = weight.double() * scale.double()
    few = multiply_few(x, weight, flat, bias)
    assert (few.double() - (x.double() @ meant.T + bias.double())).abs().max() < 0.1
    x[4, 4] = math.nan
    numbers, row_scale = round_rows(x)
    many = multiply_rounded(numbers, row_scale, weight, flat, bias, torch.bfloat16)
    asked = (numbers.double() * row_scale.double()) @ meant.T + bias.double()
    assert many[4].isnan().all()
    good = [row for row in range(20) if row != 4]
    assert (many[good].double() - asked[good]).abs().max() < 0.1


def engine_config(folder: Path, **fields: Any) -> EngineConfig:
    """An engine on the device backend with weights in 8 bits."""
    values: dict[str, Any] = {
        "model_dir": str(folder), "model_digest": "00", "dtype": "bfloat16", "block_size": 4, "kv_bytes": 1 << 20,
        "max_num_seqs": 20, "max_num_batched_tokens": 48, "max_context": 96, "backend": "device", "quantization": "fp8",
    }  # fmt: skip
    return EngineConfig(**values | fields)


def test_an_engine_answers_with_weights_in_8_bits(tmp_path: Path) -> None:
    """Steps that were recorded before the weights were there, of few rows and of many: the answers of the same weights
    that were there before. Control: the model in bfloat16 answers otherwise somewhere."""
    save_reference(tmp_path, "llama")
    asked = [submit(n, [3 + n, 5, 7 + n, 11, 2 + n], 12, sampling=Sampling(temperature=0.0)) for n in range(1, 19)]
    answers = generate(load_engine(engine_config(tmp_path), warm=False), asked)
    first = {number: one.token_ids for number, one in answers.items()}
    assert all(one.failure is None for one in answers.values())
    config, about = engine_config(tmp_path), load_model_config(str(tmp_path)).within(96)
    with unread_model(str(tmp_path), about, dtype="bfloat16", device=CPU, scaled=True) as unread:
        unread.fill()
    later = generate(assemble(config, about, Loaded(backend=build(config, unread.model)), None), asked)
    assert {number: one.token_ids for number, one in later.items()} == first
    plain = generate(load_engine(engine_config(tmp_path, quantization="none"), warm=False), asked)
    assert {number: one.token_ids for number, one in plain.items()} != first


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"backend": "plain"}, "weights: fp8 are for engines on a GPU, and backend native computes this one"),
        ({"dtype": "float32"}, "its weights in fp8 go with bfloat16, not float32"),
    ],
)
def test_an_engine_that_cannot_hold_them_says_so(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    """On a processor, and beside another type of activations."""
    save_reference(tmp_path, "llama")
    with pytest.raises(ConfigurationError, match=said):
        load_engine(engine_config(tmp_path, **fields), warm=False)


def test_experts_are_not_held_in_8_bits(tmp_path: Path) -> None:
    """A mixture of experts is refused by name, not served in part."""
    save_reference(tmp_path, "mixtral")
    with pytest.raises(ConfigurationError, match="not of experts"):
        load_engine(engine_config(tmp_path), warm=False)


def test_an_older_card_is_refused() -> None:
    """An A100 has no such products; Ada and Hopper have."""
    with pytest.raises(ConfigurationError, match="sm_89 or later, and this one is sm_80"):
        check_architecture((8, 0))
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_architecture(capability)
