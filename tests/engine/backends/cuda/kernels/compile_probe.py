"""Compile every launch of a served model's step for real GPUs, on a machine that has none; a child of test_compile.

Triton's compiler and its assembler need no device: a launch is compiled instead of started, and what comes out is
machine code with its registers and shared memory. One line of JSON a kernel.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import triton
from triton.runtime.jit import JITFunction

from engine.backends.cuda.kernels.ahead import AbsentGpu
from tests.engine.backends.cuda.kernels.launches import LAUNCHES

CONTROL, UNKNOWN = "unknown", 1
"""In place of a launch: the guards for a compute capability that no compiler knows, in a process of their own, whose
exit status is told."""


def used(said: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit them, by what the assembler says."""
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    stored = [int(number) for number in re.findall(r"(\d+) bytes spill stores", said)]
    return max(registers), max(stored, default=0)


def main() -> None:
    """Compile for the compute capability of the first argument (80, 90); the others name launches, none: all."""
    capability, wanted = int(sys.argv[1]), sys.argv[2:]
    sys.stderr.write(f"triton {triton.__version__}\n")
    if CONTROL in wanted:
        wanted.remove(CONTROL)
        if (child := os.fork()) == 0:
            capability, wanted = UNKNOWN, ["guards"]
        else:
            print(json.dumps({"launch": CONTROL, "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}))
    triton.knobs.nvidia.dump_ptxas_log = True  # printed when a kernel is compiled, and not when it is met again
    said: dict[str, str] = {}
    triton.runtime.driver.set_active(AbsentGpu(f"sm_{capability}"))
    run = JITFunction.run

    def compile_launch(kernel: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        with redirect_stdout(StringIO()) as printed:
            built = run(kernel, *args, grid=grid, warmup=True, **given)
        registers, spilled = used(said.setdefault(built.hash, printed.getvalue()))
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
