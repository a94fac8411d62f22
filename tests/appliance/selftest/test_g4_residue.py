"""G4: no residue, on every kind of KV layout, with controls that see what is excluded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from appliance.selftest import g4_residue
from appliance.selftest.g4_residue import check_zero, differing, poison_free_blocks, poisoned_empty, run
from appliance.selftest.small_engine import MakeEngine
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.startup.load import load_engine
from tests.engine.model.families.table import FAMILIES, save_reference

REQUESTS = 8
"""Requests of one run here: enough for cancels, preemptions and blocks that change owner, which each test looks for."""

LAYOUTS = {"several tables": "gemma3", "latent": "deepseek", "chunks": "llama4"}

EVERY_RUN = ("latent", "chunks")
"""Layouts that every run has; the second has several tables too, and the first of all three takes longest."""


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_row_of_the_guarantee_passes(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero before a change of owner, blind to poison, both with their controls."""
    if not full:
        monkeypatch.setattr(g4_residue, "SHORT", REQUESTS)
    rows = run(full)
    assert [row.id for row in rows if row.verdict != "pass"] == []
    assert sum(row.id.endswith(".control") for row in rows) == len(rows) / 2


def load(folder: Path) -> Engine:
    """A model from disk with few blocks, so that requests are preempted."""
    return load_engine(
        EngineConfig(
            model_dir=str(folder),
            model_digest="00",
            block_size=4,
            kv_bytes=220_000,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            threads=1,
        )
    )


def load_poisoned(make: MakeEngine) -> Engine:
    """An engine loaded from memory that held poison before."""
    with poisoned_empty():
        return make()


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one in EVERY_RUN else pytest.mark.full) for one in LAYOUTS]
)
def test_other_layouts_of_kv_leave_nothing_either(tmp_path: Path, layout: str) -> None:
    """Several block tables, latent attention and chunks: every block is zero at a change of owner, and NaN in free
    memory, also while the model is loaded, changes no bit; without zeroing it does (control)."""
    family = LAYOUTS[layout]
    save_reference(tmp_path, family, **next(iter(FAMILIES[family].cases.values())))
    make = partial(load, tmp_path)
    watch = check_zero(make, REQUESTS, longest=40)
    assert watch.changes > 50
    assert watch.had_bytes > 10
    assert watch.residue == 0
    assert differing(make, poison_free_blocks, REQUESTS, longest=40)[0] == 0
    assert differing(partial(load_poisoned, make), poison_free_blocks, REQUESTS, longest=40, sound=make)[0] == 0
    assert differing(make, poison_free_blocks, REQUESTS, zero=False, longest=40)[0] > 0


def test_poisoned_memory_is_what_it_says() -> None:
    """Inside the context whatever is not initialised is NaN, or a number out of place; outside it is as it was."""
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    with poisoned_empty():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
        assert torch.zeros(1).new_empty(4).isnan().all()
        assert torch.empty(2, dtype=torch.int64).tolist() == [0x7FC0] * 2
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == before
