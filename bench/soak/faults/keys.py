"""Tenants' keys are destroyed, or renewed, while the tenants use them."""

from __future__ import annotations

from bench.soak.errors import BreachError
from bench.soak.ground import Fault, Ground
from bench.soak.served import TENANTS

ROUNDS = 8


async def _shred(ground: Ground) -> None:
    for _ in range(ROUNDS):
        answer = await ground.tell_operator({"do": "shred", "tenant": ground.draw.choice(TENANTS)})
        if not answer.get("ok"):
            raise BreachError(f"a shred was refused: {answer}")
        await ground.last(0.1, 0.8)


FAULTS = (Fault("keys-shred", "tenants' keys are destroyed by turns", _shred),)
