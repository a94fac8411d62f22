"""Which traces go to the collector: the operator's rule, which no caller can bend.

A caller chooses its trace id, so a rule that reads the id would let it choose. The id is hashed under a key of this
process, so that the requests of one trace share a fate that nobody outside can know; and the draw is repeated every
minute, so that a caller that found one good id, or one that hides, gains no more than that.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

DRAW_S = 60
"""A trace's fate holds for this long: longer than most traces, short beside a flood."""


class Sampler:
    """Takes ``ratio`` of all traces, and all those in which we failed unless ``ratio`` is 0."""

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bound = round(ratio * (1 << 64))
        self._key = secrets.token_bytes(16)
        self._clock = clock

    def takes(self, trace_id: int, *, failed: bool = False) -> bool:
        """Whether this trace goes; asked once a request, at its end."""
        if failed or self._bound >= 1 << 64:
            return self._bound > 0
        draw = int(self._clock() // DRAW_S)
        told = trace_id.to_bytes(16, "little") + draw.to_bytes(8, "little")
        drawn = hashlib.blake2b(told, digest_size=8, key=self._key).digest()
        return int.from_bytes(drawn, "little") < self._bound
