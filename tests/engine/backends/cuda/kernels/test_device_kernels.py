"""The device backend on the kernels themselves, under the interpreter: whole engines, and a step by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels import palette_choice
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.load import make_device_runner
from engine.backends.cuda.runtime.mixing import ALWAYS, NEVER, Mixing
from engine.backends.cuda.runtime.model import ChunkTokens, DeviceModel
from engine.backends.cuda.runtime.operations import Beside, Chunks, Operations
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import Tables
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.offline import generate
from engine.core.scheduler.scheduler import Scheduler
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import load_model
from engine.model.layers.decoder import Decoder
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.kernels.support import PLACE
from tests.engine.model.families.table import FAMILIES, save_reference
from tests.engine.support import model_config, random_model, submit


def placed(numbers: list[int] | list[list[int]]) -> torch.Tensor:
    """Numbers where kernels compute."""
    return torch.tensor(numbers, device=PLACE)


def kernel_engine(model: Decoder, *, interpreted: bool, mixing: Mixing = NEVER) -> Engine:
    """The real scheduler around the device backend: kernels under the interpreter, or plain operations."""
    config = EngineConfig(
        model_dir="",
        model_digest="00",
        block_size=16,
        kv_bytes=1 << 20,
        max_num_seqs=2,
        max_num_batched_tokens=24,
        max_context=64,
    )
    layout = layout_for(config, model.config, "float32")
    limits = limits_for(config, model.config, layout)
    shape = model.config
    operations = PlainOperations()
    if interpreted:
        operations = kernel_operations((shape.num_heads, shape.num_kv_heads), shape.head_dim, shape.vocab_size, PLACE)
    runner = make_device_runner(config, model, layout, limits, operations, eager=True, most_ahead=1, mixing=mixing)
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=layout.block_size, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", [pytest.param("LlamaForCausalLM", marks=pytest.mark.full), "Qwen3ForCausalLM"])
def test_an_engine_on_kernels_gives_the_tokens_of_plain_operations(architecture: str) -> None:
    """Prompts in chunks, decoding past the end of a block, a draw and a maximum, on every kernel of a step, with
    prompts and rows in one pass and in two. Qwen3 has all that Llama has, and norms of heads."""
    asked = [
        submit(2, [3, 1, 4], 3, sampling=Sampling(temperature=0.9, top_k=7, top_p=0.9, seed=11)),
        submit(1, range(5, 52), 3),
    ]
    answers = []
    for interpreted, mixing in ((False, NEVER), (True, NEVER), (True, ALWAYS)):
        model = random_model(model_config(architecture=architecture, num_layers=1), packed=False, device=PLACE)
        engine = kernel_engine(model, interpreted=interpreted, mixing=mixing)
        found = generate(engine, asked)
        assert isinstance(engine.runner, DeviceRunner)
        assert (engine.runner.num_mixed > 0) == mixing.ever
        answers.append({number: (one.token_ids, one.finish, one.failure) for number, one in found.items()})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoding_step_on_kernels(dtype: torch.dtype) -> None:
    """Logits of a step of three lanes, one of them without a row, are those of plain operations on the same memory; in
    bfloat16 within some roundings of a stream of two layers."""
    logits = []
    for interpreted in (False, True):
        model = random_model(model_config(), dtype=dtype, packed=False, device=PLACE)
        config = EngineConfig(model_dir="", model_digest="00", block_size=4, kv_bytes=1 << 20, max_context=64)
        layout = layout_for(config, model.config, str(dtype).removeprefix("torch."))
        run = kernel_operations((4, 2), 8, 97, PLACE) if interpreted else PlainOperations()
        storage = DeviceStorage(layout, 3, run, dtype, PLACE)
        generator = torch.Generator().manual_seed(3)
        for memory in storage.memory:
            memory.copy_(torch.randn(memory.shape, generator=generator))
        device = DeviceModel(model, storage, run)
        tables = placed([[3, 9, 4, 0], [0, 0, 0, 0], [7, 2, 0, 0]])
        positions, lengths = placed([9, 0, 6]), placed([10, 0, 7])
        slots = placed([4 * storage.stride + 1, -1, 2 * storage.stride + 2])
        logits.append(device.decode(placed([5, 0, 50]), positions, (slots,), (tables,), lengths).double())
    error = (logits[0] - logits[1])[[0, 2]].abs().max() / logits[0].abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2**-5)


FAMILY_STEPS = {
    "gemma2": "window 8",
    "gpt_oss": "odd experts, tight clamps",
    "deepseek": "odd widths, two shared",
    "llama4": "chunks of 7, every second layer without positions",
    "gemma3": "five to one",
    "granite": "all",
    "olmo2": "gqa 2",
    "phi3": "long lists, partial, mqa",
    "qwen2_moe": "odd experts, a dense layer",
    "mixtral": "window 9, wide heads",
}
"""Between them all that a family may have beyond Llama's form."""

SHORT = ("gpt_oss", "deepseek")
"""Several tables, windows, sinks and experts, and latent attention; under the interpreter each takes seconds."""


def operations_for(model: Decoder, *, interpreted: bool) -> Operations:
    """Kernels for a model's heads, or plain operations."""
    layer = model.config.kv_layers[0]
    heads = model.config.num_heads, layer.heads
    return kernel_operations(heads, layer.key_dim, model.config.vocab_size, PLACE) if interpreted else PlainOperations()


def all_steps(folder: Path, *, interpreted: bool = False, fused: bool = False) -> tuple[torch.Tensor, ...]:
    """Logits of two prompt chunks, of which the second continues a row, then of three lanes, one of them without a row,
    over memory and tables drawn at random; then of two lanes and of a chunk in one pass, and of the same in two."""
    model = load_model(
        str(folder), load_model_config(str(folder)), dtype="float32", device=PLACE, packed=False, headless=False
    )
    config = EngineConfig(model_dir="", model_digest="00", block_size=4, kv_bytes=1 << 20, max_context=64)
    layout = layout_for(config, model.config, "float32")
    run = PlainOperations(fused=True) if fused else operations_for(model, interpreted=interpreted)
    storage = DeviceStorage(layout, 3, run, torch.float32, PLACE)
    generator = torch.Generator().manual_seed(3)
    for memory in storage.memory:
        memory.copy_(torch.randn(memory.shape, generator=generator))
    device = DeviceModel(model, storage, run)
    tables = Tables.of(layout, 64)
    entries = torch.randperm(layout.num_blocks, generator=generator)[: 3 * tables.width].view(3, -1).to(PLACE) + 1
    numbers = placed([0] * 5 + [1] * 9)
    starts, lengths = placed([0, 21]), placed([5, 9])
    positions = placed([*range(5), *range(21, 30)])
    ids = torch.randint(0, model.config.vocab_size, (14,), generator=generator).to(PLACE)
    slots = tables.slots(entries[:2], numbers, positions, numbers < 0)
    chunks = Chunks(placed([0, 5]), lengths, starts, tables.split(entries[:2]), ((0, 5), (5, 9)))
    prompts = device.prefill(ChunkTokens(ids, positions, slots), chunks, placed([4, 13]))
    at, seen = placed([5, 30, 0]), placed([6, 31, 0])
    slots = tables.slots(entries, placed([0, 1, 2]), at, seen == 0)
    rows = device.decode(ids[:3], at, slots, tables.split(entries), seen)[:2]
    # The first row, none, and six more tokens of the second.
    lanes = placed([0, 2])
    at, seen, numbers, more = placed([6, 0]), placed([7, 0]), placed([0] * 6), placed([*range(31, 37)])
    own = tables.slots(entries, lanes, at, seen == 0), tables.slots(entries[1:2], numbers, more, numbers < 0)
    given = ChunkTokens(ids[3:9], more, own[1])
    beside = Beside(seen, tables.split(entries[lanes]))

    def chunk(begin: int) -> Chunks:
        return Chunks(placed([begin]), placed([6]), placed([31]), tables.split(entries[1:2]), ((begin, 6),))

    both = ChunkTokens(ids[1:9], torch.cat((at, more)), tuple(torch.cat(pair) for pair in zip(*own, strict=True)))
    mixed = device.prefill(both, chunk(2), placed([0, 4, 7]), beside)
    apart = (
        device.decode(ids[1:3], at, own[0], beside.tables, seen)[:1],
        device.prefill(given, chunk(0), placed([2, 5])),
    )
    return prompts, rows, mixed, torch.cat(apart)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in SHORT else pytest.mark.full) for one in FAMILY_STEPS]
)
def test_the_steps_of_a_family_on_kernels(family: str, tmp_path: Path) -> None:
    """Windows, chunks, several tables a row, caps, sinks, norms of every kind, partial rotation, experts and latent
    attention: logits of prompts, of a decoding step and of both in one pass are those of plain operations on the same
    memory, and one pass gives those of two."""
    save_reference(tmp_path, family, **FAMILIES[family].cases[FAMILY_STEPS[family]])
    steps = [all_steps(tmp_path, interpreted=one) for one in (False, True)]
    for wanted, found in (*zip(*steps, strict=True), *(one[2:] for one in steps)):
        assert found.isfinite().all()
        assert (wanted - found).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", list(FAMILY_STEPS))
def test_products_with_what_stands_around_them_give_the_same_step(family: str, tmp_path: Path) -> None:
    """Where products are asked for together with norms, gates and sums, a family's logits are those of asking for each
    by itself, whichever of its blocks can do so."""
    save_reference(tmp_path, family, **FAMILIES[family].cases[FAMILY_STEPS[family]])
    for wanted, found in zip(*(all_steps(tmp_path, fused=one) for one in (False, True)), strict=True):
        assert found.isfinite().all()
        assert (wanted - found).abs().max() < 1e-5 * wanted.abs().max()


class _Preferred:
    """Times by which every way is faster than the one before it."""

    def __init__(self) -> None:
        self._seconds = 1.0

    def __call__(self, _run: Callable[[], None]) -> float:
        self._seconds /= 2
        return self._seconds


@pytest.mark.full
def test_an_engine_takes_products_from_palettes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a step of one lane and of three are those of the plain matrices in bfloat16, with palettes taken for
    both of the MLP's products; memory is three quarters of theirs. With times by which no way is faster none is taken,
    and palettes are given back."""
    monkeypatch.setattr(palette_choice, "COUNTS", (1, 16))
    logits = []
    for measure in (None, _Preferred(), lambda _run: 1.0):
        shape = model_config(num_layers=1, hidden_size=128, intermediate_size=128)
        model = random_model(shape, dtype=torch.bfloat16, packed=False, device=PLACE)
        run = kernel_operations((shape.num_heads, shape.num_kv_heads), shape.head_dim, shape.vocab_size, PLACE)
        if measure is not None:
            said = run.take_palettes(model, measure)
            taken = isinstance(measure, _Preferred)
            assert ("bf16" not in said) == taken
            assert (run._palettes is not None) == taken
            if not taken:
                continue
        config = EngineConfig(model_dir="", model_digest="00", block_size=4, kv_bytes=1 << 20, max_context=64)
        storage = DeviceStorage(layout_for(config, model.config, "bfloat16"), 3, run, torch.bfloat16, PLACE)
        for memory in storage.memory:
            memory.zero_()
        device = DeviceModel(model, storage, run)
        for lanes in (1, 3):
            given = placed([5, 7, 50][:lanes]), placed([0, 0, 0][:lanes])
            slots = placed([storage.stride * (1 + lane) for lane in range(lanes)])
            tables, lengths = placed([[1, 0], [2, 0], [3, 0]][:lanes]), placed([1] * lanes)
            logits.append(device.decode(*given, (slots,), (tables,), lengths).double())
    for plain, palettes in zip(logits[:2], logits[2:], strict=True):
        assert (plain - palettes).abs().max() / plain.abs().max() < 2**-5
