"""The embedded model's training on an accelerator: what is drawn in advance, its batches, and the training itself."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

MINI = Path(__file__).resolve().parents[2] / "images" / "mini"
sys.path.insert(0, str(MINI))  # train.py and card.py run as scripts and import from there

import card  # noqa: E402
import judge  # noqa: E402
import train  # noqa: E402
from recipe import accelerated, corpus, drawing, drawn, export, measure, packing, training  # noqa: E402
from recipe.model import MiniLlama, ModelShape  # noqa: E402
from recipe.rows import collate, make_exchange, pad  # noqa: E402

AMOUNT = drawing.Amount(questions=3000, dialogues=40)
SMALL = ModelShape(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def topics() -> tuple[corpus.Topic, ...]:
    """The topics of the help desk."""
    return corpus.load_desk(MINI)


@pytest.fixture(scope="module")
def rows(topics: tuple[corpus.Topic, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of drawn questions."""
    _, tokenizer = export.read_model(MINI / "athanor-mini")
    path = tmp_path_factory.mktemp("card") / "rows.npz"
    drawn.save(drawing.draw(topics, tokenizer, seed=4, amount=AMOUNT, refused=train.refusal()), path)
    return path


@pytest.fixture(scope="module")
def found(rows: Path) -> drawn.Drawn:
    """What the file has."""
    return drawn.load(rows)


def packed(found: drawn.Drawn, count: int, *, tokens: int = 1024, seed: int = 1, dropped: float = 0.0) -> list:
    """The first batches of a packer."""
    return list(itertools.islice(packing.Packer(found, tokens=tokens, seed=seed, dropped=dropped).batches(), count))


@pytest.mark.full
def test_no_drawn_question_is_one_of_the_hundred(found: drawn.Drawn) -> None:
    """The file that training reads has none of the hundred questions, nor eight words of one; control: some it has."""
    _, tokenizer = export.read_model(MINI / "athanor-mini")
    starts, lengths = (part[found.first_question :] for part in (found.texts.starts, found.texts.lengths))
    texts = tokenizer.decode_batch(
        [found.texts.tokens[at : at + size].tolist() for at, size in zip(starts, lengths, strict=True)]
    )
    assert len(texts) == AMOUNT.questions
    asked = [question.ask for question in judge.load()]
    assert judge.shared(asked, texts) == []
    assert judge.shared([texts[7]], texts) != []


def test_a_packed_row_is_that_of_the_recipe(found: drawn.Drawn, topics: tuple[corpus.Topic, ...]) -> None:
    """Ids, targets, weights and places of answers are those that rows.py makes of the same question."""
    _, tokenizer = export.read_model(MINI / "athanor-mini")
    for batch, (question, answer) in zip(packing.held_out(found, rows=1), measure.held_out(topics)[:20], strict=False):
        one = pad([collate([make_exchange(tokenizer, question, answer)])])
        size = one.ids.shape[1] - 1  # the newline after the answer is not part of what is measured
        for name in ("ids", "positions", "targets", "weights"):
            assert getattr(batch, name)[0, :size].tolist() == getattr(one, name)[0, :size].tolist(), name
        (begins,) = (batch.labels[0] != packing.NO_LABEL).nonzero().flatten().tolist()
        assert one.answers[0].nonzero()[0].item() == begins
        assert topics[int(batch.labels[0, begins])].answer == answer


def test_batches_are_deterministic_within_their_bounds_and_of_every_kind(found: drawn.Drawn) -> None:
    """One seed gives one sequence; no position is outside of the context and some are far; little is padding."""
    batches = packed(found, 200)  # one kind in twenty is rare: no draw of these leaves it out
    again, other = packed(found, 8), packed(found, 8, seed=2)
    assert all(one.ids.equal(two.ids) for one, two in zip(batches, again, strict=False))
    assert not all(one.ids.equal(two.ids) for one, two in zip(batches, other, strict=False))
    highest = max(int(batch.positions.max()) for batch in batches)
    assert 2000 < highest < packing.MAX_POSITIONS
    assert any(batch.ids.shape[1] == packing.CHAT_TOKENS for batch in batches)
    assert any(int((batch.labels != packing.NO_LABEL).sum()) == 0 for batch in batches)  # dialogues with tools
    used = sum(int((batch.weights > 0).sum()) for batch in batches)
    assert used > 0.75 * sum(batch.ids.numel() for batch in batches)


def test_words_are_left_out_of_questions_only(found: drawn.Drawn) -> None:
    """With everything left out of every other question, the answers and what frames them stay whole."""
    whole = packed(found, 30)
    thinned = packed(found, 30, dropped=1.0)

    def tokens(batches: list) -> int:
        return sum(int((batch.weights > 0).sum()) for batch in batches)

    assert tokens(thinned) < 0.95 * tokens(whole)
    texts = found.texts
    answers = {
        tuple(texts.tokens[at : at + 3]) for at in texts.starts[found.first_answer : found.first_question].tolist()
    }
    for batch in thinned:
        for row, column in (batch.labels != packing.NO_LABEL).nonzero().tolist():
            said = batch.targets[row, column : column + 3]
            if len(said) == 3 and bool((batch.weights[row, column : column + 3] == 1).all()):
                assert tuple(np.array(said.tolist(), dtype=np.uint16)) in answers


def test_orthogonal_matrices_have_singular_values_of_about_one() -> None:
    """The iteration of Muon does what it promises, for tall and wide matrices together; control: before it they have
    not."""
    torch.manual_seed(1)
    for shape in ((3, 24, 48), (2, 48, 24)):
        x = torch.randn(shape)
        assert torch.linalg.svdvals(x).max() > 5
        values = torch.linalg.svdvals(accelerated.orthogonal(x))
        assert 0.3 < values.min() < values.max() < 1.5


def test_muon_is_that_of_torch() -> None:
    """Steps on all matrices of one shape together change them as torch's optimizer does one by one."""
    torch.manual_seed(2)
    ours = [torch.nn.Parameter(torch.randn(16, 32)) for _ in range(3)]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    muon = accelerated.Muon(ours, weight_decay=0.1, dtype=torch.bfloat16)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn(16, 32)
            two.grad = one.grad.clone()
        muon.step(0.02)
        reference.step()
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, atol=5e-3)


def test_training_lowers_the_loss_and_saves_weights_on_the_way(found: drawn.Drawn) -> None:
    """Some steps learn something, weights are saved before the end, and what is given back are the last saved."""
    saved: list[dict[str, torch.Tensor]] = []
    lines: list[str] = []
    plan = dataclasses.replace(accelerated.Plan(), steps=12, seconds=600, tokens=512, warm_up=2, save_every=0.0)
    network = accelerated.train(
        found, SMALL, plan, CPU, lambda weights: saved.append({k: v.clone() for k, v in weights.items()}), lines.append
    )
    assert len(saved) == plan.steps + 1
    assert all(network.state_dict()[name].equal(weight) for name, weight in saved[-1].items())
    (batch,) = packed(found, 1, seed=9)
    classifier = torch.nn.Linear(SMALL.hidden_size, found.answers)
    torch.manual_seed(plan.seed)
    with torch.no_grad():
        before, _ = accelerated.losses(MiniLlama(SMALL).eval(), classifier, batch, 0.0)
        after, _ = accelerated.losses(network, classifier, batch, 0.0)
    assert float(after) < float(before) - 0.3
    assert lines[-1].startswith("step 12 loss ")


def test_the_clock_ends_a_training(found: drawn.Drawn) -> None:
    """When the seconds are over, no further step is made."""
    lines: list[str] = []
    plan = dataclasses.replace(accelerated.Plan(), seconds=1e-9, tokens=512)
    accelerated.train(found, SMALL, plan, CPU, lambda _weights: None, lines.append)
    assert lines == []


@pytest.mark.full
def test_the_command_leaves_weights_that_make_a_model(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """card.py writes the weights and the plan; from them comes a model that reads back with the same weights."""
    options = {"--steps": 2, "--tokens": 256, "--width": 64, "--inner": 96, "--device": "cpu"}
    words = [str(word) for option in options.items() for word in option]
    monkeypatch.setattr(sys, "argv", ["card.py", "--rows", str(rows), "--out", str(tmp_path / "w"), *words])
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)  # those of the other tests are not changed
    card.main()
    assert "held out" in capsys.readouterr().out
    made = train._finish(rows, tmp_path / "w")
    export.write_model(tmp_path / "m", made.network, made.tokenizer)
    network, tokenizer = export.read_model(tmp_path / "m")
    assert tokenizer.to_str() == made.tokenizer.to_str()
    assert all(one.equal(two) for one, two in zip(network.parameters(), made.network.parameters(), strict=True))
    assert made.facts["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert training.ModelShape().head_dim == network.shape.head_dim
