"""Proofs about a Merkle tree (RFC 6962, 2.1): that an entry is in it, and that one tree continues another. Pure.

Proofs are made from the hashes of perfect subtrees, and checked (RFC 9162, 2.1.3.2 and 2.1.4.2) with nothing but
themselves, sizes and roots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from appliance.common.audit.merkle import EMPTY_ROOT, HASH_BYTES, node_hash

MAX_PROOF_HASHES = 63
"""Most hashes of a proof: a tree of 2**63 entries needs no more."""

SubtreeHash = Callable[[int, int], bytes]
"""Hash of the perfect subtree of a height and an index: that of entries ``index << height`` to
``(index + 1) << height``, which is left out."""


def tree_hash(start: int, end: int, at: SubtreeHash) -> bytes:
    """Return the hash of the entries from ``start`` to ``end``, which is left out; a range that a tree splits into."""
    width = end - start
    if width <= 0:
        return EMPTY_ROOT
    if width & (width - 1) == 0 and start % width == 0:
        height = width.bit_length() - 1
        return at(height, start >> height)
    middle = start + _split(width)
    return node_hash(tree_hash(start, middle, at), tree_hash(middle, end, at))


def prove_inclusion(index: int, size: int, at: SubtreeHash) -> list[bytes]:
    """Return the proof that the entry ``index`` is in the tree of ``size`` entries, its sibling's hash first."""
    if not 0 <= index < size:
        raise ValueError("the tree has no such entry")
    return _path(index, 0, size, at)


def prove_consistency(old: int, new: int, at: SubtreeHash) -> list[bytes]:
    """Return the proof that the tree of ``new`` entries begins with that of ``old``; nothing for an empty one."""
    if not 0 <= old <= new:
        raise ValueError("the tree has fewer entries")
    return _subproof(old, 0, new, at, whole=True) if 0 < old < new else []


def includes(index: int, size: int, leaf: bytes, proof: Sequence[bytes], root: bytes) -> bool:
    """Return whether a proof shows that the leaf of this hash is in a tree at its place."""
    if not 0 <= index < size or not _are_hashes(proof):
        return False
    place, last, value = index, size - 1, leaf
    for one in proof:
        if last == 0:
            return False
        if place & 1 or place == last:
            value = node_hash(one, value)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            value = node_hash(value, one)
        place, last = place >> 1, last >> 1
    return last == 0 and value == root


def consistent(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether a proof shows that a tree begins with an older one. Every tree begins with the empty one."""
    if not 0 <= old <= new or not _are_hashes(proof):
        return False
    if old in (0, new):
        return not proof and (old_root == new_root if old == new else old_root == EMPTY_ROOT)
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    if not path:
        return False
    place, last = old - 1, new - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    earlier = later = path[0]
    for one in path[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            earlier, later = node_hash(one, earlier), node_hash(one, later)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            later = node_hash(later, one)
        place, last = place >> 1, last >> 1
    return last == 0 and earlier == old_root and later == new_root


def _are_hashes(proof: Sequence[bytes]) -> bool:
    return len(proof) <= MAX_PROOF_HASHES and all(len(one) == HASH_BYTES for one in proof)


def _split(width: int) -> int:
    """Largest power of two below a width."""
    return 1 << (width - 1).bit_length() - 1


def _path(index: int, start: int, end: int, at: SubtreeHash) -> list[bytes]:
    if end - start == 1:
        return []
    middle = start + _split(end - start)
    if index < middle:
        return [*_path(index, start, middle, at), tree_hash(middle, end, at)]
    return [*_path(index, middle, end, at), tree_hash(start, middle, at)]


def _subproof(old: int, start: int, end: int, at: SubtreeHash, *, whole: bool) -> list[bytes]:
    if old == end:
        return [] if whole else [tree_hash(start, end, at)]
    middle = start + _split(end - start)
    if old <= middle:
        return [*_subproof(old, start, middle, at, whole=whole), tree_hash(middle, end, at)]
    return [*_subproof(old, middle, end, at, whole=False), tree_hash(start, middle, at)]
