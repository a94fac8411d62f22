"""Numbers that a request adds to the scores of some token ids: their type, and their columns inside a ``Submit``.

Columns: ids n x u32, values n x f32. A sampler adds in 32-bit floats, so no more bits travel.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

from isolation.ipc.frame import Frame, require, require_array, require_range, take_array

MAX_LOGIT_BIASES = 300
"""Ids of one request that have a bias. OpenAI's API is known to take 300; each costs a device a comparison with every
score of the row."""

MAX_LOGIT_BIAS = 100.0
"""Largest bias, and the negative of the least: OpenAI's range. It changes the odds of an id by a factor of 10**43."""

BIAS_BYTES = 4 + 4
"""Bytes of one entry on the wire."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Numbers added to scores before anything else but a mask; at least one."""

    ids: array[int]
    """Typecode ``I``, rising."""
    values: array[float]
    """Typecode ``f``, one for each id, within ``MAX_LOGIT_BIAS``."""

    def __len__(self) -> int:
        return len(self.ids)


def check_logit_bias(bias: LogitBias) -> None:
    """Refuse what the wire cannot carry.

    Raises:
        OutOfBoundsError: it has no entry or too many, ids that do not rise, or a value out of its range.
    """
    require_array("ids of the logit bias", bias.ids, "I")
    require_array("values of the logit bias", bias.values, "f")
    require_range("entries of the logit bias", len(bias.ids), 1, MAX_LOGIT_BIASES)
    require(len(bias.ids) == len(bias.values), "ids and values of the logit bias have different lengths")
    require(all(before < after for before, after in pairwise(bias.ids)), "ids of the logit bias do not rise")
    # Not "abs(value) > most": a NaN is neither.
    require(all(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS for value in bias.values), "a logit bias is out of range")


def pack_logit_bias(bias: LogitBias) -> tuple[bytes, bytes]:
    """Return the columns."""
    return bias.ids.tobytes(), bias.values.tobytes()


def unpack_logit_bias(frame: Frame, start: int, count: int) -> LogitBias:
    """Return the entries whose columns begin at ``start``."""
    middle = start + 4 * count
    values: array[float] = array("f")
    values.frombytes(memoryview(frame)[middle : middle + 4 * count])
    return LogitBias(take_array("I", frame, start, middle), values)
