"""Uniform numbers that depend on a request's seed and a position, and on nothing else.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): a keyed bijection of a counter.
Key is the request's 64-bit seed, counter the position of the token that is chosen. So a request draws the same
numbers alone, in any batch, and again after a preemption; and there is no state that a batch neighbour could share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""32-bit words, each in 64 bits so that products are whole."""

ROUNDS = 10
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint64(0x9E3779B9)
WEYL_1 = np.uint64(0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words for each counter and key; arrays run in parallel."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> SHIFT) ^ c1 ^ k0,
            product_1 & LOW,
            (product_0 >> SHIFT) ^ c3 ^ k1,
            product_0 & LOW,
        )
        k0, k1 = (k0 + WEYL_0) & LOW, (k1 + WEYL_1) & LOW
    return c0, c1, c2, c3


def uniforms(seeds: Words, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), multiples of 2**-52."""
    places = positions.astype(np.uint64)
    zero = np.zeros_like(places)
    counter = (places & LOW, places >> SHIFT, zero, zero)
    low, high, _, _ = philox(counter, (seeds & LOW, seeds >> SHIFT))
    bits = ((high << SHIFT) | low) >> np.uint64(12)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-52
    return numbers
