"""Engines that have cards, from the plans of their boots. Pure."""

from __future__ import annotations

import re

from appliance.supervisor.boot import BootPlan
from appliance.supervisor.cards.judge import EngineOnCards
from engine.config import EngineConfig
from isolation.ipc.messages import Role

_CARD = re.compile(r"/dev/nvidia(\d{1,3})")


def engine_on_cards(plan: BootPlan, generation: int, pid: int | None, *, boots: bool = False) -> EngineOnCards | None:
    """The engine that a keeper keeps; None for a text sandbox, and for an engine without a card.

    Args:
        plan: of its boot.
        generation: of its sandbox now.
        pid: of the sandbox's process; None while it is not there.
        boots: whether it is being booted now.
    """
    if plan.role is not Role.ENGINE:
        return None
    devices = () if plan.spec.gpu is None else plan.spec.gpu.devices
    found = (_CARD.fullmatch(device.path) for device in devices)
    cards = tuple(sorted(int(match[1]) for match in found if match))
    if plan.card is not None and not cards:
        # Without a sandbox it has no device nodes of its own.
        cards = (plan.card.card,)
    if not cards:
        return None
    return EngineOnCards(
        sandbox=plan.name,
        model=plan.model,
        tenant=plan.tenant,
        generation=generation,
        cards=cards,
        share=EngineConfig.from_json(plan.configuration).gpu_share,
        pids=frozenset() if pid is None else frozenset({pid}),
        boots=boots,
    )
