"""``athanor`` with a supervisor that sees two pretended NVIDIA cards: ``python tests/system/carded.py FOLDER demo ...``

FOLDER is a machine as ``tests/appliance/supervisor/cards`` makes one: its files say what the cards tell. Engines see
none and compute on the processor; which card each is given, and what becomes of it, is the supervisor's own doing.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def see_cards(folder: Path) -> None:
    """Let this process find driver, library and cards in the folder, and read them twice a second."""
    from appliance.supervisor import gpu, service
    from appliance.supervisor.cards.watch import WatchPace, watch_cards
    from isolation.gpu.gpu_facts import GpuFacts, Places, look_at_gpus
    from tests.appliance.common.cards import machine

    places = Places(proc=folder / "proc", libraries=(folder / "lib",), dev=folder / "dev")

    def look() -> GpuFacts:
        # Device nodes need root.
        seen = machine(2)
        return replace(look_at_gpus(places), nodes=seen.nodes, models=seen.models)

    gpu.look_at_gpus = look  # type: ignore[attr-defined]
    service.watch_cards = functools.partial(watch_cards, places=places, pace=WatchPace(period_s=0.5))  # type: ignore[attr-defined]


if __name__ == "__main__":
    place, *rest = sys.argv[1:]
    if rest[0] == "appliance.operator.child":
        see_cards(Path(place))
        from appliance.operator import child

        sys.exit(child.main(rest[1:]))
    from tests.system.clocked import launch

    launch(str(Path(__file__).resolve()), [place], rest, "supervisor")
