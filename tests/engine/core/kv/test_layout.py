"""KV layout: sizes by arithmetic, and the root of the block hashes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.backends.common.storage import KvStorage
from engine.core.kv.layout import FULL, MIN_BLOCKS, KvLayout, LayerLayout, Reach, fit_layout, uniform_layers
from engine.errors import ConfigurationError

LAYERS = uniform_layers(3, 2, 8)
LAYOUT = KvLayout(layers=LAYERS, block_size=4, dtype="float32", num_blocks=10)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    """A block is keys and values, of every layer, head and token in it."""
    assert LAYOUT.block_bytes == 2 * 3 * 2 * 8 * 4 * 4
    assert dataclasses.replace(LAYOUT, dtype="bfloat16").block_bytes == LAYOUT.block_bytes // 2
    assert LAYOUT.capacity(8) == 40


@pytest.mark.parametrize("extra", [0, 1, LAYOUT.block_bytes - 1])
def test_fit_leaves_room_for_the_null_block(extra: int) -> None:
    """The usable blocks and the null block together take no more than was given."""
    layout = fit_layout(kv_bytes=11 * LAYOUT.block_bytes + extra, layers=LAYERS, block_size=4, dtype="float32")
    assert layout == LAYOUT


@pytest.mark.parametrize(("kv_bytes", "block_size"), [(MIN_BLOCKS * 1_536, 4), (0, 4), (1 << 20, 0)])
def test_fit_refuses_what_cannot_work(kv_bytes: int, block_size: int) -> None:
    """Too little memory or an empty block is a configuration error that names the number."""
    with pytest.raises(ConfigurationError, match="kv_bytes|block_size"):
        fit_layout(kv_bytes=kv_bytes, layers=LAYERS, block_size=block_size, dtype="float32")


def test_root_differs_with_everything_that_changes_the_bytes() -> None:
    """Models, dtypes and layouts have roots of their own; the number of blocks does not matter."""
    variants = [LAYOUT] + [
        dataclasses.replace(LAYOUT, **change)
        for change in (
            {"layers": uniform_layers(4, 2, 8)},
            {"layers": uniform_layers(3, 4, 8)},
            {"layers": uniform_layers(3, 2, 16)},
            {"layers": uniform_layers(3, 2, 8, Reach("window", 16))},
            {"layers": uniform_layers(3, 2, 8, Reach("chunk", 16))},
            {"layers": uniform_layers(3, 2, 8, Reach("window", 17))},
            {"layers": (*LAYERS[1:], LayerLayout(heads=2, key_dim=8, value_dim=6))},
            {"layers": (*LAYERS[1:], LayerLayout(heads=2, key_dim=6, value_dim=8))},
            {"layers": (*LAYERS[1:], LayerLayout(heads=2, key_dim=8, value_dim=8, latent=True))},
            {"layers": (LayerLayout(heads=2, key_dim=8, value_dim=8, latent=True), *LAYERS[1:])},
            {"block_size": 8},
            {"dtype": "bfloat16"},
        )
    ]
    roots = {layout.root(digest) for layout in variants for digest in ("aa", "bb")}
    assert len(roots) == 2 * len(variants)
    assert {len(root) for root in roots} == {16}
    assert dataclasses.replace(LAYOUT, num_blocks=99).root("aa") == LAYOUT.root("aa")


def test_bytes_of_a_token_are_counted_layer_by_layer() -> None:
    """Mixed widths, a latent layer whose values lie in its keys, and a layer with a window: exactly what is stored."""
    layers = (
        LayerLayout(heads=2, key_dim=8, value_dim=6),
        LayerLayout(heads=1, key_dim=576, value_dim=512, latent=True),
        LayerLayout(heads=3, key_dim=4, value_dim=4, reach=Reach("window", 16)),
        LayerLayout(heads=3, key_dim=4, value_dim=4, reach=Reach("window", 16)),
    )
    layout = KvLayout(layers=layers, block_size=4, dtype="bfloat16", num_blocks=3)
    assert layout.token_bytes == 2 * (2 * 14 + 576 + 2 * 3 * 8)
    assert layout.block_bytes == 4 * layout.token_bytes
    assert layout.reaches == (FULL, Reach("window", 16))
    storage = KvStorage(layout, max_context=8, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in storage.tensors) == (layout.num_blocks + 1) * layout.block_bytes


@pytest.mark.parametrize(("layer", "tokens"), [((1, 576, 512, True), 61), ((8, 128, 128, False), 48)])
def test_published_models_take_the_bytes_that_their_papers_say(layer: tuple[int, int, int, bool], tokens: int) -> None:
    """DeepSeek-V3 stores 576 numbers a token and layer (arXiv 2412.19437, section 2.1.1: 512 and 64), Llama 4 Scout
    eight heads of 128 twice."""
    heads, key, value, latent = layer
    one = LayerLayout(heads=heads, key_dim=key, value_dim=value, latent=latent)
    layout = KvLayout(layers=(one,) * tokens, block_size=16, dtype="bfloat16", num_blocks=1)
    assert layout.token_bytes == {61: 70_272, 48: 196_608}[tokens]
