"""The table of backends: a row serves, refusals fall through to the next, ranks and adapters reach every backend."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.common.loading import Loaded, Loader, LoadSource
from engine.config import EngineConfig
from engine.core.backend import Backend
from engine.core.offline import generate
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from engine.errors import AdapterError, ConfigurationError, UnsupportedError
from engine.model.adapters.bank import AdapterBank
from engine.model.checkpoint.registry import load_model_config
from engine.model.layers.blocks import StepContext
from engine.model.layers.parallel import Parallel
from engine.startup import backends_table
from engine.startup.backends_table import LOADERS, candidates, load_backend
from engine.startup.load import load_engine
from isolation.ipc.sampling import Sampling
from tests.engine.startup import toy_backend
from tests.engine.support import make_engine, model_config, random_model, save_model, submit


def configured(folder: Path, **fields: object) -> EngineConfig:
    """A configuration of a small model on disk."""
    save_model(folder, model_config())
    values = {"kv_bytes": 1 << 20, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4, **fields}
    return EngineConfig(model_dir=str(folder), model_digest="00", **values)


def admitted(adapter: int) -> StepPlan:
    """A step in which a request with an adapter takes a row."""
    one = Admission(0, array("I", [1, 2]), 2, Sampling(), -1, (1,), adapter=adapter)
    return StepPlan(admissions=[one], prefills=[Chunk(0, 0, 2, True)])


def test_a_new_backend_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy of less than 60 lines serves requests through the real scheduler and loop once its row is in the table;
    without the row its name is refused."""
    config = configured(tmp_path, backend="toy")
    with pytest.raises(ConfigurationError, match="must be one of: auto, device, plain, native"):
        load_engine(config)
    monkeypatch.setitem(LOADERS, "toy", Loader(toy_backend.load))
    engine = load_engine(config)
    answers = generate(engine, [submit(1, [5, 7], 6), submit(2, [90], 10), submit(3, range(40), 3)])
    assert answers[1].token_ids == [8, 9, 10, 11, 12, 13]
    assert answers[2].token_ids == [91, 92, 93, 94, 95, 96, 0, 1, 2, 3]
    assert answers[3].token_ids == [40, 41, 42]
    assert len(Path(toy_backend.__file__).read_text().splitlines()) <= 60
    engine.scheduler.check_integrity()


def test_a_refusal_tries_the_next_and_the_last_one_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that refuses gives way to the next candidate, which names the reason; alone, it ends the start."""

    def refuse(_source: LoadSource) -> Loaded:
        raise UnsupportedError("it is a Sunday")

    monkeypatch.setitem(LOADERS, "native", Loader(refuse))
    config = configured(tmp_path)
    assert candidates(config) == ("native", "plain")
    assert "no compiled kernels: it is a Sunday" in load_engine(config).runner.description
    with pytest.raises(ConfigurationError, match=r"native does not run this model here: it is a Sunday; set backend"):
        load_engine(replace(config, backend="native"))


@pytest.mark.parametrize(
    "fields", [{}, {"backend": "device"}, {"runner": "null"}, {"runner": "embed", "pooling": "last"}]
)
def test_every_backend_is_given_the_rank(
    tmp_path: Path, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of every backend sees the engine's own ``Parallel``, of size one."""
    seen: list[Parallel] = []
    monkeypatch.setattr(
        backends_table, "load_backend", lambda source: (seen.append(source.parallel), load_backend(source))[1]
    )
    monkeypatch.setattr("engine.startup.load.load_backend", backends_table.load_backend)
    config = configured(tmp_path, **fields)
    alone = Parallel()
    load_engine(config, warm=False, parallel=alone)
    assert seen == [alone] and seen[0] is alone


def test_more_than_one_rank_is_refused_where_it_is_not_computed(tmp_path: Path) -> None:
    """The device backend and the compiled kernels name ranks as the reason; the plain path loads its part."""
    config = configured(tmp_path, backend="device")
    description = load_model_config(str(tmp_path))
    source = LoadSource(config=config, description=description, parallel=Parallel(rank=1, size=2))
    with pytest.raises(ConfigurationError, match="whole model on one rank"):
        load_backend(source)
    assert "one rank" in LOADERS["native"].supports(config, source.model)
    assert source.model.parallel.size == 2


@pytest.mark.parametrize("name", ["plain", "device", "null", "embed"])
def test_an_adapter_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """A backend that computes no adapters raises a typed error for a row that has one; without one it computes."""
    kind = {"runner": name} if name in ("null", "embed") else {"backend": name}
    if name == "embed":
        kind["pooling"] = "last"
    config = configured(tmp_path, **kind)
    description = load_model_config(str(tmp_path), headless=name == "embed")
    backend: Backend = load_backend(LoadSource(config=config, description=description)).backend
    assert not backend.capabilities.adapters
    assert len(backend.execute(admitted(0)).token_ids) == 1
    with pytest.raises(AdapterError, match="adapter 7 and this backend computes no adapters"):
        backend.execute(admitted(7))


def test_an_adapter_reaches_the_blocks_call() -> None:
    """On the plain path each token's adapter is in the step that blocks are called with, ordinary or in a tile; where
    no row has one, nothing is made."""
    model = random_model(model_config())
    model.bank = AdapterBank(model.sites)
    engine = make_engine(model)
    runner = engine.runner
    seen: list[list[int]] = []
    layer = runner.model.layers[0]

    def watched(x: torch.Tensor, step: StepContext) -> torch.Tensor:
        seen.append(step.adapters.tolist())
        return layer(x, step)

    runner.model.layers[0] = watched
    for deterministic, rest in ((False, []), (True, [0] * 14)):
        seen.clear()
        plan = admitted(7)
        plan.admissions[0] = plan.admissions[0]._replace(deterministic=deterministic)
        runner.execute(plan)
        runner.execute(StepPlan(decode_rows=[0]))
        assert seen == [[7, 7, *rest], [7, *rest, *([0] if rest else [])]]
    seen.clear()
    runner.execute(admitted(0))
    assert seen == [[]]


def test_an_adapter_has_blocks_of_its_own() -> None:
    """The root of block ids differs with the adapter's digest, and stays what it was without one."""
    layout = make_engine(random_model(model_config())).runner.storage.layout
    roots = {layout.root("00"), layout.root("00", "ab"), layout.root("00", "cd"), layout.root("01", "ab")}
    assert len(roots) == 4
    assert layout.root("00", "") == layout.root("00")
