"""Messages of ``appliance.common.control`` about GPUs."""

from __future__ import annotations

from dataclasses import dataclass

GPU_LOST, GPU_MEMORY = "gpu_lost", "gpu_memory"
"""Why an engine ends because of its GPU: it was lost, or the engine held more than its share of the memory."""


@dataclass(frozen=True, slots=True)
class EngineEnds:
    """Supervisor: it ends an engine now because of its GPU, so that the requests inside are told why. ``SandboxDown``
    follows."""

    model: str
    generation: int
    reason: str
    """``GPU_LOST`` or ``GPU_MEMORY``."""
    card: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class CardState:
    """Supervisor, every few seconds while a model has a GPU: what is known of cards (``appliance.common.cards``), by
    card as text. ``problem``: why nothing is known now; empty while NVML answers."""

    problem: str
    uuids: dict[str, str]
    states: dict[str, str]
    figures: dict[str, dict[str, int]]
    xids: dict[str, dict[str, int]]
    last_xids: dict[str, int]
    models: dict[str, dict[str, list[int]]]
    """Bytes that a model's engines hold, and those that they may."""
    unknown: dict[str, int]
    engines: dict[str, list[str]]
    """Models whose engines have a card."""
    out: dict[str, str]
    """Why a card gets no engine; empty where it may have some."""
    moved: dict[str, int]
    """Engines that got another card since the supervisor's start, by model."""
    unplaced: dict[str, str]
    """Why an engine has no card now, by model."""
