"""Simulate a fleet: ``python -m bench.simulation [SCENARIO ...]``; see ``docs/fleet.md`` and ``bench/README.md``.

Scenarios run one after the other in one process; ``--json`` is written after each, so that a command that is stopped
leaves what it had. Exit status 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.simulation.report import NOTE, show, write
from bench.simulation.scenarios import SCENARIOS, Settings, World
from bench.simulation.step_times import CARDS

MAIN = ("named", "spread", "split", "deaths", "picker", "noisy", "heavy", "limits")
"""Scenarios of a command that names none."""


def main() -> int:
    """Run what was asked for."""
    asked = arguments()
    settings = Settings(
        times=CARDS[asked.card],
        **{one.name: getattr(asked, one.name) for one in fields(Settings) if one.name != "times"},
    )
    console, world = Console(), World()
    document = begun(settings, asked.append)
    for name in asked.scenarios or MAIN:
        for title, found in SCENARIOS[name](world, settings):
            document["runs"][title] = found
            document["traces"] = world.traces
            console.print(f"{title}: {found['processor_s']:.0f} s of processor time", style="dim")
            if asked.json is not None:
                write(asked.json, document)
    if asked.plots is not None:
        from bench.simulation.plots import draw  # matplotlib is an extra

        draw(document, asked.plots)
    show(console, document)
    return 0


def begun(settings: Settings, earlier: Path | None) -> dict[str, Any]:
    """Return the document of a command that has run nothing yet, with the runs of an earlier one where asked for."""
    told = {one.name: getattr(settings, one.name) for one in fields(Settings) if one.name not in ("times", "folder")}
    told |= {"card": settings.times.name, "source": settings.times.source}
    runs = json.loads(earlier.read_text())["runs"] if earlier is not None else {}
    return {"what": NOTE, "settings": told, "runs": runs, "traces": {}}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO", help=", ".join(SCENARIOS))
    default = Settings()
    for one in fields(Settings):
        if one.name in ("times", "folder", "trace"):
            continue
        value = getattr(default, one.name)
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(value), default=value, help=f"{value:g}")
    parser.add_argument("--trace", choices=("mooncake", "azure", "invented"), default=default.trace)
    parser.add_argument("--folder", type=Path, default=default.folder, help="where the published traces are")
    parser.add_argument("--card", choices=CARDS, default=default.times.name)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plots", type=Path, help="folder for the plots; needs matplotlib")
    parser.add_argument("--append", type=Path, help="figures of an earlier command with the same sizes, kept beside")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
