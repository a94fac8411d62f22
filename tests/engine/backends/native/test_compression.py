"""Compressed bfloat16 weights: the same bits, and the same results to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.native.abi import Kind, Mode
from engine.backends.native.compression import MOST_PANEL_BYTES, compress
from engine.backends.native.library import Library
from engine.backends.native.packing import Packed, pack
from tests.engine.backends.native import reference
from tests.engine.backends.native.test_operations import VARIANTS, builder, feed, run

FEW = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

Open = Callable[..., Library]


def trained(outputs: int, inputs: int, *, odd: int = 0) -> torch.Tensor:
    """A weight with few exponents, and ``odd`` numbers that no palette holds: zeros of both signs, extremes, NaN."""
    generator = torch.Generator().manual_seed(outputs * inputs + odd)
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).to(torch.bfloat16)
    strange = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-40, float("inf"), float("nan")]).to(torch.bfloat16)
    places = torch.randint(weight.numel(), (odd,), generator=generator)
    weight.view(-1)[places] = strange[torch.arange(odd) % len(strange)]
    return weight


def compressed(library: Library, packed: Packed) -> Packed:
    """The weight compressed."""
    result = compress(library, packed)
    assert result.compression is not None
    return result


@FEW
@given(outputs=st.integers(1, 200), inputs=st.integers(32, 300), odd=st.integers(0, 50))
def test_every_bit_comes_back(open_kernels: Open, outputs: int, inputs: int, odd: int) -> None:
    """What is compressed has three quarters of the bytes and expands to the same bits, NaN and signs of zeros too."""
    packed = pack(trained(outputs, inputs, odd=odd % (outputs * inputs // 200 + 1)))
    small = compressed(open_kernels(), packed)
    assert small.weight.nbytes == packed.weight.nbytes * 3 // 4
    assert torch.equal(reference.expand(small).weight.view(torch.int16), packed.weight.view(torch.int16))


def test_what_does_not_pay_stays_as_it_is(open_kernels: Open) -> None:
    """Weights of all exponents, of other dtypes, or with rows longer than a thread's scratch are left alone."""
    library = open_kernels()
    wild = torch.arange(-32_768, 32_768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for packed in (
        pack(wild),
        pack(trained(32, 64).float()),
        pack(trained(32, 64), int8=True),
        pack(torch.zeros(1, MOST_PANEL_BYTES // 64 + 32, dtype=torch.bfloat16)),
    ):
        assert compress(library, packed) is packed


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 13, 16, 17, 32, 33, 40])
def test_products_are_the_same_bits(open_kernels: Open, variant: str, rows: int) -> None:
    """A compressed weight gives what the stored one gives, bit for bit, whatever the number of rows."""
    library, inputs, outputs = open_kernels(variant), 205, 75
    generator = torch.Generator().manual_seed(rows)
    packed = pack(
        trained(outputs, inputs, odd=40).nan_to_num(0.5, 3.0, -3.0), torch.randn(outputs, generator=generator)
    )
    room, scale = feed(library, torch.randn(rows, inputs, generator=generator), torch.bfloat16)
    results = []
    for weight in (packed, compressed(library, packed)):
        out = torch.zeros(rows, outputs)
        build = builder(library, rows, torch.bfloat16)
        build.linear(weight, (room.data_ptr(), scale.data_ptr()), out.data_ptr(), Mode.STORE)
        run(library, build.ops, tokens=rows)
        results.append(out)
    assert results[0].any()
    assert torch.equal(*results)


def test_an_embedding_reads_the_compressed_head(open_kernels: Open) -> None:
    """A table shared with the head gives the rows of its tokens exactly."""
    library, vocab, width = open_kernels(), 700, 77
    table = trained(vocab, width, odd=60).nan_to_num(0.5, 3.0, -3.0)
    packed = compressed(library, pack(table))
    tokens = torch.randint(vocab, (9,), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(len(tokens), width)
    build = builder(library, len(tokens), torch.bfloat16)
    build.add(
        Kind.EMBED,
        dtype=packed.dtype,
        mode=Mode.ADD,
        outputs=width,
        weight=build.keep(packed.weight),
        output=out.data_ptr(),
        **build.addresses(packed),
    )
    run(library, build.ops, tokens=len(tokens), token_ids=tokens.numpy())
    assert torch.equal(out, table[tokens].float())


def test_the_palette_is_bounded_by_the_room_for_patches(open_kernels: Open) -> None:
    """The library stops, and writes nothing behind the room it was given, when there are more patches than that."""
    library = open_kernels()
    packed = pack(trained(64, 64, odd=30))
    chunks = packed.weight.numel() // 1_024
    palette = torch.zeros(16, dtype=torch.uint8)
    numbers, starts = torch.zeros(chunks * 1_536, dtype=torch.uint8), torch.zeros(chunks + 1, dtype=torch.int32)
    patches = torch.full((8,), -1, dtype=torch.int32)
    parts = [one.data_ptr() for one in (palette, numbers, starts, patches)]
    count = library.compress(packed.weight.data_ptr(), chunks, parts, 4)
    assert count == -1
    assert (patches[4:] == -1).all()
