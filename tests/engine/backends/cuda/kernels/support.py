"""What the tests of GPU kernels share: drawing cases, poisoned memory, and tolerances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.backends.attention import AttentionRule
from engine.backends.cuda.runtime.operations import KvLayer
from engine.core.kv.layout import FULL, Reach
from tests.native import ON_CARD

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = [2, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(1_200)])]
"""Drawn shapes of each kernel and dtype: two under the interpreter of `make test`, and the count of the bar."""

PLACE = torch.device("cuda" if ON_CARD else "cpu")
"""Where kernels and their specifications compute."""


class OnCard(TorchFunctionMode):
    """Makes tensors on the GPU wherever a test names no device. Random ones are drawn on the CPU, so that a seed gives
    the same numbers on both."""

    def __torch_function__(self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in FACTORIES and given.get("generator") is not None:
            return func(*args, **given).to(PLACE)
        if func in FACTORIES:
            given.setdefault("device", PLACE)
        return func(*args, **given)


FACTORIES = {
    torch.arange, torch.empty, torch.full, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm,
    torch.tensor, torch.zeros,
}  # fmt: skip

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
"""Relative error of one number: of bfloat16 half of the last of its 8 bits, once more than the sums in float32 have.
Float32 sums of up to some hundred numbers stay within some 2**-20; their exponentials have as much."""

Case = TypeVar("Case")


def for_each(count: int, cases: st.SearchStrategy[Case], check: Callable[[Case], None]) -> None:
    """Check as many drawn cases, the same ones every time."""
    quiet = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # to make a failing case smaller would take minutes under the interpreter
        suppress_health_check=list(HealthCheck),
    )

    @quiet
    @given(cases)
    def run(case: Case) -> None:
        check(case)

    run()


def noise(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """No numbers: what is not written stays one, and what is read by mistake makes the result one."""
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype, magnitude: float, steps: float = 2.0) -> None:
    """Within ``steps`` roundings of numbers of this magnitude, and finite wherever the specification is."""
    assert found.isfinite().all()
    error = (found.double() - wanted.double()).abs()
    bound = ROUNDING[dtype] * (steps * magnitude + wanted.double().abs())
    worst = (error - bound).max() if error.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"{worst.item()} over the bound, of errors up to {error.max().item()}"


def assert_within(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    """Finite, and each number within its own bound."""
    assert found.isfinite().all()
    worst = ((found.double() - wanted).abs() - bound).max().item()
    assert worst <= 0, f"{worst} over the bound"


@dataclass(frozen=True, slots=True)
class LayerCase:
    """A layer's shape and how it weighs."""

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    latent: bool
    block_size: int
    gap: int
    """Rows of other layers in a block."""
    reach: Reach
    cap: float
    sinks: bool
    seed: int

    def rule(self) -> AttentionRule:
        """How it weighs."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = noise(generator, self.kv_heads * self.group) if self.sinks else None
        return AttentionRule(self.key_dim**-0.5, self.cap, sinks)

    def memory(self, blocks: int, dtype: torch.dtype) -> KvLayer:
        """Poisoned blocks; what may be seen is written by ``fill``."""
        rows = (blocks, self.block_size + self.gap, self.kv_heads)
        keys = poisoned(*rows, self.key_dim, dtype=dtype)[:, self.gap // 2 : self.gap // 2 + self.block_size]
        if self.latent:
            return KvLayer(keys, keys[..., : self.value_dim], reach=self.reach, latent=True)
        values = poisoned(*rows, self.value_dim, dtype=dtype)[:, self.gap // 2 : self.gap // 2 + self.block_size]
        return KvLayer(keys, values, reach=self.reach)


def fill(layer: KvLayer, table: list[int], positions: range, generator: torch.Generator) -> None:
    """Write normal numbers where a sequence has these positions."""
    size = layer.keys.shape[1]
    for position in positions:
        at = table[position // size], position % size
        layer.keys[at] = noise(generator, *layer.keys.shape[2:], dtype=layer.keys.dtype)
        if not layer.latent:
            layer.values[at] = noise(generator, *layer.values.shape[2:], dtype=layer.values.dtype)


@st.composite
def layers(draw: st.DrawFn) -> LayerCase:
    """Layers of every kind that a family has."""
    latent = draw(st.booleans())
    size = draw(st.integers(1, 40))
    value_dim = draw(st.sampled_from((8, 16, 24, 40)))
    return LayerCase(
        kv_heads=1 if latent else draw(st.integers(1, 3)),
        group=draw(st.sampled_from((1, 2, 3, 5, 8, 17))),
        key_dim=value_dim + draw(st.sampled_from((4, 8))) if latent else draw(st.sampled_from((8, 16, 24, 40, 48))),
        value_dim=value_dim,
        latent=latent,
        block_size=draw(st.sampled_from((1, 4, 5, 16))),
        gap=draw(st.sampled_from((0, 3))),
        reach=draw(st.sampled_from((FULL, Reach("window", size), Reach("chunk", size)))),
        cap=draw(st.sampled_from((0.0, 2.5))),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 10_000)),
    )


def random_tables(generator: torch.Generator, rows: int, width: int) -> Tensor:
    """Block tables in which no block is twice, in random order; block 0 is in none."""
    return (torch.randperm(rows * width, generator=generator)[: rows * width] + 1).view(rows, width).int()
