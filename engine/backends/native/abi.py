"""The structures that ``csrc/athanor.h`` declares, field by field, and the numbers that both sides use.

All fields are 64 bits wide. ``layout`` is compared with what the library says of itself before anything is called.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

ABI = 6
PANEL = 32
"""Outputs that lie side by side in a packed weight."""

MAX_DIM = 512
"""Largest head that the kernels take."""

ADAPT_PANEL = 16
"""Columns that lie side by side in an adapter's packed matrices."""

ADAPT_ROWS = 4
"""Most rows of one adapter that a thread multiplies at once."""

MAX_GROUP = 64
"""Most query heads that may share one key-value head."""

_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p


class Kind(IntEnum):
    """What an operation does."""

    EMBED = 0
    ANGLES = 1
    NORM = 2
    LINEAR = 3
    ROPE = 4
    ATTEND = 5
    QUANTISE = 6
    BEST = 7
    ADAPT = 8
    GATE = 9


class Type(IntEnum):
    """Number types of weights, and of the rows that they are multiplied with."""

    F32 = 0
    BF16 = 1
    INT8 = 2


class Mode(IntEnum):
    """What a product does with its result; an embedding in mode ADD reads the packed weight of the head."""

    STORE = 0
    ADD = 1
    SWIGLU = 2


class Verdict(IntEnum):
    """What ``athanor_run`` answers."""

    RUN = 0
    BROKEN = 1
    FOREIGN = 2


class Op(ctypes.Structure):
    """``athanor_op``."""

    _fields_ = (
        ("kind", _INT),
        ("dtype", _INT),
        ("mode", _INT),
        ("wanted", _INT),
        ("inputs", _INT),
        ("outputs", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("dim", _INT),
        ("number", ctypes.c_double),
        ("weight", _POINTER),
        ("scale", _POINTER),
        ("sums", _POINTER),
        ("bias", _POINTER),
        ("palette", _POINTER),
        ("starts", _POINTER),
        ("patches", _POINTER),
        ("input", _POINTER),
        ("output", _POINTER),
        ("in_scale", _POINTER),
        ("out_scale", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("cosines", _POINTER),
        ("sines", _POINTER),
    )


class Pieces(ctypes.Structure):
    """``athanor_pieces``."""

    _fields_ = (("count", _INT), ("pieces", _POINTER), ("order", _POINTER))


class Pair(ctypes.Structure):
    """``athanor_pair``."""

    _fields_ = (("rank", _INT), ("down", _POINTER), ("up", _POINTER))


class Step(ctypes.Structure):
    """``athanor_step``."""

    _fields_ = (
        ("tokens", _INT),
        ("wanted_count", _INT),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("rows", _POINTER),
        ("wanted", _POINTER),
        ("tables", _POINTER),
        ("table_width", _INT),
        ("expected", _POINTER),
        ("stamps", _POINTER),
        ("pieces", Pieces),
        ("wanted_pieces", Pieces),
    )


class Program(ctypes.Structure):
    """``athanor_program``."""

    _fields_ = (
        ("ops", _POINTER),
        ("count", _INT),
        ("block_size", _INT),
        ("vocab_size", _INT),
        ("num_slots", _INT),
        ("max_rows", _INT),
        ("adapters", _INT),
        ("kv_dtype", _INT),
        ("solo_tokens", _INT),
        ("counters", _POINTER),
    )


def layout() -> int:
    """What ``athanor_layout`` must answer: the ABI's number and the sizes of the three structures."""
    sizes = (ctypes.sizeof(Op), ctypes.sizeof(Step), ctypes.sizeof(Program))
    return ABI * 1_000_000 + sizes[0] * 10_000 + sizes[1] * 100 + sizes[2]
