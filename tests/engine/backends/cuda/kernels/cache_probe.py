"""One kernel compiled for a GPU, or found compiled: ``python -m tests.engine.backends.cuda.kernels.cache_probe ROOT
WHAT``.

``make`` compiles and seals, ``use`` finds, ``other`` asks for a form of the kernel that nobody has compiled, and
``alone`` is Triton by itself on the same folder. The last three can start no program, as in a sandbox. Needs no GPU;
tells the size of the machine code.
"""

import subprocess
import sys
from pathlib import Path

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.backends.cuda.kernels.cache import folder_name, mark_launches, open_cache, seal

ARCHITECTURE, CONFIGURATION = "sm_90", "c0" * 32


@triton.jit
def double(x, COUNT: tl.constexpr):
    """Twice the numbers."""
    at = tl.arange(0, COUNT)
    tl.store(x + at, tl.load(x + at) * 2)


def no_program(*_: object, **__: object) -> None:
    """Stands for a sandbox without any."""
    raise PermissionError("a program was to be started")


def main(root: Path, what: str) -> None:
    """Make or use."""
    if what in ("use", "other", "alone"):
        subprocess.Popen.__init__ = no_program
    if what in ("make", "alone"):
        triton.knobs.cache.dir = str(root / folder_name(ARCHITECTURE, CONFIGURATION))
        mark_launches()
    else:
        open_cache(root, ARCHITECTURE, CONFIGURATION)
    count = 256 if what == "other" else 128
    kinds = {"x": "*fp32", "COUNT": "constexpr"}
    built = triton.compile(ASTSource(double, kinds, {"COUNT": count}), target=GPUTarget("cuda", 90, 32))
    if what == "make":
        seal(root / folder_name(ARCHITECTURE, CONFIGURATION), ARCHITECTURE, CONFIGURATION)
    print(len(built.asm["cubin"]))


main(Path(sys.argv[1]), sys.argv[2])
