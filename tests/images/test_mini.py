"""The embedded model: its files, its answers, its corpus and the way it is made."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

MINI = Path(__file__).resolve().parents[2] / "images" / "mini"
sys.path.insert(0, str(MINI))  # train.py and expect.py run as scripts and import from there

import judge  # noqa: E402
import train  # noqa: E402
from recipe import bpe, corpus, export, measure, phrasing, training  # noqa: E402
from recipe.rows import Source, collate, make_exchange, pad  # noqa: E402

if TYPE_CHECKING:
    from expect import Reference

MODEL = MINI / "athanor-mini"
MAX_WEIGHT_BYTES = 16_000_000  # it is committed, and travels in every installation
LOSS_TOLERANCE = 2e-3  # nats; another machine adds in another order
GREEDY_CHECKED = 3  # answers made again here; expect.py makes them all
TINY = training.Schedule(steps=7, tokens=256, warm_up=2)


@pytest.fixture(scope="module")
def topics() -> tuple[corpus.Topic, ...]:
    """The topics of the committed corpus."""
    return corpus.load(MINI / "corpus")


@pytest.fixture(scope="module")
def record() -> dict:
    """MODEL.json of the committed model."""
    return export.read_record(MODEL)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The committed model as transformers runs it; imported here, since it takes each worker three seconds."""
    from expect import Reference

    return Reference(MODEL)


@pytest.fixture(scope="module")
def expected() -> dict:
    """What expect.py recorded."""
    return json.loads((MINI / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def entries(expected: dict) -> list[dict]:
    """The recorded prompts and greedy answers."""
    return expected["entries"]


def _ask(reference: Reference, *messages: dict[str, str]) -> str:
    """The greedy answer as text; it must have ended by itself."""
    ids = reference.answer(reference.prompt(list(messages)))
    assert ids[-1] == bpe.TURN_END_ID
    return reference.text(ids)


def test_committed_files_have_the_recorded_digests(record: dict) -> None:
    """Every file that the engine reads is the one that was measured."""
    assert export.digests(MODEL) == record["sha256"]


def test_expected_answers_belong_to_the_committed_weights(record: dict, expected: dict) -> None:
    """expected.json was made from these weights and not from earlier ones."""
    assert expected["weights_sha256"] == record["sha256"]["model.safetensors"]


def test_weights_are_small_bfloat16_and_all_used(record: dict) -> None:
    """The file is under its size bar, holds bfloat16 only, and the count is the recorded one."""
    weights = load_file(MODEL / "model.safetensors")
    assert (MODEL / "model.safetensors").stat().st_size < MAX_WEIGHT_BYTES
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == record["parameters"]


@pytest.mark.full
def test_held_out_questions_score_as_recorded(expected: dict) -> None:
    """Measured again from the artefact, loss and exactness of questions that it was not trained on are the recorded
    ones, and most find their answers."""
    network, tokenizer = export.read_model(MODEL)
    recorded = expected["held_out"]
    score = measure.score(network, tokenizer, [tuple(one) for one in recorded["questions"]])
    assert score.loss == pytest.approx(recorded["loss"], abs=LOSS_TOLERANCE)
    assert abs(score.exact - recorded["exact"]) <= 1
    assert score.exact > 0.5 * score.total


def test_the_page_tells_how_many_of_the_hundred_are_right(record: dict) -> None:
    """The table of README.md has the verdicts on the committed weights that MODEL.json has."""
    asked = record["questions"]
    assert sum(asked.values()) == len(judge.load()) == 100
    row = f"| the committed weights, on `desk/` | {asked['right']} | {asked['wrong']} | {asked['harmful']} |"
    assert row in (MINI / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_hundred_questions_are_answered_as_recorded(record: dict) -> None:
    """Asked again, the hundred questions get the verdicts of MODEL.json."""
    asked = judge.load()
    assert judge.counts(asked, train.answers(MODEL, asked)) == record["questions"]


def test_untrained_network_scores_badly(topics: tuple[corpus.Topic, ...]) -> None:
    """The measure tells a trained network from random weights."""
    _, tokenizer = export.read_model(MODEL)
    torch.manual_seed(0)
    network = training.MiniLlama(training.ModelShape())
    score = measure.score(network, tokenizer, measure.held_out(topics)[:8])
    assert score.exact == 0
    assert score.loss > 5.0


def test_recorded_answers_come_back_with_transformers(reference: Reference, entries: list[dict]) -> None:
    """Greedy decoding by an independent implementation gives the recorded token ids."""
    for entry in entries[:: len(entries) // GREEDY_CHECKED][:GREEDY_CHECKED]:
        assert reference.prompt(entry["messages"]) == entry["prompt_ids"]
        assert reference.answer(entry["prompt_ids"]) == entry["answer_ids"]


def test_recorded_answers_are_right_and_end(entries: list[dict]) -> None:
    """At least 24 recorded answers, 8 to phrasings that were not trained on: each ended, and at most one in twelve not
    word for word what the corpus had when the weights were made."""
    assert len(entries) >= 24
    assert sum(entry["held_out"] for entry in entries) >= 8
    assert all(entry["answer_ids"][-1] == bpe.TURN_END_ID for entry in entries)
    assert sum(not entry["right"] for entry in entries) <= len(entries) // 12


def test_newcomer_learns_how_to_add_a_tenant(reference: Reference) -> None:
    """The answer names the file to edit, the key to make and the reload."""
    answer = _ask(reference, {"role": "user", "content": "How do I add a tenant?"})
    for part in ("policy.yaml", "athanor key create", "athanor reload"):
        assert part in answer


@pytest.mark.full
def test_late_question_is_answered_after_3500_tokens(reference: Reference, entries: list[dict]) -> None:
    """A long conversation before the question does not change the answer."""
    entry = max(entries, key=lambda entry: len(entry["prompt_ids"]))
    assert len(entry["prompt_ids"]) >= 3500
    answer = _ask(reference, *entry["messages"])
    assert answer == _ask(reference, entry["messages"][-1])


def test_off_topic_question_is_declined(reference: Reference) -> None:
    """The model says what it is for where it knows nothing."""
    answer = _ask(reference, {"role": "user", "content": "What is the capital of France?"})
    assert answer.startswith("I only know about operating Athanor")


def test_chat_template_gives_the_training_format(reference: Reference) -> None:
    """What serving renders is, token for token, what training saw."""
    _, tokenizer = export.read_model(MODEL)
    first = make_exchange(tokenizer, "What is a sandbox?", "A box.")
    second = make_exchange(tokenizer, "Hello", "Hello.")
    messages = [
        {"role": "user", "content": "What is a sandbox?"},
        {"role": "assistant", "content": "A box."},
        {"role": "user", "content": "Hello"},
    ]
    assert reference.prompt(messages) == first.ids + second.ids[: second.start]


@pytest.mark.parametrize("text", ["", "a\n b\t", "\u00e9\u4e2d\U0001f600", "<|im_end", "\x00\x7f"])
def test_tokenizer_is_lossless(text: str) -> None:
    """Byte-level BPE gives any text back."""
    _, tokenizer = export.read_model(MODEL)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_corpus_is_rich(topics: tuple[corpus.Topic, ...]) -> None:
    """Enough topics, and for each enough ways to ask."""
    assert len(topics) >= 60
    for topic in topics:
        assert sum(len(corpus.variants(pattern)) for pattern in topic.patterns) >= 20, topic.name
        assert topic.held_out, topic.name
    off_topic = next(topic for topic in topics if topic.name == "off-topic")
    assert len(off_topic.patterns) >= 40


def test_no_question_has_two_answers(topics: tuple[corpus.Topic, ...]) -> None:
    """Topics do not contradict each other."""
    owner: dict[str, str] = {}
    for topic in topics:
        for pattern in topic.patterns:
            for text in corpus.variants(pattern):
                assert owner.setdefault(corpus.normal(text), topic.name) == topic.name, text


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("# T\n\n## a\n* t\n- q\n? bad\n\nanswer\n", "x.md:6"),
        ("## a\n- q\n", "x.md:1"),
        ("## a\n- q\n\none\n\n## a\n- r\n\ntwo\n", "topics occur twice: a"),
        ("## a\n- q {b|c}\n+ Q c?\n\none\n", "held out and trained"),
    ],
)
def test_malformed_corpus_is_refused(tmp_path: Path, text: str, place: str) -> None:
    """An error names the place; a held-out phrasing that is trained on is an error too."""
    (tmp_path / "x.md").write_text(text, encoding="utf-8")
    with pytest.raises(corpus.CorpusError, match=place):
        corpus.load(tmp_path)


def test_phrasing_is_deterministic_and_varied(topics: tuple[corpus.Topic, ...]) -> None:
    """One seed gives one sequence of questions; another gives another."""
    draws = [[phrasing.ask(topics[3], rng) for _ in range(40)] for rng in map(random.Random, (1, 1, 2))]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) > 20


def test_held_out_phrasings_are_never_drawn() -> None:
    """Even where a template leads to one, training does not see it."""
    topic = corpus.Topic("t", (), ("{yes|no}?",), ("no",), "answer")
    rng = random.Random(0)
    drawn = {corpus.normal(phrasing.ask(topic, rng)) for _ in range(200)}
    assert "yes" in drawn
    assert "no" not in drawn


@pytest.mark.full
def test_gaps_stay_inside_the_context(topics: tuple[corpus.Topic, ...]) -> None:
    """No batch trains a position outside the model's context, and some come near its end."""
    tokenizer = export.read_model(MODEL)[1]
    batches = Source(topics, tokenizer, tokens=512, seed=3).batches()
    highest = max(int(next(batches).positions.max()) for _ in range(150))
    assert 3000 < highest < training.ModelShape().max_position_embeddings


def test_only_answers_and_questions_weigh(topics: tuple[corpus.Topic, ...]) -> None:
    """The loss counts answer tokens fully, the end mark included, others a little, padding not."""
    tokenizer = export.read_model(MODEL)[1]
    long = make_exchange(tokenizer, "What is a sandbox?", topics[0].answer)
    short = make_exchange(tokenizer, "Hi", "Yes.")
    batch = pad([collate([long]), collate([short])])
    answer = batch.targets[1][batch.answers[1]].tolist()
    assert answer == bpe.reply(tokenizer, "Yes.")
    assert sorted(set(batch.weights[1].tolist())) == pytest.approx([0.0, 0.1, 1.0])


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Training sets torch's threads and its deterministic mode for the whole process: put back what was there."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.full
@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("layers", [1, 6])
def test_training_lowers_the_loss_and_repeats(
    layers: int, topics: tuple[corpus.Topic, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps learn something, and a second run gives the same losses bit for bit; at the full count with all
    layers of the embedded model in its whole width. The optimiser multiplies in bfloat16, which takes a processor
    without such instructions half a minute a step at that width."""
    shape = {"num_hidden_layers": layers} if layers > 1 else {"num_hidden_layers": 1, "hidden_size": 96}
    monkeypatch.setattr(training, "ModelShape", functools.partial(training.ModelShape, **shape))
    tokenizer = export.read_model(MODEL)[1]
    first = training.train(topics, tokenizer, TINY)
    second = training.train(topics, tokenizer, dataclasses.replace(TINY))
    assert first.losses == second.losses
    assert first.losses[-1] < first.losses[0] - 0.5
