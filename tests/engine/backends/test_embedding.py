"""Embeddings: hidden states pooled as transformers gives them, alone and in any company; files and hostile files."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.backends.plain.embedding import EmbeddingRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.errors import ConfigurationError, ModelLoadError
from engine.model.layers.pooling import POOLINGS, Pooling, PoolingMode, read_pooling
from engine.serve import serve
from engine.startup.load import load_engine
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, StepOutput
from isolation.ipc.messages import FailureCode, Finish
from tests.engine.support import model_config as llama_config
from tests.engine.support import namespace, save_model, submit

KINDS = ("Llama", "Qwen2", "Qwen3")
SOME_POOLINGS = (POOLINGS[0], "cls", "mean+normalise")
"""Each way to pool, with and without a vector of length one, which every run has of one family; the full counts have
every pair."""


def origin(folder: Path, family: str = "Qwen3") -> transformers.PreTrainedModel:
    """A random decoder without a head on disk, as embedding models are published."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 199,
        "max_position_embeddings": 128,
        "head_dim": 16,
    }
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}Model")(config).float().eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.3)
    model.save_pretrained(folder)
    return model


def engine_of(folder: Path, pooling: str, **changes: object) -> Engine:
    """An engine that embeds."""
    values = {
        "model_dir": str(folder),
        "model_digest": "00",
        "runner": "embed",
        "pooling": pooling,
        "kv_bytes": 1 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        **changes,
    }
    return load_engine(EngineConfig(**values), warm=bool(changes.get("threads")))


def texts(count: int, longest: int = 60) -> list[list[int]]:
    """Random ids."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 199, (length,), generator=generator).tolist() for length in lengths]


def reference(model: transformers.PreTrainedModel, ids: list[int], pooling: Pooling) -> torch.Tensor:
    """What sentence-transformers would make of the reference's hidden states."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    vector = {PoolingMode.LAST: hidden[-1], PoolingMode.MEAN: hidden.mean(0), PoolingMode.CLS: hidden[0]}[pooling.mode]
    return torch.nn.functional.normalize(vector, dim=0) if pooling.normalise else vector


def embed(number: int, ids: list[int], tenant: int = 1, **fields: object) -> Embed:
    """A text of a tenant."""
    return Embed(number, namespace(tenant), array("I", ids), **fields)


def run(engine: Engine) -> tuple[dict[int, torch.Tensor], dict[int, object]]:
    """Step to the end: vectors and how requests ended, by request."""
    vectors: dict[int, torch.Tensor] = {}
    ends: dict[int, object] = {}
    while engine.has_work:
        output = engine.step()
        for one in engine.take_embeddings():
            assert one.request not in vectors
            assert one.request not in ends
            vectors[one.request] = torch.tensor(one.values)
        if output is not None:
            for request, finish in zip(output.requests, output.finishes, strict=True):
                assert request in vectors
                ends[request] = Finish(finish)
            ends |= {failure.request: failure.code for failure in output.failures}
        engine.scheduler.check_integrity()
    return vectors, ends


@pytest.mark.parametrize(
    ("pooling", "family"),
    [
        pytest.param(
            pooling, family, marks=() if family == KINDS[-1] and pooling in SOME_POOLINGS else pytest.mark.full
        )
        for pooling in POOLINGS
        for family in KINDS
    ],
)
def test_vectors_are_those_of_the_reference(family: str, pooling: str, tmp_path: Path) -> None:
    """Every family and every pooling, in the full counts each with each, alone and with twenty strangers of four
    tenants, whole and in chunks of any size: the reference's vectors to 1e-4, and one end for each request."""
    model = origin(tmp_path, family)
    way = read_pooling(pooling, "")
    wanted = [reference(model, ids, way) for ids in texts(20)]
    for budget in (8, 13, 512):
        engine = engine_of(tmp_path, pooling, max_num_batched_tokens=budget)
        for number, ids in enumerate(texts(20)):
            engine.embed(embed(number, ids, number % 4))
        vectors, ends = run(engine)
        assert ends == dict.fromkeys(range(20), Finish.LENGTH)
        for number, one in enumerate(wanted):
            assert torch.allclose(vectors[number], one, atol=1e-4, rtol=1e-4), (budget, number)
    engine = engine_of(tmp_path, pooling)
    for number, ids in enumerate(texts(20)):
        engine.embed(embed(number, ids))
        assert torch.allclose(run(engine)[0][number], wanted[number], atol=1e-4, rtol=1e-4)


def test_a_text_may_fill_the_context_and_not_pass_it(tmp_path: Path) -> None:
    """All 128 positions of a model can be pooled; one more is refused, as are strange ids and none."""
    model = origin(tmp_path)
    engine = engine_of(tmp_path, "mean")
    whole = texts(1, 2)[0] * 128
    engine.embed(embed(1, whole))
    engine.embed(embed(2, [*whole, 1]))
    engine.embed(embed(3, [199]))
    engine.embed(embed(4, []))
    vectors, ends = run(engine)
    assert torch.allclose(vectors[1], reference(model, whole, Pooling(PoolingMode.MEAN, False)), atol=1e-4)
    assert ends == {1: Finish.LENGTH, 2: FailureCode.TOO_LONG, 3: FailureCode.INVALID, 4: FailureCode.INVALID}


def test_preempted_and_aborted_texts(tmp_path: Path) -> None:
    """With memory for little more than one text others wait or begin anew, to the same vectors; an aborted one gives
    none and its row serves the next."""
    model = origin(tmp_path)
    probe = engine_of(tmp_path, "mean").runner.storage.layout.block_bytes
    engine = engine_of(tmp_path, "mean", kv_bytes=34 * probe, max_num_batched_tokens=8)
    ids = [one * 3 for one in texts(6, 40)]
    for number, one in enumerate(ids):
        engine.embed(embed(number, one, number % 3))
    engine.step()
    engine.take_embeddings()
    engine.abort(0)
    vectors, ends = run(engine)
    assert ends[0] is FailureCode.ABORTED
    assert set(vectors) == set(range(1, 6))
    for number, one in vectors.items():
        assert torch.allclose(one, reference(model, ids[number], Pooling(PoolingMode.MEAN, False)), atol=1e-4)


def test_nothing_of_a_text_is_found_by_another(tmp_path: Path) -> None:
    """The same text twice is computed twice: no prefix is kept, for a mean needs all hidden states."""
    origin(tmp_path)
    engine = engine_of(tmp_path, "mean")
    for number in range(2):
        engine.embed(embed(number, texts(1)[0]))
        output = engine.step()
        assert output is not None
        assert [start.cached_tokens for start in output.starts] == [0]
        run(engine)


def test_a_broken_vector_fails_its_request_alone(tmp_path: Path) -> None:
    """A text whose hidden states are not finite ends as a defect; those beside it have their vectors."""
    model = origin(tmp_path)
    engine = engine_of(tmp_path, "last")
    runner = engine.runner
    assert isinstance(runner, EmbeddingRunner)
    runner.model.embedding.weight[7] = math.inf
    engine.embed(embed(1, [7, 8]))
    engine.embed(embed(2, [9, 10]))
    vectors, ends = run(engine)
    assert ends == {1: FailureCode.INTERNAL, 2: Finish.LENGTH}
    assert torch.allclose(vectors[2], reference(model, [9, 10], Pooling(PoolingMode.LAST, False)), atol=1e-4)


def test_warm_up_and_what_is_said(tmp_path: Path) -> None:
    """An engine that was warmed up embeds as one that was not, and says how it pools."""
    model = origin(tmp_path)
    engine = engine_of(tmp_path, "last+normalise", threads=1)
    assert "last pooling, normalised" in engine.runner.description
    assert engine.ready().max_context == 129
    engine.embed(embed(1, [5, 6, 7]))
    expected = reference(model, [5, 6, 7], Pooling(PoolingMode.LAST, True))
    assert torch.allclose(run(engine)[0][1], expected, atol=1e-4)


class Script:
    """A host that sends these messages and then drains; remembers what comes."""

    def __init__(self, *messages: Message) -> None:
        self._messages = [*messages, Drain()]
        self.received: list[Message] = []

    def send(self, message: Message, *, urgent: bool) -> None:
        """Remember it."""
        self.received.append(message)

    def receive(self, limit: int) -> list[Message]:
        """All at once."""
        messages, self._messages = self._messages, []
        return messages[:limit]

    def wait(self, timeout_s: float) -> bool:
        """Nothing more comes."""
        return False


def test_each_engine_takes_its_own_kind_of_request(tmp_path: Path) -> None:
    """Over the loop's channel: an engine that embeds refuses to generate and the other way round; vectors come before
    the step that ends their requests."""
    origin(tmp_path / "a")
    script = Script(embed(1, [5, 6]), submit(2, [5, 6]), embed(3, [7]), Abort(9))
    serve(engine_of(tmp_path / "a", "last"), script)
    kinds = [type(one) for one in script.received]
    assert kinds.index(Embedding) < kinds.index(StepOutput) + 1
    assert {one.request for one in script.received if isinstance(one, Embedding)} == {1, 3}
    failures = [one for step in script.received if isinstance(step, StepOutput) for one in step.failures]
    assert [(one.request, one.code) for one in failures] == [(2, FailureCode.INVALID)]
    (tmp_path / "b").mkdir()
    save_model(tmp_path / "b", llama_config())
    script = Script(embed(1, [5, 6]), submit(2, [5, 6], 2))
    serve(
        load_engine(EngineConfig(model_dir=str(tmp_path / "b"), model_digest="00", kv_bytes=1 << 20), warm=False),
        script,
    )
    steps = [one for one in script.received if isinstance(one, StepOutput)]
    assert len(steps) == len(script.received)
    assert [(one.request, one.code) for step in steps for one in step.failures] == [(1, FailureCode.INVALID)]
    assert [request for step in steps for request in step.requests] == [2, 2]


def test_whole_checkpoints_serve_as_well(tmp_path: Path) -> None:
    """The same decoder with a head and full names gives the same vectors: the head is not read."""
    model = origin(tmp_path / "bare")
    (tmp_path / "whole").mkdir()
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    named = {f"model.{name}": one for name, one in tensors.items()}
    save_file({**named, "lm_head.weight": torch.full((199, 64), math.nan)}, tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    changed = {**config, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(changed))
    engine = engine_of(tmp_path / "whole", "last")
    engine.embed(embed(1, [5, 6, 7]))
    expected = reference(model, [5, 6, 7], Pooling(PoolingMode.LAST, False))
    assert torch.allclose(run(engine)[0][1], expected, atol=1e-4)


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
QWEN3_POOLING = {
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def write_pooling(folder: Path, modules: object, pooling: object) -> None:
    """The two files."""
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "pooling.json").write_text(json.dumps(pooling))


def test_pooling_from_the_models_own_files(tmp_path: Path) -> None:
    """As sentence-transformers writes them, old form and new, with and without normalising."""
    write_pooling(tmp_path, MODULES, QWEN3_POOLING)
    assert read_pooling("auto", str(tmp_path)) == Pooling(PoolingMode.LAST, True)
    write_pooling(
        tmp_path, MODULES[:2], {**QWEN3_POOLING, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    )
    assert read_pooling("auto", str(tmp_path)) == Pooling(PoolingMode.MEAN, False)
    write_pooling(tmp_path, MODULES, {"pooling_mode": "cls", "embedding_dimension": 3})
    assert read_pooling("auto", str(tmp_path)) == Pooling(PoolingMode.CLS, True)
    write_pooling(tmp_path, MODULES, {"pooling_mode": "lasttoken"})
    assert read_pooling("auto", str(tmp_path)) == Pooling(PoolingMode.LAST, True)


DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        ({}, QWEN3_POOLING, "not a list"),
        ([*MODULES[:2], DENSE], QWEN3_POOLING, "supported are"),
        ([MODULES[0]], QWEN3_POOLING, "supported are"),
        ([MODULES[1], MODULES[0]], QWEN3_POOLING, "supported are"),
        ([1, None], QWEN3_POOLING, "supported are"),
        ([MODULES[0], {**MODULES[1], "path": "../../etc"}], QWEN3_POOLING, "1_Pooling"),
        (MODULES * 10, QWEN3_POOLING, "at most 8"),
        (MODULES, [], "not a JSON object"),
        (MODULES, {}, "exactly one"),
        (MODULES, {**QWEN3_POOLING, "pooling_mode_cls_token": True}, "exactly one"),
        (MODULES, {"pooling_mode_max_tokens": True}, "exactly one"),
        (MODULES, {"pooling_mode": "max"}, "exactly one"),
    ],
)
def test_pooling_that_is_not_understood_is_refused(
    modules: object, pooling: object, message: str, tmp_path: Path
) -> None:
    """Another module, another mode, or files of another shape: an error that says what is supported."""
    write_pooling(tmp_path, modules, pooling)
    with pytest.raises(ModelLoadError, match=message):
        read_pooling("auto", str(tmp_path))


def test_pooling_that_nobody_tells_is_refused(tmp_path: Path) -> None:
    """Without files the configuration must say it, and only what there is, and only where something is pooled."""
    with pytest.raises(ModelLoadError, match="say it as pooling"):
        read_pooling("auto", str(tmp_path))
    for pooling, runner in (("max", "embed"), ("last", "model"), ("", "embed")):
        with pytest.raises(ConfigurationError, match="pooling"):
            load_engine(EngineConfig(model_dir=str(tmp_path), model_digest="", runner=runner, pooling=pooling))
