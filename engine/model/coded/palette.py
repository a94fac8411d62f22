"""Chooses the palette of a tensor and the lengths of its codes: the shortest that no longer than 11 bits allow.

Deterministic: equal counts give equal codes on every machine. Lengths are those of the package-merge algorithm (Larmore
and Hirschberg, 1990).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.coded.layout import MAX_CODE_BITS, MAX_PALETTE, Code

ESCAPE_FLAG = 1 << 24
"""Marks exponents outside the palette in ``code_table``."""


def choose_code(counts: Sequence[int]) -> Code:
    """Return the code for a tensor in which exponent ``e`` occurs ``counts[e]`` times."""
    ranked = sorted((exponent for exponent in range(256) if counts[exponent]), key=lambda one: (-counts[one], one))
    palette = ranked[:MAX_PALETTE]
    if len(palette) < 2:
        # A code needs two words; the other one does not occur.
        palette.append(1 if palette == [0] else 0)
    lengths = _limited_lengths([max(counts[one], 1) for one in palette])
    order = sorted(range(len(palette)), key=lambda place: (lengths[place], palette[place]))
    return Code(bytes(palette[one] for one in order), bytes(lengths[one] for one in order))


def code_table(code: Code) -> list[int]:
    """Return for each of the 256 exponents its code, ``length << 16`` above it, and ``ESCAPE_FLAG`` for an escape.

    An escape's place has the first code of the palette, the shortest.
    """
    values = code.values()
    table = [ESCAPE_FLAG | code.lengths[0] << 16 | values[0]] * 256
    for exponent, length, value in zip(code.exponents, code.lengths, values, strict=True):
        table[exponent] = length << 16 | value
    return table


def _limited_lengths(weights: list[int]) -> list[int]:
    """Return code lengths of at most ``MAX_CODE_BITS``, the weighted sum of which is the least."""
    single: list[tuple[int, tuple[int, ...]]] = sorted((weight, (place,)) for place, weight in enumerate(weights))
    row = single
    for _ in range(MAX_CODE_BITS - 1):
        pairs = zip(row[::2], row[1::2], strict=False)
        packages = [(one[0] + other[0], one[1] + other[1]) for one, other in pairs]
        row = sorted(single + packages)
    lengths = [0] * len(weights)
    for _, places in row[: 2 * len(weights) - 2]:
        for place in places:
            lengths[place] += 1
    return lengths
