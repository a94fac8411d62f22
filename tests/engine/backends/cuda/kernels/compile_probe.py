"""Compile every launch of a served model's step for real GPUs, on a machine that has none; a child of test_compile.

Triton's compiler and its assembler need no device: a launch is compiled instead of started, and what comes out is
machine code with its registers and shared memory. One line of JSON a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.runtime.jit import JITFunction

from engine.backends.cuda.kernels.ahead import AbsentGpu
from tests.engine.backends.cuda.kernels.launches import LAUNCHES


def spills(ptxas: Path, ptx: str, capability: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [str(ptxas), "-v", f"--gpu-name={capability}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
    found = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
    stored = [int(number) for number in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    return max(found), max(stored, default=0)


def main() -> None:
    """Compile for the compute capability of the first argument (80, 90); the others name launches, none: all."""
    capability, wanted = int(sys.argv[1]), sys.argv[2:]
    sys.stderr.write(f"triton {triton.__version__}\n")
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    triton.runtime.driver.set_active(AbsentGpu(f"sm_{capability}"))
    run = JITFunction.run

    def compile_launch(kernel: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        built = run(kernel, *args, grid=grid, warmup=True, **given)
        name = f"sm_{capability}a" if capability == 90 else f"sm_{capability}"
        registers, spilled = spills(ptxas, built.asm["ptx"], name)
        print(
            json.dumps(
                {
                    "launch": launch,
                    "kernel": kernel.fn.__name__,
                    "grid": list(grid),
                    "registers": registers,
                    "spilled": spilled,
                    "shared": built.metadata.shared,
                    "warps": built.metadata.num_warps,
                    "bytes": len(built.asm["cubin"]),
                    "bulk": len(re.findall(r"cp\.async\.bulk\.tensor", built.asm["ptx"])),
                    "mma": len(re.findall(r"wgmma|mma\.sync", built.asm["ptx"])),
                }
            ),
            flush=True,
        )

    JITFunction.run = compile_launch
    for launch, start in LAUNCHES.items():
        if not wanted or launch in wanted:
            start()


if __name__ == "__main__":
    main()
