"""Matrices in 8 bits: rows rounded behind their norm, and products of few rows, against their specifications."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.lines import LineCut, Map
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.kernels.scaled_rows import round_rows
from engine.model.layers import scaled
from engine.model.layers.layers import Linear, Memory, RmsNorm, silu_mul
from tests.engine.backends.cuda.kernels.support import COUNTS, PLACE, assert_within, for_each, noise, poisoned
from tests.engine.backends.cuda.kernels.test_few_rows import BF16, CASES, EPS, Case, wanted

pytestmark = pytest.mark.usefixtures("place")


def drawn(case: Case) -> tuple[Tensor, Map, Map, Tensor]:
    """Rows, the matrix in 8 bits, the same numbers in float64's reach, and what is added to."""
    x, given, before = case.drawn()
    numbers, scale = scaled.round_rows(given.weight)
    flat = scale.squeeze(1).contiguous()
    wide = (numbers.double() * scale.double()).float()
    return x, given._replace(weight=numbers, scale=flat), given._replace(weight=wide), before


@pytest.mark.parametrize("alone", [False, True], ids=["rows", "one row"])
@pytest.mark.parametrize("count", COUNTS)
def test_products_of_few_rows_are_those_of_float64(count: int, alone: bool) -> None:
    """By tensor cores and, of one row, by sums of threads: what the stored numbers and their scales give in float64,
    with norms, biases, gates and sums around it."""

    def check(case: Case) -> None:
        if alone:
            case = replace(case, rows=1)
        x, given, plain, before = drawn(case)
        target, bound = wanted(case, x, plain, before)
        out = before.clone() if case.adds else poisoned(len(x), case.outputs, dtype=BF16)
        shape = replace(case.shape, alone=LineCut(4, 1) if alone else None)
        offset = case.offset and case.normed
        gemv.few_rows(x, given, out, case.scratch(), shape, gate=case.kind, offset=offset, adds=case.adds)
        assert_within(out, target, bound)

    for_each(count, CASES, check)


@pytest.mark.parametrize("normed", [False, True])
def test_rows_are_rounded_as_the_specification_rounds(normed: bool) -> None:
    """The same numbers and scales, bit for bit without a norm; behind one within a rounding of what it gives. A row of
    zeros, one with a number of every size, and one that is broken, which spoils no other."""
    generator = torch.Generator().manual_seed(4)
    x = noise(generator, 7, 300, dtype=BF16)
    x[1] = 0.0
    x[2] *= torch.exp2(torch.randint(-40, 40, (300,), generator=generator).float()).to(x)
    x[3, 5], x[4, 7] = torch.nan, torch.inf
    norm = RmsNorm(300, EPS, Memory(BF16, PLACE))
    norm.weight.copy_(noise(generator, 300, dtype=BF16))
    numbers = torch.empty(7, 300, dtype=scaled.E4M3, device=PLACE)
    scales = poisoned(7, 1, dtype=torch.float32)
    round_rows(x, numbers, scales, gain=norm.weight if normed else None, eps=EPS)
    # By a processor: a GPU's torch multiplies with the reciprocal of a number that it divides by.
    target, target_scales = (one.to(PLACE) for one in scaled.round_rows((norm(x) if normed else x).cpu()))
    assert target_scales[3:5].isnan().all()
    assert scales[3:5].isnan().all()
    good = [0, 1, 2, 5, 6]
    if not normed:
        assert torch.equal(scales[good], target_scales[good])
        assert torch.equal(numbers[good].float(), target[good].float())
        return
    found, asked = (a[good].double() * b[good].double() for a, b in ((numbers, scales), (target, target_scales)))
    # A last bit of bfloat16 may send a number to the next one of E4M3, an eighth away.
    largest = asked.abs().amax(1, keepdim=True)
    assert ((found - asked).abs() <= asked.abs() / 7 + largest / 448).all()
    assert ((found - asked).abs() > largest / 448).double().mean() < 0.01


def test_every_number_of_e4m3_is_rounded_to_itself() -> None:
    """All 254 finite numbers, and the ties between neighbours, which go to the even one."""
    bits = torch.arange(256, dtype=torch.uint8)
    every = bits.view(scaled.E4M3).float()
    every = every[every.isfinite()].unique()
    ties = ((every[1:] + every[:-1]) / 2).tolist()
    x = torch.tensor([every.tolist() + ties])
    numbers = torch.empty(x.shape, dtype=scaled.E4M3, device=PLACE)
    scales = poisoned(1, 1, dtype=torch.float32)
    round_rows(x, numbers, scales)
    assert scales.item() == 1.0
    assert torch.equal(numbers.float()[0, : len(every)], every)
    assert torch.equal(numbers.float(), x.to(scaled.E4M3).float())


@pytest.mark.parametrize("rows", [3, 20])
def test_operations_compute_what_the_map_does(rows: int) -> None:
    """Few rows are taken as they are, many are rounded: norm, product, gate and sum of the device's operations are
    those of the map itself. Control: the other way gives other numbers."""
    generator = torch.Generator().manual_seed(8)
    run = kernel_operations((2, 1), 16, 64, PLACE)
    memory = Memory(BF16, PLACE, scaled=True)
    linear = Linear.scaled(64, 96, bias=True, memory=memory)
    assert linear.scale is not None
    assert linear.bias is not None
    numbers, scale = scaled.round_rows(noise(generator, 96, 64))
    linear.loaded.copy_(numbers)
    linear.scale.copy_(scale.squeeze(1))
    linear.bias.copy_(noise(generator, 96, dtype=BF16))
    norm = RmsNorm(64, EPS, memory)
    norm.weight.copy_(noise(generator, 64, dtype=BF16))
    x = noise(generator, rows, 64, dtype=BF16)
    asked = linear(norm(x))
    found = run.project(x, linear, norm)
    # Where rows are rounded, a last bit of bfloat16 may send a number to the next one of E4M3.
    bound = 0.02 if rows <= scaled.FEW else 0.3
    assert (found.double() - asked.double()).abs().max() < bound * asked.double().abs().max()
    gated = run.project_gated(x, linear, norm, silu_mul)
    assert (gated.double() - silu_mul(asked).double()).abs().max() < bound * silu_mul(asked).double().abs().max()
    stream = noise(generator, rows, 96, dtype=BF16)
    target = stream + linear(x)
    run.project_onto(x, linear, stream)
    assert (stream.double() - target.double()).abs().max() < bound * target.double().abs().max()
    plain = scaled.multiply_few(norm(x), linear.loaded, linear.scale, linear.bias)
    assert torch.equal(asked, plain) == (rows <= scaled.FEW)
