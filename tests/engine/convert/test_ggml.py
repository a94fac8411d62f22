"""ggml's types of numbers against the format's own library."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from engine.convert.ggml import TYPES, BlockType


@pytest.mark.parametrize("number", TYPES, ids=lambda one: TYPES[one].name)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_numbers_are_exactly_those_of_the_library(number: int) -> None:
    """Random blocks, every bit pattern of a scale among them: the same float32, NaN and infinity included."""
    kind: BlockType = TYPES[number]
    reference = gguf.GGMLQuantizationType(number)
    assert gguf.GGML_QUANT_SIZES[reference] == (kind.numbers, kind.size)
    assert reference.name == kind.name
    blocks = np.random.default_rng(number).integers(0, 256, (4_000, kind.size), dtype=np.uint8)
    mine = kind.decode(blocks)
    assert mine.dtype == np.float32
    assert np.array_equal(mine, gguf.dequantize(blocks, reference).reshape(mine.shape), equal_nan=True)
