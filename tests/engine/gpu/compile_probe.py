"""Compile every launch of a served model's step for real GPUs, on a machine that has none; a child of test_compile.

Triton's compiler and its assembler need no device: a launch is caught, its arguments' types become a signature, and
what comes out is machine code with its registers and shared memory. One line of JSON a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.engine.gpu.launches import LAUNCHES

OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def signature(kernel: JITFunction, args: tuple[object, ...], given: dict[str, object]) -> ASTSource:
    """What Triton would compile for these arguments: it knows which addresses and numbers are multiples of 16."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | given
    kinds, constants, known = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr:
            kinds[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            kinds[param.name] = f"*{TYPES[value.dtype]}"
            known[(place,)] = [["tt.divisibility", 16]]
        else:
            kinds[param.name] = "fp32" if isinstance(value, float) else "i64" if abs(value) >= 1 << 31 else "i32"
            if isinstance(value, int) and value % 16 == 0:
                known[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature=kinds, constexprs=constants, attrs=known)


def spills(ptxas: Path, ptx: str, capability: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={capability}", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    found = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
    stored = [int(number) for number in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    return max(found), max(stored, default=0)


def main() -> None:
    """Compile for the compute capability of the first argument (80, 90); the others name launches, none: all."""
    capability, wanted = int(sys.argv[1]), sys.argv[2:]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    target = GPUTarget("cuda", capability, 32)
    seen: list[str] = []

    def compile_launch(kernel: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        built = triton.compile(signature(kernel, args, given), target=target, options=options)
        name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
        registers, spilled = spills(ptxas, built.asm["ptx"], name)
        seen.append(kernel.fn.__name__)
        print(
            json.dumps(
                {
                    "launch": launch, "kernel": kernel.fn.__name__, "grid": list(grid), "registers": registers,
                    "spilled": spilled, "shared": built.metadata.shared, "warps": built.metadata.num_warps,
                    "bytes": len(built.asm["cubin"]), "mma": len(re.findall(r"wgmma|mma\.sync", built.asm["ptx"])),
                }
            ),
            flush=True,
        )  # fmt: skip

    JITFunction.run = compile_launch
    for launch, start in LAUNCHES.items():
        if not wanted or launch in wanted:
            start()


main()
