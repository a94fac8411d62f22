"""What the local engine has of earlier prompts, as far as the gateway can know: the beginnings that it has computed.

An engine tells of a request's cached tokens when it begins, which is too late to ask another host first. So the gateway
remembers keyed hashes of beginnings, one for each ``STRIDE_BLOCKS`` blocks. It does not see evictions: a prompt that it
takes for known is computed locally then. Pure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

STRIDE_BLOCKS = 8
"""Blocks between two hashes: with blocks of 16 tokens, a length is known to 128 tokens, a quarter of what is asked
for (``prefill_asking.LEAST_BLOCKS``)."""

MAX_KNOWN = 16_384
"""Most hashes, of 16 bytes: two million tokens of KV, more than the engines of a host hold; the oldest goes first."""


class KnownPrompts:
    """Beginnings of prompts that the local engine has had."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, namespace: bytes, model: str, token_ids: array[int], block_size: int) -> None:
        """Remember a prompt that the engine has. Another namespace key, as after a shred, begins anew."""
        for _, mark in _marks(namespace, model, token_ids, block_size):
            self._known[mark] = None
            self._known.move_to_end(mark)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def tokens(self, namespace: bytes, model: str, token_ids: array[int], block_size: int) -> int:
        """Return how many tokens of a prompt's beginning the engine has had."""
        found = 0
        for length, mark in _marks(namespace, model, token_ids, block_size):
            if mark not in self._known:
                break
            found = length
        return found


def _marks(namespace: bytes, model: str, token_ids: array[int], block_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the length of each beginning with its hash, the shortest first."""
    step = STRIDE_BLOCKS * block_size
    digest = hashlib.blake2b(model.encode(), digest_size=16, key=namespace[:64], person=b"athanor-split")
    for end in range(step, len(token_ids) + 1, step):
        digest.update(token_ids[end - step : end].tobytes())
        yield end, digest.digest()
