"""KV layout: sizes by arithmetic, and the root of the block hashes."""

from __future__ import annotations

import dataclasses

import pytest

from engine.errors import ConfigurationError
from engine.kv.layout import MIN_BLOCKS, KvLayout, fit_layout

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32", num_blocks=10)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    """A block is keys and values, of every layer, head and token in it."""
    assert LAYOUT.block_bytes == 2 * 3 * 2 * 8 * 4 * 4
    assert dataclasses.replace(LAYOUT, dtype="bfloat16").block_bytes == LAYOUT.block_bytes // 2
    assert LAYOUT.capacity == 40


@pytest.mark.parametrize("extra", [0, 1, LAYOUT.block_bytes - 1])
def test_fit_leaves_room_for_the_null_block(extra: int) -> None:
    """The usable blocks and the null block together take no more than was given."""
    layout = fit_layout(
        kv_bytes=11 * LAYOUT.block_bytes + extra,
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        block_size=4,
        dtype="float32",
    )
    assert layout == LAYOUT


@pytest.mark.parametrize(("kv_bytes", "block_size"), [(MIN_BLOCKS * 1_536, 4), (0, 4), (1 << 20, 0)])
def test_fit_refuses_what_cannot_work(kv_bytes: int, block_size: int) -> None:
    """Too little memory or an empty block is a configuration error that names the number."""
    with pytest.raises(ConfigurationError, match="kv_bytes|block_size"):
        fit_layout(kv_bytes=kv_bytes, num_layers=3, num_kv_heads=2, head_dim=8, block_size=block_size, dtype="float32")


def test_root_differs_with_everything_that_changes_the_bytes() -> None:
    """Models, dtypes and layouts have roots of their own; the number of blocks does not matter."""
    variants = [LAYOUT] + [
        dataclasses.replace(LAYOUT, **change)
        for change in (
            {"num_layers": 4},
            {"num_kv_heads": 4},
            {"head_dim": 16},
            {"block_size": 8},
            {"dtype": "bfloat16"},
        )
    ]
    roots = {layout.root(digest) for layout in variants for digest in ("aa", "bb")}
    assert len(roots) == 2 * len(variants)
    assert {len(root) for root in roots} == {16}
    assert dataclasses.replace(LAYOUT, num_blocks=99).root("aa") == LAYOUT.root("aa")
