"""Extents of tiles by architecture and by a head's width: a small table, chosen from when an engine starts.

Nothing is tried at run time: a kernel that is compiled while requests wait would stop them all, and what serves has no
compiler. ``bench/gpu_tune.py`` measures on a card and prints rows to be committed here; an architecture without one
takes the default.

A row that does not say where it was ``measured`` was made without a GPU: it was chosen so that a kernel keeps its
numbers in registers and its tiles in shared memory, which the assembler says
(``tests/engine/backends/cuda/kernels/test_compile.py``), and has not been timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.cuda.kernels.gemv import FewRows
from engine.backends.cuda.kernels.grouped import ProductTile
from engine.backends.cuda.kernels.lines import LineCut
from engine.backends.cuda.kernels.prefill_attention import PrefillShape
from engine.backends.cuda.kernels.prefill_pipelined import PipelinedShape
from engine.backends.cuda.kernels.sampler import LEAN_FORM, PLAIN_FORM, SamplerForm
from engine.backends.cuda.kernels.tile_map import DecodeShape
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.runtime.mixing import ANY, NEVER, Mixing

FEW = FewRows()

FEW_SCALED = FewRows(launch=Threads(4, 4))
"""How matrices in 8 bits are cut: tiles of as many numbers, since these are widened in registers, and more of them
under way."""


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """For which numbers of tokens torch's products of groups are faster than our own, for experts of one shape."""

    experts: int
    hidden: int
    inner: int
    """Numbers between an expert's two maps."""
    least: int
    """Tokens from which on they are."""
    measured: str
    """The card that says so."""


LEAST_ALIGNED = 8
"""Inputs of a map that torch multiplies by group are a multiple of it: lines begin at sixteen bytes."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What launches are made with."""

    decode: DecodeShape
    prefill: PrefillShape
    experts: ProductTile
    few: FewRows = FEW
    """Products of few rows."""
    few_scaled: FewRows = FEW_SCALED
    """Products of few rows with a matrix in 8 bits."""
    by_torch: tuple[ExpertRow, ...] = ()
    """Experts that torch multiplies (``bench/gpu_moe.py`` makes these rows); others, and fewer tokens, are our own
    kernel's. Only for architectures on which torch does it without the host (``sm_90`` and later)."""
    joined: bool = True
    """Whether what stands around a launch is computed in it: splits combined, a step begun and ended."""
    pipelined: PipelinedShape | None = None
    """For prompts of layers that ``prefill_pipelined.fits``, on the architecture that it is made for; None: all layers
    take ``prefill``."""
    sampler: SamplerForm = PLAIN_FORM
    """How tokens are chosen."""
    mixing: Mixing = NEVER
    """When decoding rows are computed in one pass with prompts."""
    measured: str = ""
    """The card on which this row was chosen by time; empty: on none."""

    def takes_torch(self, gate_up: Tensor, top: int, tokens: int) -> bool:
        """Whether torch multiplies the experts of a step of so many tokens.

        Args:
            gate_up: the first map of all experts, ``(E, 2 I, hidden)``.
            top: experts of a token.
            tokens: of the step.
        """
        experts, wide, hidden = gate_up.shape
        fits = gate_up.dtype == torch.bfloat16 and hidden % LEAST_ALIGNED == 0 and wide // 2 % LEAST_ALIGNED == 0
        rows = (row for row in self.by_torch if (row.experts, row.hidden, row.inner) == (experts, hidden, wide // 2))
        return fits and tokens * top > 0 and any(tokens >= row.least for row in rows)

    def programs(self, rows: int, kv_heads: int, processors: int) -> int:
        """Programs for each key-value head of a bucket of so many rows, on a GPU of so many multiprocessors: as many as
        run at once, since one more would begin when the first are over, and not more than there can be splits. The same
        for all steps of the bucket, so that its launches can be recorded."""
        return max(1, min(rows * self.decode.splits, processors * self.decode.resident // kv_heads))


EXPERTS = ProductTile(64, 64, 64, Threads(4, 3))

DEFAULT = {
    128: Configuration(DecodeShape(64, 4, 32, Threads(4, 2)), PrefillShape(64, 32, Threads(4, 2)), EXPERTS),
    256: Configuration(DecodeShape(32, 8, 32, Threads(4, 2)), PrefillShape(64, 32, Threads(8, 2)), EXPERTS),
    1 << 30: Configuration(DecodeShape(16, 16, 32, Threads(8, 1)), PrefillShape(32, 16, Threads(8, 1)), EXPERTS),
}
"""By the widest head that a row is for. A split is 256 tokens while a context is short."""

MIXING = Mixing(((1_023, 0), (ANY, 200)), ((1_023, 0), (1_024, 200), (ANY, 64)), least_bytes=8 << 30)
"""By time on an H200, twice (``bench/gpu_mixed.py``, Llama 8B's shape): beside 2,048 and more tokens of prompts one
pass takes 0.6 to 4 ms less than two, with 64 rows and with 200. Beside 512 tokens it took 2 to 4 ms less on one machine
and 1 to 4 ms more on another, whose host started its kernels later. Where the plan waits for the pass, a host's 1.3 ms
come on top."""

BY_TORCH = (ExpertRow(8, 4_096, 14_336, 2_048, "NVIDIA H200"), ExpertRow(128, 2_048, 768, 2_048, "NVIDIA H200"))
"""Experts as wide as Mixtral 8x7B's and Qwen3 30B-A3B's: torch takes 0.49 and 0.87 of our kernel's time for 2,048
tokens, and 1.03 and 1.33 of it for 256."""

TABLE = {
    "sm_80": DEFAULT,
    "sm_100": DEFAULT,
    "sm_90": {
        128: Configuration(
            DecodeShape(128, 2, 32, Threads(4, 2), resident=3),
            PrefillShape(64, 32, Threads(4, 2)),
            EXPERTS,
            few=FewRows(alone=LineCut(8, 4)),
            few_scaled=replace(FEW_SCALED, alone=LineCut(8, 8)),
            by_torch=BY_TORCH,
            pipelined=PipelinedShape(),
            sampler=LEAN_FORM,
            mixing=MIXING,
            measured="NVIDIA H200",
        ),
        256: Configuration(
            DecodeShape(32, 8, 32, Threads(4, 3)), PrefillShape(64, 64, Threads(8, 2)), EXPERTS, sampler=LEAN_FORM
        ),
        1 << 30: Configuration(
            DecodeShape(32, 8, 32, Threads(8, 2)), PrefillShape(64, 32, Threads(8, 2)), EXPERTS, sampler=LEAN_FORM
        ),
    },
}


def configuration(architecture: str, width: int) -> Configuration:
    """The configuration for heads of this width, of keys or of values, whichever is wider.

    Args:
        architecture: as compilers name it, ``sm_90``.
        width: numbers.
    """
    rows = TABLE.get(architecture, DEFAULT)
    return next(row for widest, row in rows.items() if width <= widest)
