"""Between the map to query, key and value and attention, in one pass: heads normalised, rotated, and written.

Queries go to a buffer of their own; keys and values go straight to their slots of the paged cache. A token whose slot
is negative is written nowhere: a graph of launches is made for a bucket, and a step may fill only a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.attention_tile import PagedLayer
from engine.kernels.gpu.dialect import narrow, power_of_two


@dataclass(frozen=True, slots=True)
class Rotation:
    """How heads are rotated in one layer."""

    cosines: Tensor
    """``(N, width)`` or ``(N, 1, width)``, as ``engine.model.rotary`` makes them; ``width`` numbers of a head are
    rotated, the others stay."""
    sines: Tensor
    """The same, with the sign of the first half."""
    neighbours: bool = False
    """Whether pairs are published side by side; they come out half a width apart, as ``pairs_apart`` leaves them."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norms of query heads and of key heads."""

    query_gain: Tensor
    key_gain: Tensor
    eps: float
    offset: bool = False
    """Whether gains are published less one."""


@triton.jit
def _head_scale(source: tl.tensor, eps: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    number = tl.arange(0, WIDTH)
    value = tl.load(source + number, mask=number < DIM, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / DIM + eps)


@triton.jit
def _part(
    source: tl.tensor,
    gain: tl.tensor,
    number: tl.tensor,
    live: tl.tensor,
    scale: tl.tensor,
    OFFSET: tl.constexpr,
    NORMED: tl.constexpr,
) -> tl.tensor:
    value = tl.load(source + number, mask=live, other=0.0).to(tl.float32)
    if NORMED:
        value = value * scale * (tl.load(gain + number, mask=live, other=0.0).to(tl.float32) + OFFSET)
    return value


@triton.jit
def _rope(
    qkv: tl.tensor,
    q_out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_gain: tl.tensor,
    key_gain: tl.tensor,
    eps: tl.tensor,
    qkv_row: tl.tensor,
    key_slot: tl.tensor,
    value_slot: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    source = qkv + token * qkv_row + head * DIM
    slot = tl.load(slots + token)
    number = tl.arange(0, WIDTH)
    is_query = head < heads
    if head >= heads + kv_heads:
        address = values + slot * value_slot + (head - heads - kv_heads) * DIM
        kept = (number < DIM) & (slot >= 0)
        tl.store(address + number, tl.load(source + number, mask=kept, other=0.0), mask=kept)
    else:
        target = keys + slot * key_slot + (head - heads) * DIM
        if is_query:
            target = q_out + (token * heads + head) * DIM
        wanted = is_query | (slot >= 0)
        gain = key_gain
        if is_query:
            gain = query_gain
        scale = eps
        if NORMED:
            scale = _head_scale(source, eps, DIM, WIDTH)
        pair = tl.arange(0, HALF)
        live = (pair < ROTATED // 2) & wanted
        if NEIGHBOURS:
            left, right = 2 * pair, 2 * pair + 1
        else:
            left, right = pair, pair + ROTATED // 2
        a = _part(source, gain, left, live, scale, OFFSET, NORMED)
        b = _part(source, gain, right, live, scale, OFFSET, NORMED)
        angle = token * ROTATED + pair
        cos = tl.load(cosines + angle, mask=live, other=0.0).to(tl.float32)
        # The sign of the first half is undone by reading the second.
        sin = tl.load(sines + angle + ROTATED // 2, mask=live, other=0.0).to(tl.float32)
        TYPE: tl.constexpr = q_out.dtype.element_ty
        tl.store(target + pair, narrow(a * cos - b * sin, TYPE), mask=live)
        tl.store(target + pair + ROTATED // 2, narrow(b * cos + a * sin, TYPE), mask=live)
        if ROTATED < DIM:
            rest = (number >= ROTATED) & (number < DIM) & wanted
            tl.store(target + number, narrow(_part(source, gain, number, rest, scale, OFFSET, NORMED), TYPE), mask=rest)


def rope_and_write(
    qkv: Tensor, q_out: Tensor, layer: PagedLayer, slots: Tensor, rotation: Rotation, norm: HeadNorm | None = None
) -> None:
    """Normalise, rotate and write the heads of a step.

    Args:
        qkv: ``(N, H + 2 K, D)``: heads of query, of key and of value, as the fused map gives them.
        q_out: ``(N, H, D)``, contiguous, of the dtype of the cache.
        layer: where keys and values go.
        slots: int64 ``(N,)``, as ``engine.kv.block_table`` counts them; negative for none.
        rotation: tables of the step.
        norm: of heads, if they have one.
    """
    tokens, all_heads, dim = qkv.shape
    heads, kv_heads = q_out.shape[1], layer.heads
    rotated = rotation.cosines.shape[-1]
    if tokens:
        _rope[(tokens, all_heads)](
            qkv,
            q_out,
            layer.keys,
            layer.values,
            slots,
            rotation.cosines,
            rotation.sines,
            qkv if norm is None else norm.query_gain,
            qkv if norm is None else norm.key_gain,
            0.0 if norm is None else norm.eps,
            qkv.stride(0),
            layer.keys.stride(1),
            layer.values.stride(1),
            heads,
            kv_heads,
            DIM=dim,
            WIDTH=power_of_two(dim),
            ROTATED=rotated,
            HALF=power_of_two(rotated // 2),
            NEIGHBOURS=rotation.neighbours,
            NORMED=norm is not None,
            OFFSET=float(norm is not None and norm.offset),
            num_warps=1,
        )


def reference(
    qkv: Tensor, heads: int, kv_heads: int, rotation: Rotation, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: queries, keys and values of every token, in float64."""
    wide = qkv.double()
    q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
    if norm is not None:
        q, k = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norm.eps) * (gain.double() + float(norm.offset))
            for part, gain in ((q, norm.query_gain), (k, norm.key_gain))
        )
    return _turned(q, rotation), _turned(k, rotation), v


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    width = rotation.cosines.shape[-1]
    cos = rotation.cosines.double().view(len(x), 1, width)[..., : width // 2]
    sin = rotation.sines.double().view(len(x), 1, width)[..., width // 2 :]
    turning, rest = x[..., :width], x[..., width:]
    pairs = (turning[..., 0::2], turning[..., 1::2]) if rotation.neighbours else turning.chunk(2, -1)
    left, right = pairs
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)
