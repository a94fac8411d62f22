"""Between the map to query, key and value and attention, in one pass: heads normalised, rotated, and written.

Queries go to a buffer of their own; keys and values go straight to their slots of the paged cache. A token whose slot
is negative is written nowhere: a graph of launches is made for a bucket, and a step may fill only a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.cuda.kernels.triton_common import EMULATED, narrow, power_of_two
from engine.backends.cuda.runtime.operations import KvLayer, RopeInputs
from engine.model.layers.rotary import Rotary


class _Rotation(NamedTuple):
    """Tables of a step, and the norms of query heads and key heads."""

    cosines: Tensor
    sines: Tensor
    query_gain: Tensor | None
    key_gain: Tensor | None
    eps: float


class _Target(NamedTuple):
    """Memory that heads are written to."""

    queries: tl.tensor
    key_memory: Tensor
    value_memory: Tensor
    slots: Tensor
    key_slot: int
    """Numbers from a token's keys to those of the next token."""
    value_slot: int


@dataclass(frozen=True, slots=True)
class _HeadForm:
    """Facts about heads that are fixed when the kernel is compiled for them."""

    dim: int
    rotated: int
    """Numbers of a head that are rotated; the others stay."""
    half: int
    """Width of a tile of pairs, a power of two."""
    normed: bool
    offset: float
    """Added to gains: 1 where they are published less one."""


@triton.jit
def _head_scale(source: tl.tensor, eps: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    number = tl.arange(0, WIDTH)
    value = tl.load(source + number, mask=number < DIM, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / DIM + eps)


@triton.jit
def _part(
    source: tl.tensor, gain: tl.tensor, number: tl.tensor, live: tl.tensor, scale: tl.tensor, FORM: tl.constexpr
) -> tl.tensor:
    value = tl.load(source + number, mask=live, other=0.0).to(tl.float32)
    if FORM.normed:
        value = value * scale * (tl.load(gain + number, mask=live, other=0.0).to(tl.float32) + FORM.offset)
    return value


@triton.jit
def _turn(
    source: tl.tensor,
    gain: tl.tensor,
    target: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    scale: tl.tensor,
    wanted: tl.tensor,
    FORM: tl.constexpr,
    TYPE: tl.constexpr,
) -> None:
    left = tl.arange(0, FORM.half)
    right = left + FORM.rotated // 2
    live = (left < FORM.rotated // 2) & wanted
    a = _part(source, gain, left, live, scale, FORM)
    b = _part(source, gain, right, live, scale, FORM)
    cos = tl.load(cosines + left, mask=live, other=0.0).to(tl.float32)
    # The sign of the first half is undone by reading the second.
    sin = tl.load(sines + right, mask=live, other=0.0).to(tl.float32)
    tl.store(target + left, narrow(a * cos - b * sin, TYPE), mask=live)
    tl.store(target + right, narrow(b * cos + a * sin, TYPE), mask=live)


@triton.jit
def _rope(
    qkv: tl.tensor,
    qkv_row: tl.tensor,
    out: _Target,
    rotation: _Rotation,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = qkv + token * qkv_row + head * FORM.dim
    slot = tl.load(out.slots + token)
    number = tl.arange(0, WIDTH)
    is_query = head < heads
    if head >= heads + kv_heads:
        address = out.value_memory + slot * out.value_slot + (head - heads - kv_heads) * FORM.dim
        kept = (number < FORM.dim) & (slot >= 0)
        tl.store(address + number, tl.load(source + number, mask=kept, other=0.0), mask=kept)
    else:
        target = out.key_memory + slot * out.key_slot + (head - heads) * FORM.dim
        if is_query:
            target = out.queries + (token * heads + head) * FORM.dim
        wanted = is_query | (slot >= 0)
        gain, scale = rotation.key_gain, rotation.eps
        if FORM.normed:
            if is_query:
                gain = rotation.query_gain
            scale = _head_scale(source, rotation.eps, FORM.dim, WIDTH)
        TYPE: tl.constexpr = out.queries.dtype.element_ty
        cosines, sines = rotation.cosines + token * FORM.rotated, rotation.sines + token * FORM.rotated
        _turn(source, gain, target, cosines, sines, scale, wanted, FORM, TYPE)
        if FORM.rotated < FORM.dim:
            rest = (number >= FORM.rotated) & (number < FORM.dim) & wanted
            tl.store(target + number, narrow(_part(source, gain, number, rest, scale, FORM), TYPE), mask=rest)


@triton.jit(do_not_specialize=("scale",), do_not_specialize_on_alignment=("positions",))
def _rotations(
    positions: tl.tensor,
    frequencies: tl.tensor,
    sign: tl.tensor,
    scale: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    live = number < SIZE
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + number, mask=live, other=0.0)
    factor = tl.load(sign + number, mask=live, other=0.0) * scale
    place = token * SIZE + number
    tl.store(cosines + place, narrow(tl.cos(angle) * scale, cosines.dtype.element_ty), mask=live)
    tl.store(sines + place, narrow(tl.sin(angle) * factor, sines.dtype.element_ty), mask=live)


def rotations(rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, as ``Rotary.tables`` computes them, of a step's positions."""
    sizes = len(positions), 1, rotary.width
    cosines, sines = (torch.empty(sizes, dtype=dtype, device=positions.device) for _ in range(2))
    if len(positions):
        _rotations[(len(positions),)](
            positions,
            rotary.frequencies,
            rotary.sign,
            rotary.scale,
            cosines,
            sines,
            SIZE=rotary.width,
            WIDTH=power_of_two(rotary.width),
            num_warps=1,
        )
    return cosines, sines


def rope_and_write(
    qkv: Tensor, q_out: Tensor, layer: KvLayer, slots: Tensor, turn: RopeInputs, *, early: bool = False
) -> None:
    """Normalise, rotate and write the heads of a step.

    Args:
        qkv: ``(N, H + 2 K, D)``: heads of query, of key and of value, as the fused map gives them.
        q_out: ``(N, H, D)``, contiguous, of the dtype of the cache.
        layer: where keys and values go.
        slots: int64 ``(N,)``, as ``engine.backends.common.block_table`` counts them; negative for none.
        turn: tables of the step, and norms of heads, if they have one.
        early: whether the launch may begin before the one in front of it is over, and the one behind it before its own
            end (programmatic dependent launch, sm_90).
    """
    tokens, all_heads, dim = qkv.shape
    rotated = turn.cosines.shape[-1]
    query_gain, key_gain, eps, offset = None, None, 0.0, False
    if turn.norms is not None:
        query, key = turn.norms
        query_gain, key_gain, eps, offset = query.weight, key.weight, query.eps, query.offset
    early = early and not EMULATED.value
    options: dict[str, object] = {"launch_pdl": True} if early else {}
    if tokens:
        _rope[(tokens, all_heads)](
            qkv,
            qkv.stride(0),
            _Target(q_out, layer.keys, layer.values, slots, layer.keys.stride(1), layer.values.stride(1)),
            _Rotation(turn.cosines, turn.sines, query_gain, key_gain, eps),
            q_out.shape[1],
            layer.heads,
            FORM=_HeadForm(dim, rotated, power_of_two(rotated // 2), query_gain is not None, float(offset)),
            WIDTH=power_of_two(dim),
            EARLY=early,
            num_warps=1,
            **options,
        )
