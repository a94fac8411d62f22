"""Kernels that work on rows: norm with residual, gates, and heads normalised, rotated and written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from engine.backends.cuda.kernels import activation, norm, rope
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.runtime.operations import KvLayer, RopeInputs
from engine.model.families.gpt_oss import ClampedSwiGlu
from engine.model.layers.layers import Memory, OffsetRmsNorm, RmsNorm, gelu_mul, silu_mul
from engine.model.layers.rotary import RopeScaling, Rotary, rotate
from tests.engine.backends.cuda.kernels import references
from tests.engine.backends.cuda.kernels.support import COUNTS, DTYPES, PLACE, assert_close, for_each, noise, poisoned

pytestmark = pytest.mark.usefixtures("place")

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_norm_and_residual(count: int, dtype: torch.dtype) -> None:
    """Rows of any width, with and without the residual stream, gains as they are and less one."""

    def check(case: tuple[int, int, bool, bool, int]) -> None:
        rows, size, adds, offset, seed = case
        generator = torch.Generator().manual_seed(seed)
        x = noise(generator, rows, size + 3, dtype=dtype)[:, :size]
        gain = noise(generator, size, dtype=dtype)
        stream = noise(generator, rows, size, dtype=dtype) if adds else None
        wanted, added = references.normed(x, stream, gain, eps=EPS, offset=offset)
        out = poisoned(rows, size, dtype=dtype)
        norm.rms_norm(x, stream, gain, out, eps=EPS, offset=offset)
        assert_close(out, wanted, dtype, 1.0)
        assert stream is None or (added is not None and torch.equal(stream, added))

    cases = st.tuples(st.integers(0, 4), st.integers(1, 300), st.booleans(), st.booleans(), st.integers(0, 999))
    for_each(count, cases, check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_gates(count: int, dtype: torch.dtype) -> None:
    """Every gate, rows apart; the specification is what the model's own blocks compute."""

    def check(case: tuple[int, int, str, int]) -> None:
        rows, inner, kind, seed = case
        gate = Gate(kind)  # type: ignore[arg-type]
        x = 4 * noise(torch.Generator().manual_seed(seed), rows, 2 * inner + 2, dtype=dtype)[:, : 2 * inner]
        out = poisoned(rows, inner, dtype=dtype)
        activation.activate(x, gate, out)
        wanted = references.activated(x, gate)
        assert_close(out, wanted, dtype, 1.0)
        own = {"silu": silu_mul, "gelu": gelu_mul, "clamped": ClampedSwiGlu(gate.alpha, gate.limit)}[kind]
        torch.testing.assert_close(wanted.float(), own(x.float()), rtol=1e-5, atol=1e-5)

    cases = st.tuples(
        st.integers(0, 3),
        st.one_of(st.integers(1, 90), st.just(1_100)),
        st.sampled_from(list(activation.KINDS)),
        st.integers(0, 999),
    )
    for_each(count, cases, check)


def test_a_gate_of_no_number_is_none() -> None:
    """What is broken stays so: clamping does not make a number of it. Control: its neighbour is a number."""
    x = torch.tensor([[torch.nan, 1.0, 1.0, 1.0]])
    out = torch.zeros(1, 2)
    activation.activate(x, Gate("clamped"), out)
    assert out[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_heads_are_normalised_rotated_and_written(count: int, dtype: torch.dtype) -> None:
    """Any heads, whole and partial rotations, with and without norms; tokens of no slot are written nowhere, and
    nothing but the slots is touched."""

    def check(case: tuple[int, int, int, int, int, bool, bool, int]) -> None:
        tokens, heads, kv_heads, dim, turned, normed, offset, seed = case
        generator = torch.Generator().manual_seed(seed)
        qkv = noise(generator, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
        rotary = Rotary(RopeScaling(partial=turned / dim), dim, PLACE)
        positions = torch.randint(0, 4_000, (tokens,), generator=generator)
        cos, sin = rotary.tables(positions, dtype)
        kind = OffsetRmsNorm if offset else RmsNorm
        norms = kind(dim, EPS, Memory(dtype, PLACE)), kind(dim, EPS, Memory(dtype, PLACE))
        for one, gain in zip(norms, noise(generator, 2, dim, dtype=dtype), strict=True):
            one.weight.copy_(gain)
        turn = RopeInputs(cos, sin, norms if normed else None)
        layer = KvLayer(*(poisoned(4, 5, kv_heads, dim, dtype=dtype) for _ in range(2)))
        slots = torch.randperm(20, generator=generator)[:tokens]
        slots[::3] = -1
        q_out = poisoned(tokens, heads, dim, dtype=dtype)
        rope.rope_and_write(qkv, q_out, layer, slots, turn)
        q, k, v = references.roped(qkv, heads, kv_heads, turn)
        magnitude = max(q.abs().max().item(), k.abs().max().item(), 1.0)
        assert_close(q_out, q, dtype, magnitude)
        kept = slots >= 0
        for memory, wanted in ((layer.keys, k), (layer.values, v)):
            lines = memory.view(20, kv_heads, dim)
            assert_close(lines[slots[kept]], wanted[kept], dtype, magnitude)
            others = torch.ones(20, dtype=torch.bool)
            others[slots[kept]] = False
            assert lines[others].isnan().all()
        if not normed:
            own = rotate(qkv[:, :heads].float(), cos.float(), sin.float())
            torch.testing.assert_close(q.float(), own, rtol=1e-4, atol=1e-4)

    cases = st.integers(1, 3).flatmap(
        lambda quarters: st.tuples(
            st.integers(1, 5),
            st.integers(1, 4),
            st.integers(1, 2),
            st.just(8 * quarters),
            st.sampled_from((4 * quarters, 8 * quarters)),
            st.booleans(),
            st.booleans(),
            st.integers(0, 999),
        )
    )
    for_each(count, cases, check)
