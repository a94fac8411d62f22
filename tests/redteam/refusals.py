"""What readers of foreign bytes take and refuse: ``python -O -m tests.redteam.refusals`` says it without asserts."""

from __future__ import annotations

import json
import random
from typing import Any


def refusals() -> dict[str, Any]:
    """Whether each reader took each of some changed inputs, the same in every process, and whether asserts are on."""
    from bench.fuzz.mutate import made_from
    from bench.fuzz.targets import TARGETS

    found = {}
    for name, target in TARGETS.items():
        draws = [random.Random(number) for number in range(2 if name == "tokenizer.json" else 25)]
        found[name] = [target(made_from(draw.choice(target.seeds), draw)) for draw in draws]
    return {"debug": __debug__, "found": found}


if __name__ == "__main__":
    print(json.dumps(refusals()))
