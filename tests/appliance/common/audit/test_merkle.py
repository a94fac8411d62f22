"""Merkle trees: the published vectors of RFC 6962's reference implementation, and two ways that must agree."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.audit.merkle import EMPTY_ROOT, Tree, leaf_hash, node_hash
from appliance.common.audit.verify import Roots

LEAVES = [
    bytes.fromhex(one)
    for one in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_roots_are_the_published_ones() -> None:
    """The tree over one leaf, two, ... eight, as Certificate Transparency's test vectors have them."""
    tree = Tree()
    assert tree.root() == EMPTY_ROOT
    for leaf, root in zip(LEAVES, ROOTS, strict=True):
        tree.append(leaf_hash(leaf))
        assert tree.root().hex() == root


def by_definition(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, word by word."""
    if not leaves:
        return EMPTY_ROOT
    if len(leaves) == 1:
        return leaf_hash(leaves[0])
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return node_hash(by_definition(leaves[:half]), by_definition(leaves[half:]))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=8), max_size=70), st.integers(0, 70))
def test_growing_gives_what_the_definition_gives(leaves: list[bytes], cut: int) -> None:
    """Writer's and verifier's trees agree with the definition at every size, also when they go on from a cut."""
    tree = Tree()
    for leaf in leaves[:cut]:
        tree.append(leaf_hash(leaf))
    further, roots = Tree(tree.size, tree.peaks), Roots(tree.size, tree.peaks)
    for leaf in leaves[cut:]:
        further.append(leaf_hash(leaf))
        roots.take(leaf)
    assert further.root() == roots.root() == by_definition(leaves)
