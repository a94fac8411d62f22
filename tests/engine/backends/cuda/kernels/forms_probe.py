"""Forms in which kernels are launched, told apart as Triton does and without compiling any: ``python -m
tests.engine.backends.cuda.kernels.forms_probe FOLDER FAMILY/CASE[;...] COUNTS DTYPE``.

A child of test_forms, since there the kernels belong to the interpreter. FOLDER has a folder with the description of
each model, ``0`` for the first: the library that writes descriptions takes longer to load than a model's forms. For
each model the rehearsal's forms are noted, then those of steps of real sizes and of an engine's warm-up; COUNTS is
numbers of tokens, as ``1,9`` or ``1-8192``. ``fp8`` and a blank before a case hold its weights in 8 bits; with
``torch`` there its experts are wider, and torch multiplies those of larger steps. ``control`` in place of a case
launches a kernel that has an argument that is not marked. One line of JSON for each model.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import triton
from triton import language as tl

from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels.ahead import LaunchForm, absent_operations, meeting_forms
from engine.backends.cuda.kernels.operations import KernelOperations, kernel_operations
from engine.backends.cuda.kernels.tile_sizes import ExpertRow
from engine.backends.cuda.load import make_device_runner, without_spares
from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.plan import Chunk
from engine.core.scheduler.scheduler import Scheduler
from engine.errors import ConfigurationError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model, load_model_config
from engine.model.checkpoint.weights import DTYPE_NAMES
from engine.startup.enumerate_kernels import KV_BYTES, rehearse
from engine.startup.warmup import warm_up
from tests.engine.backends.cuda.kernels.ahead_probe import start_with_zeros

ARCHITECTURE = "sm_90"
ROWS = 100
"""Rows of the engine: prompts have four rooms, and one bucket is no power of two."""

MOST_TOKENS = 8_192
LANES = (1, 3, 16, 17, 64, 99)
"""Decoding rows that join prompts: few enough for the kernels of few rows, and more."""

BLOCK_SIZE = 16
TORCH_INNER, TORCH_TOKENS = 64, 150
"""Width of the experts that torch multiplies, and tokens of the least step that it does it for: more than those of the
rehearsal's other prompts, and no more than warm-up's."""

CONTEXT = 100
"""Longest context: not the one that is rehearsed with, so tables have another width."""


@triton.jit(do_not_specialize=("marked",))
def _control(x, marked, unmarked):
    """Positive control: of one argument forms depend, of the other none."""
    tl.store(x, marked + unmarked)


def steps(runner: DeviceRunner, counts: list[int]) -> None:
    """Steps of every bucket, and prompts of so many tokens: alone, cut into chunks, ending or not, with scored tokens,
    and in one pass with decoding rows; blocks made zero and moved."""
    draw = random.Random(0)
    loop, prefill, storage, host = runner._loop, runner._prefill, runner.storage, runner._rows
    host.known[:] = [np.zeros(MOST_TOKENS + 1, dtype=np.int64)] * ROWS
    with torch.inference_mode():
        for bucket in buckets(ROWS):
            loop.step(bucket)
        for number, count in enumerate(counts):
            chunks = min(count, (1, 2, 3, 5, 8, 9, 16, 17, ROWS)[number % 9])
            cuts = [0, *sorted(draw.sample(range(1, count), chunks - 1)), count]
            host.asked.fill(number % 2 - 1)
            last = (number // 2) % 3
            asked = [_chunk(row, end - begin, last, draw) for row, (begin, end) in enumerate(pairwise(cuts))]
            prefill.run(asked)
            prefill.run(asked, LANES[number % len(LANES)])
        for blocks in (1, 3, 16, 17):
            storage.zero(torch.zeros(blocks, dtype=torch.int64, device=storage.device))


def _chunk(row: int, length: int, last: int, draw: random.Random) -> Chunk:
    """A chunk that ends its prompt by ``last``: 0 yes, 1 every second, 2 no; some of its tokens are scored."""
    start = draw.randrange(8)
    ends = last == 0 or (last == 1 and row % 2 == 0)
    return Chunk(row, start, length, ends, start + 1, draw.randrange(length))


def give_torch_experts(operations: KernelOperations, description: ModelConfig) -> None:
    """Have torch multiply the experts of larger steps, as the table has it for wide ones."""
    shape = description.extra.experts, description.hidden_size, description.intermediate_size
    row = ExpertRow(*shape, TORCH_TOKENS, "none")
    operations._chosen = replace(operations._chosen, by_torch=(row,))


def missing(
    description: ModelConfig, counts: list[int], dtype: torch.dtype, quantization: str, *, by_torch: bool = False
) -> dict[str, object]:
    """Forms of a model's steps that its rehearsal has not."""
    operations = absent_operations(description, ARCHITECTURE)
    if by_torch:
        give_torch_experts(operations, description)
    rehearsed: set[tuple[str, str]] = set()
    met: set[tuple[str, str]] = set()
    launches = rehearsed

    def meet(form: LaunchForm) -> None:
        launches.add((form.kernel, form.key))

    with meeting_forms(ARCHITECTURE, meet):
        asked = EngineConfig(
            model_dir="",
            model_digest="00",
            dtype=str(dtype).removeprefix("torch."),
            block_size=BLOCK_SIZE,
            max_num_seqs=ROWS,
            max_num_batched_tokens=ROWS,
            backend="device",
            quantization=quantization,
        )
        rehearse(asked, description, dtype, operations)
    launches = met
    with meeting_forms(ARCHITECTURE, meet):
        served = replace(asked, kv_bytes=KV_BYTES, max_num_batched_tokens=MOST_TOKENS, max_context=CONTEXT)
        within = description.within(CONTEXT)
        layout = without_spares(layout_for(served, within, asked.dtype), ROWS)
        model, _ = build_model(within, dtype, torch.device("meta"), scaled=quantization == "fp8")
        limits = limits_for(served, within, layout)
        steps(make_device_runner(served, model, layout, limits, operations), counts)
    launches = warmed = set()
    kept = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with meeting_forms(ARCHITECTURE, meet):
        start_with_zeros()
        warm(served, within, dtype, by_torch=by_torch)
    torch.empty, torch.empty_like, torch.Tensor.new_empty = kept
    unknown = (met | warmed) - rehearsed
    return {
        "rehearsed": len(rehearsed),
        "met": len(met),
        "missing": sorted({kernel for kernel, _ in unknown}),
        "keys": [key[:2_000] for _, key in sorted(unknown)[:3]],
        "cold": sorted({kernel for kernel, _ in rehearsed - warmed}),
        "kernels": sorted({kernel for kernel, _ in rehearsed}),
    }


def warm(served: EngineConfig, description: ModelConfig, dtype: torch.dtype, *, by_torch: bool) -> None:
    """An engine's warm-up, with memory that has addresses: on the processor, and full of zeros, for nothing is
    computed by a kernel."""
    small = replace(served, kv_bytes=1 << 26, max_num_batched_tokens=2 * ROWS)
    layout = without_spares(layout_for(small, description, small.dtype), ROWS)
    limits = limits_for(small, description, layout)
    model, _ = build_model(description, dtype, torch.device("cpu"), scaled=served.quantization == "fp8")
    model.packed = True  # as on a card, where matrices stay as they are published
    layer = description.kv_layers[0]
    heads, width = (description.num_heads, layer.heads), max(layer.key_dim, layer.value_dim)
    found = kernel_operations(heads, width, description.vocab_size, torch.device("cpu"), ARCHITECTURE)
    if by_torch:
        give_torch_experts(found, description)
    runner = make_device_runner(small, model, layout, limits, found, eager=True)
    runner._loop.ring.zero_()  # as if every row had got a token
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK_SIZE, caching=True)
    warm_up(Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner))


def control() -> dict[str, object]:
    """Of one kernel the forms that numbers 7 and 16 have, for each of its arguments."""
    found: dict[str, set[str]] = {"marked": set(), "unmarked": set()}
    for name, forms in found.items():
        with meeting_forms(ARCHITECTURE, lambda form, forms=forms: forms.add(form.key)):
            x = torch.empty(4, dtype=torch.int32, device="meta")
            for number in (7, 9, 1, 16, 32):
                _control[(1,)](x, **{"marked": 7, "unmarked": 7, name: number})
    return {name: len(forms) for name, forms in found.items()}


def numbers(said: str) -> list[int]:
    """Numbers of ``1,9`` or ``1-8192``."""
    found: list[int] = []
    for part in said.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main(folder: Path, cases: str, counts: str, dtype: torch.dtype) -> None:
    """Note the forms of every case."""
    for place, one in enumerate(cases.split(";")):
        if one == "control":
            print(json.dumps({"case": one, **control()}), flush=True)
            continue
        by_torch = one.startswith("torch ")
        try:
            held = "fp8" if one.startswith("fp8 ") else "none"
            description = load_model_config(str(folder / str(place)))
            if by_torch:
                description = replace(description, intermediate_size=TORCH_INNER)
            found = missing(description, numbers(counts), dtype, held, by_torch=by_torch)
        except ConfigurationError as error:
            found = {"refused": str(error)}
        print(json.dumps({"case": one, **found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], DTYPE_NAMES[sys.argv[4]])
