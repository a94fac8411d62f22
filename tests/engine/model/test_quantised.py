"""Packed weights: every format against a reading of its specification one number at a time, and hostile contents."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.quantised.awq import awq
from engine.model.quantised.codec import Codec, Present, Region, Stored, decode_into
from engine.model.quantised.fp8 import F8, block_scaled, row_scaled
from engine.model.quantised.gptq import Layout, gptq
from engine.model.quantised.grouped import ScaleGrouping, packed_numbers, plain_numbers
from engine.model.quantised.mxfp4 import mxfp4

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class InMemory:
    """A source of tensors that counts what is read of them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.most = 0

    def read(self, suffix: str, begin: int = 0, end: int | None = None, *, lead: int = 1) -> Tensor:
        """Rows of a tensor, a copy as from a file."""
        tensor = self.tensors[suffix]
        rows = tensor.flatten(0, lead - 1)[begin:end] if lead > 1 else tensor if tensor.ndim == 0 else tensor[begin:end]
        self.most = max(self.most, rows.numel())
        return rows.clone()

    def name(self, suffix: str) -> str:
        """As messages show it."""
        return f"'m.{suffix}'"


def present(tensors: dict[str, Tensor]) -> Present:
    """What a file says about tensors."""
    return Present("m", {name: Stored(NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()})


def decoded(codec: Codec, tensors: dict[str, Tensor], shape: tuple[int, int], **options: int) -> Tensor:
    """The whole matrix through slabs."""
    target = torch.full(shape, torch.nan)
    decode_into(codec, InMemory(tensors), target, Region((0, shape[0]), (0, shape[1])), **options)
    return target


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from low to high, high left out."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def pack_rows(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of rows into int32 words, the lowest bits first, written number by number."""
    share = 32 // bits
    words = []
    for row in numbers.tolist():
        row = row + [0] * (-len(row) % share)
        for place in range(0, len(row), share):
            word = sum(int(one) << (bits * index) for index, one in enumerate(row[place : place + share]))
            words.append(struct.unpack("<i", struct.pack("<I", word))[0])
    return torch.tensor(words, dtype=torch.int32).view(len(numbers), -1)


def e4m3(byte: int) -> float:
    """A number of E4M3 by the OCP specification."""
    sign, exponent, fraction = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def e5m2(byte: int) -> float:
    """A number of E5M2: the upper half of an IEEE half."""
    return float(struct.unpack("<e", bytes((0, byte)))[0])


def fp8_bytes(shape: tuple[int, int], kind: str, seed: int = 1) -> Tensor:
    """Random bytes that are finite numbers."""
    values = [one for one in range(256) if math.isfinite((e4m3 if kind == "F8_E4M3" else e5m2)(one))]
    return torch.tensor(values, dtype=torch.uint8)[whole(0, len(values), *shape, seed=seed)]


@pytest.mark.parametrize("kind", sorted(F8))
@pytest.mark.parametrize(("shape", "block"), [((256, 384), (128, 128)), ((200, 130), (128, 128)), ((5, 7), (2, 3))])
def test_fp8_blocks(kind: str, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Block-scaled fp8, cut blocks at the edges included, is the stored number times the scale of its block."""
    stored = fp8_bytes(shape, kind)
    scale = random(-(-shape[0] // block[0]), -(-shape[1] // block[1])).abs()
    tensors = {"weight": stored.view(F8[kind]), "weight_scale_inv": scale}
    codec = block_scaled(present(tensors), shape, block, scale="weight_scale_inv", numbers=tuple(F8))
    number = e4m3 if kind == "F8_E4M3" else e5m2
    table = torch.tensor([number(one) for one in range(256)])
    place = torch.arange(shape[0]).view(-1, 1) // block[0], torch.arange(shape[1]) // block[1]
    expected = table[stored.long()] * scale[place]
    assert torch.equal(decoded(codec, tensors, shape), expected)
    assert torch.equal(decoded(codec, tensors, shape, staging=1), expected)


@pytest.mark.parametrize("form", [(), (1,), (1, 1), (6,), (6, 1)])
def test_fp8_with_a_scale_a_tensor_or_output(form: tuple[int, ...]) -> None:
    """One scale, or one an output: the shape of the scales tells which."""
    stored = fp8_bytes((6, 9), "F8_E4M3")
    scale = random(*form).abs().to(torch.bfloat16)
    tensors = {"weight": stored.view(torch.float8_e4m3fn), "weight_scale": scale}
    codec = row_scaled(present(tensors), (6, 9), scale="weight_scale", numbers=tuple(F8))
    table = torch.tensor([e4m3(one) for one in range(256)])
    spread = scale.float().reshape(-1, 1) if scale.numel() == 6 else scale.float().reshape(1, 1)
    assert torch.equal(decoded(codec, tensors, (6, 9), staging=18), table[stored.long()] * spread)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("reordered", [True, False])
def test_pack_quantized(bits: int, group: int, symmetric: bool, reordered: bool) -> None:
    """compressed-tensors' packed numbers, with and without zero points and activation order, odd sizes included."""
    shape, half = (13, 37), 1 << (bits - 1)
    groups = -(-shape[1] // group) if group else 1
    numbers = whole(-half, half, *shape)
    zeros = whole(-half, half, shape[0], groups, seed=2)
    scale = random(shape[0], groups, seed=3)
    ids = whole(0, groups, shape[1], seed=4) if reordered else torch.arange(shape[1]) // (group or shape[1])
    tensors = {
        "weight_packed": pack_rows(numbers + half, bits),
        "weight_shape": torch.tensor(shape),
        "weight_scale": scale,
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows((zeros + half).t(), bits).t().contiguous()
    if reordered:
        tensors["weight_g_idx"] = ids.int()
    codec = packed_numbers(present(tensors), shape, ScaleGrouping(bits, group, symmetric))
    expected = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            place = row, int(ids[column])
            zero = 0 if symmetric else int(zeros[place])
            expected[row, column] = (int(numbers[row, column]) - zero) * scale[place]
    for staging in (1 << 22, 1):
        assert torch.equal(decoded(codec, tensors, shape, staging=staging), expected)


def test_an_order_of_minus_ones_is_none() -> None:
    """A ``weight_g_idx`` that was never set means groups in order."""
    shape = (4, 16)
    numbers, scale = whole(-8, 8, *shape), random(4, 2)
    tensors = {
        "weight_packed": pack_rows(numbers + 8, 4),
        "weight_shape": torch.tensor(shape),
        "weight_scale": scale,
        "weight_g_idx": torch.full((16,), -1, dtype=torch.int32),
    }
    codec = packed_numbers(present(tensors), shape, ScaleGrouping(4, 8, True))
    assert torch.equal(decoded(codec, tensors, shape), numbers * scale.repeat_interleave(8, 1))


@pytest.mark.parametrize(("group", "single"), [(0, True), (0, False), (4, False)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(group: int, single: bool, symmetric: bool) -> None:
    """int8 as it is, with scales for groups, outputs or everything."""
    shape = (6, 12)
    groups = 3 if group else 1
    numbers = whole(-128, 128, *shape).to(torch.int8)
    form = (1,) if single else (6, groups)
    scale, zeros = random(*form), whole(-128, 128, *form, seed=5).to(torch.int8)
    tensors = {"weight": numbers, "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = zeros
    codec = plain_numbers(present(tensors), shape, ScaleGrouping(8, group, symmetric))
    wide = [one.float().expand(6, 1) if single else one.float() for one in (scale, zeros)]
    scales, offsets = (one.repeat_interleave(12 // one.shape[1], 1) for one in wide)
    expected = (numbers.float() - (0 if symmetric else offsets)) * scales
    assert torch.equal(decoded(codec, tensors, shape), expected)


@pytest.mark.parametrize("group", [0, 8])
def test_awq(group: int) -> None:
    """AWQ's words hold their outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up."""
    outputs, inputs = 24, 16
    groups = inputs // group if group else 1
    numbers, zeros = whole(0, 16, inputs, outputs), whole(0, 16, groups, outputs, seed=2)
    scales = random(groups, outputs, seed=3).to(torch.float16)
    shuffled = [8 * word + place for word in range(outputs // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    tensors = {
        "qweight": pack_rows(numbers[:, shuffled], 4),
        "qzeros": pack_rows(zeros[:, shuffled], 4),
        "scales": scales,
    }
    codec = awq(present(tensors), (outputs, inputs), group)
    ids = torch.arange(inputs) // (group or inputs)
    expected = ((numbers - zeros[ids]) * scales.float()[ids]).t()
    for staging in (1 << 22, 1):
        assert torch.equal(decoded(codec, tensors, (outputs, inputs), staging=staging), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("order", ["none", "plain", "acts"])
@pytest.mark.parametrize("less_one", [True, False])
def test_gptq(bits: int, order: str, less_one: bool) -> None:
    """GPTQ without group ids, with them in order and with activation order; zero points less one wrap to their bits."""
    outputs, inputs, group = 32, 64, 16
    numbers, zeros = whole(0, 1 << bits, inputs, outputs), whole(0, 1 << bits, inputs // group, outputs, seed=2)
    zeros[0, 0] = 0
    scales = random(inputs // group, outputs, seed=3).to(torch.float16)
    ids = torch.arange(inputs) // group
    if order == "acts":
        ids = ids[torch.randperm(inputs, generator=torch.Generator().manual_seed(4))]
    stored = (zeros - 1) % (1 << bits) if less_one else zeros
    tensors = {
        "qweight": pack_rows(numbers.t(), bits).t().contiguous(),
        "qzeros": pack_rows(stored, bits),
        "scales": scales,
    }
    if order != "none":
        tensors["g_idx"] = ids.int()
    codec = gptq(present(tensors), (outputs, inputs), Layout(bits, group, less_one))
    expected = torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            place = int(ids[column]), row
            expected[row, column] = (int(numbers[column, row]) - int(zeros[place])) * scales[place].float()
    for staging in (1 << 22, 1):
        assert torch.equal(decoded(codec, tensors, (outputs, inputs), staging=staging), expected)


def test_mxfp4_as_the_reference_decodes_it() -> None:
    """gpt-oss' experts: the numbers that transformers decodes, which stores them the other way round."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = {
        "gate_up_proj_blocks": whole(0, 256, 3, 10, 2, 16).to(torch.uint8),
        "gate_up_proj_scales": whole(100, 140, 3, 10, 2, seed=1).to(torch.uint8),
    }
    reference = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32).transpose(1, 2).flatten(0, 1)
    codec = mxfp4(present(tensors), "gate_up_proj", (3, 10, 64))
    for staging in (1 << 22, 1):
        assert torch.equal(decoded(codec, tensors, (30, 64), staging=staging), reference)


def example(name: str) -> tuple[Callable[[dict[str, Tensor]], Codec], dict[str, Tensor], tuple[int, int]]:
    """A small matrix of each format: how its codec is made, its tensors, its shape."""
    shape = (32, 64)
    if name == "fp8":
        tensors = {
            "weight": fp8_bytes(shape, "F8_E4M3").view(torch.float8_e4m3fn),
            "weight_scale_inv": torch.ones(2, 4),
        }
        return (
            lambda t: block_scaled(present(t), shape, (16, 16), scale="weight_scale_inv", numbers=tuple(F8)),
            tensors,
            shape,
        )
    if name == "packed":
        tensors = {
            "weight_packed": pack_rows(whole(0, 16, *shape), 4),
            "weight_shape": torch.tensor(shape),
            "weight_scale": torch.ones(32, 4),
            "weight_g_idx": torch.arange(64).int() // 16,
        }
        return lambda t: packed_numbers(present(t), shape, ScaleGrouping(4, 16, True)), tensors, shape
    if name == "awq":
        tensors = {
            "qweight": pack_rows(whole(0, 16, 64, 32), 4),
            "qzeros": pack_rows(whole(0, 16, 4, 32), 4),
            "scales": torch.ones(4, 32),
        }
        return lambda t: awq(present(t), shape, 16), tensors, shape
    if name == "gptq":
        tensors = {
            "qweight": pack_rows(whole(0, 16, 32, 64), 4).t().contiguous(),
            "qzeros": pack_rows(whole(0, 16, 4, 32), 4),
            "scales": torch.ones(4, 32),
            "g_idx": torch.arange(64).int() // 16,
        }
        return lambda t: gptq(present(t), shape, Layout(4, 16, True)), tensors, shape
    tensors = {
        "down_proj_blocks": whole(0, 256, 2, 16, 2, 16).to(torch.uint8),
        "down_proj_scales": whole(120, 130, 2, 16, 2).to(torch.uint8),
    }
    return lambda t: mxfp4(present(t), "down_proj", (2, 16, 64)), tensors, shape


FORMATS = ("fp8", "packed", "awq", "gptq", "mxfp4")


@pytest.mark.parametrize("name", FORMATS)
def test_any_rectangle_is_the_same_as_of_the_whole(name: str) -> None:
    """A part of a matrix, as a rank of several loads it, has the numbers of the whole in it."""
    make, tensors, shape = example(name)
    codec = make(tensors)
    full = decoded(codec, tensors, shape)
    for rows, columns in (((0, 32), (0, 64)), ((7, 19), (0, 64)), ((0, 32), (21, 43)), ((5, 6), (63, 64))):
        for staging in (1, 200, 1 << 22):
            target = torch.full((rows[1] - rows[0], columns[1] - columns[0]), torch.nan)
            decode_into(codec, InMemory(tensors), target, Region(rows, columns), staging=staging)
            assert torch.equal(target, full[rows[0] : rows[1], columns[0] : columns[1]]), (rows, columns, staging)


@pytest.mark.parametrize("name", FORMATS)
def test_no_tensor_of_numbers_is_read_whole(name: str) -> None:
    """With a small staging the largest read of a matrix's numbers is a small part of them."""
    make, tensors, shape = example(name)
    numbers = max(tensors.values(), key=lambda one: one.numel() * one.itemsize)
    source = InMemory(tensors)
    decode_into(make(tensors), source, torch.empty(shape), Region((0, 32), (0, 64)), staging=1)
    assert source.most <= max(numbers.numel() // 2, *(one.numel() for one in tensors.values() if one is not numbers))


SCALE_OF = {"fp8": "weight_scale_inv", "packed": "weight_scale", "awq": "scales", "gptq": "scales"}


@pytest.mark.parametrize("name", SCALE_OF)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    """NaN and infinity among the scales: the message names the tensor."""
    make, tensors, shape = example(name)
    tensors[SCALE_OF[name]].view(-1)[-1] = value
    with pytest.raises(ModelLoadError, match=rf"m\.{SCALE_OF[name]}"):
        decoded(make(tensors), tensors, shape)


def test_other_numbers_without_meaning_are_refused_by_name() -> None:
    """A NaN among fp8 numbers, an exponent of 255, group ids out of range, a false shape, a number beyond the dtype."""
    make, tensors, shape = example("fp8")
    tensors["weight"].view(torch.uint8)[3, 4] = 0x7F
    with pytest.raises(ModelLoadError, match=r"m\.weight' holds a number that is not finite"):
        decoded(make(tensors), tensors, shape)
    make, tensors, shape = example("mxfp4")
    tensors["down_proj_scales"][1, 2, 1] = 255
    with pytest.raises(ModelLoadError, match=r"m\.down_proj_scales"):
        decoded(make(tensors), tensors, shape)
    for name, key in (("gptq", "g_idx"), ("packed", "weight_g_idx")):
        for value in (4, -2, 2**31 - 1):
            make, tensors, shape = example(name)
            tensors[key][40] = value
            with pytest.raises(ModelLoadError, match=rf"m\.{key}"):
                decoded(make(tensors), tensors, shape)
    make, tensors, shape = example("packed")
    tensors["weight_shape"] = torch.tensor([64, 32])
    with pytest.raises(ModelLoadError, match=r"m\.weight_shape"):
        decoded(make(tensors), tensors, shape)
    make, tensors, shape = example("packed")
    tensors["weight_scale"][0, 0] = 1e5
    assert decoded(make(tensors), tensors, shape).isfinite().all()
    with pytest.raises(ModelLoadError, match="float16"):
        decode_into(make(tensors), InMemory(tensors), torch.empty(shape, dtype=torch.float16), Region((0, 32), (0, 64)))


@pytest.mark.parametrize("name", FORMATS)
def test_missing_misshaped_and_mistyped_parts_are_refused_by_name(name: str) -> None:
    """Each tensor of a format is asked for with its dtype and shape before anything is read."""
    make, tensors, _shape = example(name)
    for key in tensors:
        if key not in ("g_idx", "weight_g_idx"):
            with pytest.raises(ModelLoadError, match=rf"lacks 'm\.{key}'"):
                make({other: one for other, one in tensors.items() if other != key})
        with pytest.raises(ModelLoadError, match=rf"'m\.{key}' has shape"):
            make(
                {
                    **tensors,
                    key: torch.cat((tensors[key].view(torch.uint8), tensors[key].view(torch.uint8))).view(
                        tensors[key].dtype
                    ),
                }
            )
        with pytest.raises(ModelLoadError, match=rf"'m\.{key}' is "):
            make(
                {
                    **tensors,
                    key: torch.zeros(tensors[key].shape, dtype=torch.float8_e5m2 if name != "fp8" else torch.int32),
                }
            )
