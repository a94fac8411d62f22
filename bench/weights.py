"""What packed weights cost while they are loaded or converted: processor time and memory, no wall clock.

    python bench/weights.py            # every format of a checkpoint, and every type of a GGUF file
    python bench/weights.py --rows 256 # a smaller matrix

A matrix of published size is decoded from a file into bfloat16 by one thread, as the loader does it; what memory grows
by besides the matrix itself is the staging. The same for the blocks of GGUF types, without a file.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.convert.ggml import TYPES
from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.reading import read_part
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.quantised.awq import awq
from engine.model.quantised.codec import Codec, Present, Stored
from engine.model.quantised.fp8 import F8, block_scaled
from engine.model.quantised.gptq import Layout, gptq
from engine.model.quantised.grouped import ScaleGrouping, packed_numbers, plain_numbers
from engine.model.quantised.stored import PackedMatrix, StoredParts

INPUTS = 4_096
ROUNDS = 3


def words(*shape: int) -> torch.Tensor:
    """Random int32."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def formats(outputs: int) -> dict[str, tuple[dict[str, torch.Tensor], object]]:
    """Tensors of a matrix in each format, and how its codec is found."""
    shape = (outputs, INPUTS)
    scale = torch.rand(outputs, INPUTS // 128).to(torch.bfloat16)
    awq_parts = {"qweight": words(INPUTS, outputs // 8), "qzeros": words(INPUTS // 128, outputs // 8)}
    gptq_parts = {
        "qweight": words(INPUTS // 8, outputs),
        "qzeros": words(INPUTS // 128, outputs // 8),
        "g_idx": (torch.randperm(INPUTS) // 128).int(),
    }
    fp8 = torch.randn(shape).to(torch.float8_e4m3fn)
    return {
        "bfloat16, as it is": ({"weight": torch.randn(shape).bfloat16()}, None),
        "fp8, blocks of 128": (
            {"weight": fp8, "weight_scale_inv": torch.rand(outputs // 128, INPUTS // 128)},
            lambda p: block_scaled(p, shape, (128, 128), scale="weight_scale_inv", numbers=tuple(F8)),
        ),
        "int8, a scale an output": (
            {"weight": torch.randint(-128, 128, shape, dtype=torch.int8), "weight_scale": torch.rand(outputs, 1)},
            lambda p: plain_numbers(p, shape, ScaleGrouping(8, 0, True)),
        ),
        "int4, groups of 128": (
            {"weight_packed": words(outputs, INPUTS // 8), "weight_shape": torch.tensor(shape), "weight_scale": scale},
            lambda p: packed_numbers(p, shape, ScaleGrouping(4, 128, True)),
        ),
        "AWQ": ({**awq_parts, "scales": scale.t().half().contiguous()}, lambda p: awq(p, shape, 128)),
        "GPTQ, by activation": (
            {**gptq_parts, "scales": scale.t().half().contiguous()},
            lambda p: gptq(p, shape, Layout(4, 128, True)),
        ),
    }


def memory_mib(name: str) -> float:
    """``VmRSS`` or, since the peak was last reset, ``VmHWM`` of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def load(name: str, outputs: int, folder: Path) -> tuple[float, float]:
    """Processor seconds of one load, the least of some, and MiB that memory grew by besides the target."""
    parts, find = formats(outputs)[name]
    save_file({f"m.{key}": one for key, one in parts.items()}, folder / "a.safetensors")
    kinds = {key: Stored("", tuple(one.shape)) for key, one in parts.items()}
    del parts
    target = torch.ones(outputs, INPUTS, dtype=torch.bfloat16)
    home = Home(((0, outputs), (0, INPUTS)), target)
    least = float("inf")
    with SafetensorsFile(folder / "a.safetensors") as file:
        entries = {key: (file, file.tensors[f"m.{key}"]) for key in kinds}
        present = Present("m", {key: Stored(one.dtype, one.shape) for key, (_, one) in entries.items()})
        codec: Codec | None = None if find is None else find(present)  # type: ignore[operator]
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_mib("VmRSS")
        for _ in range(ROUNDS):
            begun = time.process_time()
            if codec is None:
                read_part(file, "m.weight", home)
            else:
                PackedMatrix(codec, StoredParts("m", entries)).read_part(home)
            least = min(least, time.process_time() - begun)
    return least, memory_mib("VmHWM") - before


def main() -> int:
    """Print both tables. Each format is loaded in a process of its own, so that its peak is its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=14_336)
    parser.add_argument("--one", help="internal: measure one format")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        with tempfile.TemporaryDirectory() as folder:
            seconds, grown = load(given.one, given.rows, Path(folder))
        numbers = given.rows * INPUTS
        print(f"| {given.one} | {numbers / seconds / 1e6:.0f} | {grown:.0f} |", flush=True)
        return 0
    from subprocess import run

    print(
        f"{given.rows} x {INPUTS} into bfloat16, one thread\n\n"
        "| format | million numbers / CPU s | staging MiB |\n|---|---|---|",
        flush=True,
    )
    for name in formats(128):
        run([sys.executable, __file__, "--rows", str(given.rows), "--one", name], check=True)
    print("\nGGUF, to float32, numpy\n\n| type | million numbers / CPU s |\n|---|---|")
    for kind in TYPES.values():
        blocks = np.random.default_rng(0).integers(0, 100, ((1 << 20) // kind.numbers, kind.size), dtype=np.uint8)
        begun = time.process_time()
        for _ in range(8):
            kind.decode(blocks)
        print(f"| {kind.name} | {8 * (1 << 20) / (time.process_time() - begun) / 1e6:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
