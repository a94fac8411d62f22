"""Merkle tree hashes (RFC 6962, section 2.1), grown one leaf at a time in logarithmic memory."""

from __future__ import annotations

from hashlib import sha256

HASH_BYTES = 32

EMPTY_ROOT = sha256(b"").digest()
"""Root of a tree without leaves."""

MAX_PEAKS = 64
"""Perfect subtrees of the largest tree."""


def leaf_hash(data: bytes) -> bytes:
    """Hash of a leaf."""
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


class Tree:
    """Perfect subtrees of a growing tree, the largest first, which is all that appending and the root need."""

    __slots__ = ("peaks", "size")

    def __init__(self, size: int = 0, peaks: list[bytes] | None = None) -> None:
        """``peaks``: the subtrees' roots of a tree of that size.

        Raises:
            ValueError: there are not as many as the size has bits set, or one is no hash.
        """
        self.size = size
        self.peaks = list(peaks or ())
        if size < 0 or len(self.peaks) != size.bit_count() or any(len(peak) != HASH_BYTES for peak in self.peaks):
            raise ValueError("these are not the subtrees of a tree of that size")

    def append(self, leaf: bytes) -> None:
        """Add the hash of a leaf."""
        size = self.size
        while size & 1:
            leaf = node_hash(self.peaks.pop(), leaf)
            size >>= 1
        self.peaks.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        """Hash of the whole tree."""
        if not self.peaks:
            return EMPTY_ROOT
        root = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            root = node_hash(peak, root)
        return root
