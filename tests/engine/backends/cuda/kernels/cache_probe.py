"""One kernel compiled for a GPU, or found compiled: ``python -m tests.engine.backends.cuda.kernels.cache_probe``.

Each line of standard input is an order, ``[ROOT, WHAT]`` in JSON, which a fork carries out: Triton is loaded once, and
nothing else is done before. ``make`` compiles and seals, ``use`` finds, ``other`` asks for a form of the kernel that
nobody has compiled, and ``alone`` is Triton by itself on the same folder. The last three can start no program, as in a
sandbox. Needs no GPU; tells the size of the machine code. A line of JSON answers each order: exit status, standard
output, standard error.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401 - a fork would load it when it compiles
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key

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


def answered(root: Path, what: str) -> tuple[int, str, str]:
    """Carry out an order in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            main(root, what)
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = []
        for one in (out, err):
            one.seek(0)
            said.append(one.read().decode())
    return status, said[0], said[1]


triton_key()  # kept: a digest over half a gigabyte, which is part of every kernel's name
while order := sys.stdin.readline():
    place, wanted = json.loads(order)
    print(json.dumps(answered(Path(place), wanted)), flush=True)
