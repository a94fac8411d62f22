"""How much of a card's memory an engine takes for KV: what its share leaves once that of the weights is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ConfigurationError

RESERVE_BYTES = 1 << 30
"""Left for what comes after KV: activations of a step, the pool of recorded steps, workspaces of libraries. An
estimate, which no card has confirmed."""

CONTEXT_BYTES = 512 << 20
"""That CUDA holds for a process beside what torch has asked for: its context and loaded code. An estimate as well."""

MOST_SHARE = 95
"""Percent: the driver keeps some of every card for itself."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes of a card."""

    total: int
    free: int
    """That nobody holds now."""
    held: int
    """That this process holds."""


def kv_bytes_of(card: CardMemory, share: int) -> int:
    """Bytes for KV, spare blocks included.

    Args:
        card: as it is once the weights' memory is taken.
        share: percent of all its memory that this engine may hold.

    Raises:
        ConfigurationError: the share is out of range, or weights and reserve leave nothing of it.
    """
    if not 1 <= share <= MOST_SHARE:
        raise ConfigurationError(f"gpu_share is {share}; it must be 1 to {MOST_SHARE} percent")
    allowed = card.total * share // 100 - card.held
    left = min(allowed, card.free) - RESERVE_BYTES
    if left <= 0:
        raise ConfigurationError(
            f"nothing is left for KV on the GPU: of {_mib(card.total)} this engine may hold {share} % and holds "
            f"{_mib(card.held)} already, {_mib(card.free)} are free, and {_mib(RESERVE_BYTES)} stay in reserve; raise "
            "gpu_share, put fewer models on the card, or take a smaller model"
        )
    return left


def check_room(card: CardMemory, share: int, weights: int) -> None:
    """Check that a card has room for weights, before any of it is taken.

    Args:
        card: as it is without them.
        share: percent of all its memory that this engine may hold; 0: all that is free.
        weights: their bytes.

    Raises:
        ConfigurationError: it has not.
    """
    left = min(card.free, card.total * share // 100 - card.held) if share else card.free
    if weights > left:
        held = f"of {_mib(card.total)} this engine may hold {share} %, and " if share else ""
        raise ConfigurationError(
            f"the weights take {_mib(weights)} and the GPU has room for {_mib(max(left, 0))}: {held}"
            f"{_mib(card.free)} are free; put fewer models on the card, raise gpu_share, or take a smaller model"
        )


def read_card(device: torch.device) -> CardMemory:
    """The memory of the card that a process computes on."""
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(total, free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"
