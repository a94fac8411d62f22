"""Classifiers: the numbers that transformers gives for each label, alone and in any company; files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.errors import ModelLoadError
from engine.startup.load import load_engine
from tests.engine.backends.test_embedding import embed, run, texts

FAMILIES = ("Llama", "Qwen3")


def origin(folder: Path, family: str, labels: int) -> transformers.PreTrainedModel:
    """A random classifier on disk, as it is published."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        max_position_embeddings=128,
        head_dim=16,
        num_labels=labels,
        # Without one transformers takes one text at a time; no text has this id.
        pad_token_id=198,
    )
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).float().eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.3)
    model.save_pretrained(folder)
    return model


def engine_of(folder: Path, **changes: object) -> Engine:
    """An engine that classifies."""
    values = {
        "model_dir": str(folder),
        "model_digest": "00",
        "runner": "classify",
        "kv_bytes": 1 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        **changes,
    }
    return load_engine(EngineConfig(**values), warm=bool(changes.get("threads")))


def expected(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The reference's logits."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 2, 5])
def test_the_references_numbers(family: str, labels: int, tmp_path: Path) -> None:
    """Two families, one label and several: texts of all lengths, in chunks and in batches with others, get the
    reference's logits to 1e-4."""
    model = origin(tmp_path, family, labels)
    engine = engine_of(tmp_path)
    ids = [[one % 198 for one in text] for text in texts(12)]
    for number, one in enumerate(ids):
        engine.embed(embed(number, one, number % 3))
    vectors, _ = run(engine)
    assert len(vectors) == len(ids)
    for number, one in vectors.items():
        assert one.shape == (labels,)
        assert torch.allclose(one, expected(model, ids[number]), atol=1e-4, rtol=1e-4)


def test_warm_up_and_what_is_said(tmp_path: Path) -> None:
    """An engine that was warmed up gives the same numbers, and says how many labels it has."""
    model = origin(tmp_path, "Qwen3", 3)
    engine = engine_of(tmp_path, threads=1)
    assert "3 labels by last pooling" in engine.runner.description
    engine.embed(embed(1, [5, 6, 7]))
    assert torch.allclose(run(engine)[0][1], expected(model, [5, 6, 7]), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "must name one classifier"),
        ({"architectures": None}, "must name one classifier"),
        ({"id2label": []}, "id2label must be a JSON object"),
        ({"id2label": {}}, "1 to 4096 labels"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be an integer from 1"),
        ({"id2label": {"0": "a", "1": "b"}}, "score.weight has shape"),
        ({"id2label": None}, "score.weight has shape"),
        ({"architectures": ["BertForSequenceClassification"]}, "architectures must name one of"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    """What is no classifier, has another number of labels than its head, or is of no family that is served: an error
    that says so. Control: the description as it was is loaded."""
    origin(tmp_path, "Qwen3", 3)
    engine_of(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        engine_of(tmp_path)


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    """A decoder alone under a classifier's name lacks its head, and the error names the tensor."""
    model = origin(tmp_path, "Qwen3", 3)
    config = (tmp_path / "config.json").read_text()
    model.model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=r"lacks 'score\.weight'"):
        engine_of(tmp_path)
