"""Each compiled operation against its plain-tensor specification, on shapes drawn at random, in every variant."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.native import manifest
from engine.backends.native.abi import Kind, Mode, Op, Program, Step
from engine.backends.native.library import Library
from engine.backends.native.packing import FED, FED_TO_DOTS, TYPES, interleave, pack, padded_inputs
from engine.backends.native.program import Builder
from engine.errors import ForeignBlockError
from engine.model.layers.layers import quantise_rows
from tests.engine.backends.native import reference

EMULATED = [one.name for one in manifest.VARIANTS if one.machine == "aarch64" != platform.machine()]
VARIANTS = [
    *(variant.name for variant in manifest.variants_of(platform.machine())),
    *(pytest.param(name, marks=pytest.mark.full) for name in EMULATED),
]
"""This machine's, and in the full form those that are emulated."""
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
FEW = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BLOCK = 5
"""Tokens of a block in these tests: no divisor of the kernels' tile."""

Open = Callable[..., Library]


def run(
    library: Library,
    ops: list[Op],
    *,
    tokens: int = 1,
    positions: np.ndarray | None = None,
    slots: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    tables: np.ndarray | None = None,
    kv_dtype: torch.dtype = torch.float32,
    token_ids: np.ndarray | None = None,
) -> None:
    """Run operations over a step of so many tokens, on both threads; rows of x stand for tokens."""
    zeros = np.zeros(tokens, dtype=np.int64)
    wide = np.zeros((max(tokens, 1), 200), dtype=np.int64) if tables is None else tables
    array = (Op * len(ops))(*ops)
    counters = torch.zeros(64 * (len(ops) + 2), dtype=torch.uint8)
    program = Program(
        ops=ctypes.addressof(array),
        count=len(ops),
        block_size=BLOCK,
        vocab_size=1_000,
        num_slots=5_000,
        max_rows=len(wide),
        kv_dtype=TYPES[kv_dtype],
        solo_tokens=0,
        counters=-(-counters.data_ptr() // 64) * 64,
    )
    chosen = (token_ids, positions, slots, rows)
    arrays = [*(zeros if one is None else one for one in chosen), np.arange(tokens)]
    expected, stamps = np.zeros_like(wide), np.zeros(5_000 // BLOCK, dtype=np.int64)
    step = Step(
        tokens,
        tokens,
        *(one.ctypes.data for one in arrays),
        wide.ctypes.data,
        wide.shape[1],
        expected.ctypes.data,
        stamps.ctypes.data,
    )
    library.run(program, step)


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=generator)


def feed(library: Library, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in the form of an operand, with room for whole tiles, and their scales."""
    count, width = x.shape
    room = torch.zeros(-(-count // 32) * 32, padded_inputs(width, dtype), dtype=torch.float32)
    scale = torch.zeros(len(room))
    if dtype == torch.int8:
        numbers, scales = quantise_rows(x)
        room = torch.full(room.shape, 128, dtype=torch.uint8)
        room[:count, :width] = (numbers.int() + 128).to(torch.uint8)
        scale[:count] = scales.flatten()
        return (room if library.has_dot_products else swapped(room).to(torch.int16)), scale
    room[:count, :width] = x
    return room.to(dtype).to(fed(library, dtype)), scale


def fed(library: Library, dtype: torch.dtype) -> torch.dtype:
    """What a product with weights of a dtype is fed by these kernels."""
    return (FED_TO_DOTS if library.has_dot_products else FED)[dtype]


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """The second and the third of each four numbers exchanged, as kernels without dot products have their bytes."""
    return rows.unflatten(1, (-1, 4))[:, :, [0, 2, 1, 3]].flatten(1)


def builder(library: Library, rows: int, dtype: torch.dtype) -> Builder:
    """A builder of operations for these kernels."""
    return Builder(max_tokens=rows, dtype=dtype, dots=library.has_dot_products)


def weight_of(generator: torch.Generator, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a checkpoint holds it."""
    weight = draw(generator, outputs, inputs)
    return weight if dtype == torch.int8 else weight.to(dtype)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FEW
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(90, 200)),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 100),
    mode=st.sampled_from([Mode.STORE, Mode.ADD]),
    biased=st.booleans(),
)
def test_products(
    open_kernels: Open, variant: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, mode: Mode, biased: bool
) -> None:
    """Any number of rows, inputs and outputs, with and without bias, stored and added, to rounding of float32 sums."""
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    weight, x = weight_of(generator, outputs, inputs, dtype), draw(generator, rows, inputs)
    bias = draw(generator, outputs) if biased else None
    packed, library = pack(weight, bias, int8=dtype == torch.int8), open_kernels(variant)
    room, scale = feed(library, x, dtype)
    out = draw(generator, rows, outputs)
    before = out.clone() if mode is Mode.ADD else 0.0
    build = builder(library, rows, dtype)
    build.linear(packed, (room.data_ptr(), scale.data_ptr()), out.data_ptr(), mode)
    run(library, build.ops, tokens=rows)
    seen = reference.operand(weight.float(), dtype)
    expected = reference.linear(reference.operand(x, dtype), seen, bias) + before
    assert torch.allclose(out, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FEW
@given(rows=st.integers(1, 40), inputs=st.integers(1, 100), inner=st.integers(1, 70))
def test_gated_products(
    open_kernels: Open, variant: str, dtype: torch.dtype, rows: int, inputs: int, inner: int
) -> None:
    """SwiGLU in one product: gate and up are interleaved, the result has the dtype that the next product takes."""
    generator = torch.Generator().manual_seed(rows + inputs * inner)
    gate, up = (weight_of(generator, inner, inputs, dtype) for _ in range(2))
    x = draw(generator, rows, inputs)
    packed, library = pack(interleave(gate, up), int8=dtype == torch.int8), open_kernels(variant)
    room, scale = feed(library, x, dtype)
    wide = padded_inputs(inner, dtype) if dtype != torch.int8 else inner
    out = torch.zeros(rows, wide, dtype=torch.float32 if dtype == torch.int8 else fed(library, dtype))
    build = builder(library, rows, dtype)
    build.linear(packed, (room.data_ptr(), scale.data_ptr()), out.data_ptr(), Mode.SWIGLU)
    build.ops[0].outputs = 2 * inner
    run(library, build.ops, tokens=rows)
    gate, up = (reference.operand(part.float(), dtype) for part in (gate, up))
    expected = reference.swiglu(reference.operand(x, dtype), gate, up)
    slack = 0.01 if dtype == torch.bfloat16 else 1e-4
    assert torch.allclose(out[:, :inner].float(), expected, atol=slack, rtol=slack)
    assert not out[:, inner:].any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FEW
@given(rows=st.integers(1, 9), width=st.integers(1, 200), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_norms(open_kernels: Open, variant: str, dtype: torch.dtype, rows: int, width: int, size: float) -> None:
    """Norm and rounding to the operand's dtype; 8-bit rows keep their own scale."""
    generator = torch.Generator().manual_seed(rows * width)
    x, gain = draw(generator, rows, width) * size, draw(generator, width)
    library = open_kernels(variant)
    build = builder(library, rows, dtype)
    room, scale = feed(library, torch.zeros(rows, width), dtype)
    build.add(
        Kind.NORM,
        dtype=TYPES[dtype],
        inputs=width,
        number=1e-5,
        weight=gain.data_ptr(),
        input=x.data_ptr(),
        output=room.data_ptr(),
        out_scale=scale.data_ptr(),
    )
    run(library, build.ops, tokens=rows)
    expected = reference.norm(x, gain, 1e-5)
    swap = dtype == torch.int8 and not library.has_dot_products
    seen = (swapped(room) if swap else room)[:rows, :width].float()
    if dtype == torch.int8:
        seen = (seen - 128) * scale[:rows, None]
        assert ((seen - expected).abs() <= 0.51 * scale[:rows, None] + 1e-6).all()
        return
    slack = 0.008 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(seen, expected, atol=1e-6, rtol=slack)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@FEW
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1), (6, 6), (64, 1)]),
    dim=st.sampled_from([2, 8, 16, 24, 32, 64, 128]),
    length=st.integers(1, 60),
    chunk=st.integers(1, 60),
)
def test_rotation_and_attention(
    open_kernels: Open, variant: str, kv_dtype: torch.dtype, heads: tuple[int, int], dim: int, length: int, chunk: int
) -> None:
    """A sequence computed in chunks of any size over scattered blocks, beside a row of its own: keys and values land in
    their slots, and every token sees exactly what is before it."""
    generator, library = torch.Generator().manual_seed(length * dim + chunk), open_kernels(variant)
    num_heads, kv_heads = heads
    width = (num_heads + 2 * kv_heads) * dim
    qkv = draw(generator, length, width)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)
    tables = np.zeros((2, 20), dtype=np.int64)
    tables[1] = np.random.default_rng(3).permutation(np.arange(1, 21))
    cache = torch.full((2, 21 * BLOCK, kv_heads, dim), torch.nan, dtype=kv_dtype)
    results = []
    for start in range(0, length, chunk):
        end = min(length, start + chunk)
        positions = np.arange(start, end)
        part, out = qkv[start:end].clone(), torch.zeros(end - start, num_heads * dim)
        cosines, sines = torch.zeros(end - start, dim // 2), torch.zeros(end - start, dim // 2)
        shape = {"heads": num_heads, "kv_heads": kv_heads, "dim": dim}
        turned = {"cosines": cosines.data_ptr(), "sines": sines.data_ptr()}
        places = {"keys": cache[0].data_ptr(), "values": cache[1].data_ptr()}
        build = builder(library, end - start, torch.float32)
        build.add(Kind.ANGLES, dim=dim, number=1.5, weight=frequencies.data_ptr(), **turned)
        build.add(Kind.ROPE, input=part.data_ptr(), **shape, **places, **turned)
        build.add(Kind.ATTEND, number=dim**-0.5, input=part.data_ptr(), output=out.data_ptr(), **shape, **places)
        run(
            library,
            build.ops,
            tokens=end - start,
            positions=positions,
            tables=tables,
            slots=tables[1, positions // BLOCK] * BLOCK + positions % BLOCK,
            rows=np.ones(end - start, dtype=np.int64),
            kv_dtype=kv_dtype,
        )
        results.append(out)
    cosines, sines = reference.angles(torch.arange(length), frequencies, 1.5)
    both = qkv[:, : (num_heads + kv_heads) * dim].unflatten(1, (-1, dim))
    rotated = reference.rope(both, cosines, sines)
    slots = torch.tensor([int(tables[1, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length)])
    keys, values = cache[0][slots].float(), cache[1][slots].float()
    slack = 0.01 if kv_dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(keys, rotated[:, num_heads:], atol=slack, rtol=slack)
    assert torch.equal(values, qkv[:, (num_heads + kv_heads) * dim :].unflatten(1, (-1, dim)).to(kv_dtype).float())
    untouched = torch.ones(21 * BLOCK, dtype=torch.bool)
    untouched[slots] = False
    assert cache[:, untouched].isnan().all()
    for place, out in enumerate(torch.cat(results)):
        expected = reference.attend(rotated[place, :num_heads], keys[: place + 1], values[: place + 1])
        assert torch.allclose(out.view(num_heads, dim), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FEW
@given(outputs=st.integers(1, 100), inputs=st.integers(1, 150))
def test_packing_loses_nothing(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A packed weight holds every number once, and zeros."""
    weight = weight_of(torch.Generator().manual_seed(outputs), outputs, inputs, dtype)
    packed = pack(weight, int8=dtype == torch.int8)
    whole = quantise_rows(weight)[0] if dtype == torch.int8 else weight
    assert torch.equal(reference.unpack(packed), whole)
    assert packed.weight.double().abs().sum() == pytest.approx(whole.double().abs().sum().item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_row_of_8_bits_stays_alone(open_kernels: Open, variant: str) -> None:
    """A row with an infinity or a NaN makes NaN of its own outputs; its neighbours' are as without it, bit for bit."""
    generator = torch.Generator().manual_seed(5)
    x, weight = draw(generator, 6, 90), draw(generator, 40, 90)
    packed, library = pack(weight, int8=True), open_kernels(variant)

    def product(rows: torch.Tensor) -> torch.Tensor:
        room, scale = feed(library, torch.zeros_like(rows), torch.int8)
        out = torch.zeros(len(rows), 40)
        build = builder(library, len(rows), torch.int8)
        build.add(Kind.QUANTISE, inputs=90, input=rows.data_ptr(), output=room.data_ptr(), out_scale=scale.data_ptr())
        build.linear(packed, (room.data_ptr(), scale.data_ptr()), out.data_ptr(), Mode.STORE)
        run(library, build.ops, tokens=len(rows))
        return out

    sound = product(x)
    broken = x.clone()
    broken[1, 7], broken[3, 80], broken[4] = torch.inf, torch.nan, 1e30
    spoilt = product(broken)
    assert spoilt[1].isnan().all()
    assert spoilt[3].isnan().all()
    assert spoilt[4].isfinite().all()
    for row in (0, 2, 5):
        assert torch.equal(spoilt[row], sound[row])
    assert sound.isfinite().all()


def test_a_step_that_names_what_does_not_exist_is_refused(open_kernels: Open) -> None:
    """A slot, row or block beyond the program's memory ends the call before anything is computed."""
    library = open_kernels()
    run(library, [], tokens=2)
    with pytest.raises(AssertionError, match="does not exist"):
        run(library, [], tokens=2, slots=np.array([0, 5_000]))
    with pytest.raises(AssertionError, match="does not exist"):
        run(library, [], tokens=2, rows=np.array([0, -1]))
    for block in (-1, 5_000 // BLOCK, 1 << 60):
        with pytest.raises(ForeignBlockError):
            run(library, [], tokens=2, tables=np.full((2, 3), block))
