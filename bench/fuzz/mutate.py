"""Inputs made from good ones: bytes changed anywhere, or one value of a document put in the place of another."""

from __future__ import annotations

import json
import random
from typing import Any

from appliance.selftest.fuzzed_requests import mutated, value

MAX_BYTES = 1 << 18


def made_from(seed: bytes, draw: random.Random) -> bytes:
    """One input, decided by the generator alone."""
    if draw.random() < 0.7:
        try:
            document = json.loads(seed)
        except ValueError:
            return mutated(seed, draw)[:MAX_BYTES]
        for _ in range(draw.choice((1, 1, 2, 4))):
            document = changed(document, draw)
        return json.dumps(document).encode("utf-8", "replace")
    return mutated(seed, draw)[:MAX_BYTES]


def changed(document: Any, draw: random.Random) -> Any:
    """The document with one of its values replaced, taken out, doubled or put under another name."""
    if isinstance(document, dict) and document and draw.random() < 0.85:
        name = draw.choice(list(document))
        copy = dict(document)
        match draw.randrange(6):
            case 0:
                del copy[name]
            case 1:
                copy[name] = value(draw)
            case 2:
                copy[str(value(draw))[:40]] = copy[name]
            case _:
                copy[name] = changed(copy[name], draw)
        return copy
    if isinstance(document, list) and document and draw.random() < 0.85:
        at = draw.randrange(len(document))
        copy_of = list(document)
        copy_of[at] = changed(copy_of[at], draw)
        return copy_of * draw.choice((1, 1, 1, 2))
    return value(draw)
