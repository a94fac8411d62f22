"""KV out of a card's memory: the share, what is free, and what stays in reserve."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from engine.backends.common.loading import LoadSource
from engine.backends.cuda import load
from engine.backends.cuda.load import with_card_kv
from engine.backends.cuda.runtime.budget import (
    CONTEXT_BYTES,
    LIBRARY_BYTES,
    RESERVE_BYTES,
    CardMemory,
    StepShape,
    cap_share,
    check_room,
    kv_bytes_of,
    reserve_bytes,
    step_shape,
)
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.checkpoint import weights
from engine.model.checkpoint.registry import build_model, load_model_config
from engine.model.layers.experts import MixtureOfExperts
from engine.startup.load import check_config
from tests.engine.model.families.table import FAMILIES, save_reference
from tests.engine.support import model_config, random_model, save_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("card", "share", "expected"),
    [
        (CardMemory(80 * GIB, 63 * GIB, 17 * GIB), 90, 54 * GIB),  # alone: the share decides
        (CardMemory(80 * GIB, 20 * GIB, 17 * GIB), 90, 19 * GIB),  # beside others: what is free decides
        (CardMemory(80 * GIB, 63 * GIB, 17 * GIB), 50, 22 * GIB),  # half of a card for each of two models
    ],
)
def test_the_lesser_of_share_and_free_memory(card: CardMemory, share: int, expected: int) -> None:
    """Worked out by hand; a GiB stays in reserve."""
    assert kv_bytes_of(card, share) == expected


def test_no_card_is_filled_beyond_its_share() -> None:
    """Over drawn cards: KV, what is held and the reserve stay within the share and within what is free."""
    draw = random.Random(1)
    refused = 0
    for _ in range(500):
        total = draw.randint(8, 192) * GIB
        held = draw.randint(1, total)
        card = CardMemory(total, draw.randint(0, total - held), held)
        share = draw.randint(1, 95)
        try:
            given = kv_bytes_of(card, share)
        except ConfigurationError:
            refused += 1
            assert min(total * share // 100 - held, card.free) <= RESERVE_BYTES
        else:
            assert given > 0
            assert given + held + RESERVE_BYTES <= total * share // 100 and given + RESERVE_BYTES <= card.free
    assert 50 < refused < 450


@pytest.mark.parametrize(
    ("free", "held", "share", "weights", "fits"),
    [
        (80, 0, 0, 80, True),  # without a share all that is free
        (15, 0, 0, 16, False),
        (80, 1, 50, 39, True),  # with one what it leaves
        (80, 1, 50, 40, False),
        (15, 1, 50, 16, False),  # or what others have left
        (80, 60, 50, 1, False),  # and nothing when it is taken already
    ],
)
def test_weights_are_given_room_before_it_is_taken(free: int, held: int, share: int, weights: int, fits: bool) -> None:
    """What is free and what the share leaves both count; the error has the numbers and says what to do."""
    card = CardMemory(80 * GIB, free * GIB, held * GIB)
    if fits:
        check_room(card, share, weights * GIB)
        return
    said = f"weights take {weights * 1_024:,} MiB and the GPU has room for .*put fewer models on the card"
    with pytest.raises(ConfigurationError, match=said):
        check_room(card, share, weights * GIB)


def test_a_full_card_ends_the_start_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine for a card that others fill is refused with the numbers, without a call to the card; control: where
    there is room it goes on to take memory."""
    config = EngineConfig(model_dir=str(tmp_path), model_digest="00")
    save_model(tmp_path, model_config())
    source = LoadSource(config=config, description=model_config(), device="cuda")

    def taken(*_: object, final: bool, scaled: bool) -> None:
        raise LookupError(f"memory is taken, final: {final}, scaled: {scaled}")

    monkeypatch.setattr(weights, "build_model", taken)
    for free, raised, said in (
        (1 << 12, ConfigurationError, "has room for 0 MiB"),
        (GIB, LookupError, "final: True, scaled: False"),
    ):
        monkeypatch.setattr(load, "read_card", lambda _, free=free: CardMemory(80 * GIB, free, GIB))
        with pytest.raises(raised, match=said):
            load.load(source)


def test_what_cannot_be_is_said() -> None:
    """A share out of range, and a card that weights fill, end the start with numbers and a mend."""
    for share in (0, 96, -1):
        with pytest.raises(ConfigurationError, match="1 to 95 percent"):
            kv_bytes_of(CardMemory(80 * GIB, 80 * GIB, 0), share)
    with pytest.raises(ConfigurationError, match=r"81,920 MiB.*50 %.*40,960 MiB already.*raise gpu_share"):
        kv_bytes_of(CardMemory(80 * GIB, 40 * GIB, 40 * GIB), 50)
    for share in (-1, 96):
        with pytest.raises(ConfigurationError, match="gpu_share"):
            check_config(EngineConfig(model_dir="x", model_digest="00", gpu_share=share))
    check_config(EngineConfig(model_dir="x", model_digest="00", gpu_share=95))
    assert EngineConfig.from_json(EngineConfig(model_dir="x", model_digest="0", gpu_share=7).to_json()).gpu_share == 7
    assert "gpu_share" in json.loads(EngineConfig(model_dir="x", model_digest="0").to_json())


def test_a_share_counts_on_a_card_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor `kv_bytes` holds, with a share or without; on a card the share does, if there is one."""
    monkeypatch.setattr(load, "read_card", lambda _device: CardMemory(80 * GIB, 63 * GIB, 17 * GIB))
    model = random_model(model_config(), packed=False)
    capped: list[int] = []
    monkeypatch.setattr(load, "cap_share", lambda _device, _card, share: capped.append(share))
    config = EngineConfig(model_dir="x", model_digest="00", gpu_share=90, kv_bytes=1 << 20)
    assert with_card_kv(config, model).kv_bytes == 1 << 20
    model.device = torch.device("cuda")
    assert with_card_kv(config, model).kv_bytes == 54 * GIB
    assert with_card_kv(EngineConfig(model_dir="x", model_digest="00", kv_bytes=5), model).kv_bytes == 5
    assert capped == [90]


def test_a_process_holds_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator is told of the share less what CUDA holds beside it; never less than nothing."""
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: told.append(share))
    for total, share in ((80 * GIB, 50), (GIB // 4, 90)):
        cap_share(torch.device("cuda"), CardMemory(total, total, 0), share)
    assert told == [0.5 - CONTEXT_BYTES / (80 * GIB), 0.0]


SHAPE = StepShape(4_096, 256, 320, 128_256, 2, 4_096, 86_016, 8_200, 528_384)
"""Of Llama 3.1 8B with 256 rows and contexts of 16,384 tokens."""


def test_what_comes_after_kv_holds_the_tensors_of_a_step() -> None:
    """For an 8B model: the reserve is more than its prompts' widest layer, logits of all lines, scores, partial results
    of attention and counts, each worked out by hand, together, and less than twice that beside what libraries take. A
    small engine has the least, and no number of a shape makes it smaller as it grows."""
    prompts = 4_096 * (3 * 14_336 + 4 * 4_096) * 2 + 320 * 128_256 * 2 + 256 * 128_256 * 4
    recorded = 256 * (128_256 * (2 + 4) + 32 * 32 * 129 * 4)
    tensors = prompts + recorded + 257 * 128_256 * 4
    assert tensors + LIBRARY_BYTES < reserve_bytes(SHAPE) < 2 * tensors + LIBRARY_BYTES
    assert reserve_bytes(StepShape(64, 8, 64, 1_000, 2, 64, 256, 64, 64)) == RESERVE_BYTES
    for name in (one.name for one in fields(StepShape)):
        assert reserve_bytes(replace(SHAPE, **{name: 2 * getattr(SHAPE, name)})) > reserve_bytes(SHAPE)


def test_a_step_s_shape_is_the_model_s(tmp_path: Path) -> None:
    """Rows, lines and tables follow from the configuration, the widest block from the model: of experts as many as a
    token goes through."""
    config = EngineConfig(
        model_dir="x", model_digest="00", max_num_seqs=500, max_num_batched_tokens=96, max_context=64, block_size=16
    )
    dense = step_shape(config, random_model(model_config(), packed=False))
    assert (dense.tokens, dense.rows, dense.lines, dense.table) == (96, 96, 96, 8 * 5)
    about = model_config()
    wide = (3 * about.num_heads + 2 * about.num_kv_heads) * about.head_dim * 4
    assert dense.inner == max(3 * about.intermediate_size * 4, wide)
    save_reference(tmp_path, "mixtral", **FAMILIES["mixtral"].cases["thirteen experts"])
    mixture, _ = build_model(load_model_config(str(tmp_path)), torch.float32, torch.device("meta"))
    (experts, *_) = (
        one.block for layer in mixture.layers for one in layer.sublayers if isinstance(one.block, MixtureOfExperts)
    )
    top, hidden, inner = experts.router.route.top, mixture.config.hidden_size, mixture.config.intermediate_size
    assert top > 1 and step_shape(config, mixture).inner == top * (3 * inner * 4 + 4 * hidden)
