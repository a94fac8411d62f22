"""The help desk's corpus: what it covers, how it is built, how it is asked, and its dialogues with tools."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

MINI = Path(__file__).resolve().parents[2] / "images" / "mini"
sys.path.insert(0, str(MINI))  # train.py and build.py run as scripts and import from there

import build  # noqa: E402
import judge  # noqa: E402
import train  # noqa: E402
from recipe import bpe, corpus, embeddings, export, generated, phrasing, references, tools, training  # noqa: E402
from recipe.rows import Source, dialogue_exchanges  # noqa: E402

MAX_PARAMETERS = 8_000_000
MAX_BYTES = 16_000_000
MAX_ANSWER = 400  # characters; the longest answer has to end within the tokens that expect.py allows
DRAWS = 3000


@pytest.fixture(scope="module")
def facts() -> tuple[references.Fact, ...]:
    """Every fact of docs/reference/."""
    return references.read()


@pytest.fixture(scope="module")
def topics() -> tuple[corpus.Topic, ...]:
    """The topics of the help desk."""
    return corpus.load_desk(MINI)


@pytest.fixture(scope="module")
def texts(topics: tuple[corpus.Topic, ...]) -> list[tuple[str, str]]:
    """Name of a topic and text, for all that its templates stand for."""
    return [
        (topic.name, text) for topic in topics for template in topic.templates for text in corpus.variants(template)
    ]


@pytest.fixture(scope="module")
def questions() -> tuple[judge.Question, ...]:
    """The hundred questions."""
    return judge.load()


def uncovered(facts: tuple[references.Fact, ...], topics: tuple[corpus.Topic, ...]) -> list[str]:
    """Facts without a topic that answers with their name."""
    owners = {name: topic for topic in topics for name in (topic.name, *topic.absorbs)}
    missing = []
    for fact in facts:
        topic = owners.get(fact.topic)
        last = fact.name.split(",")[0].split(" ")[-1].rsplit(".", 1)[-1].removesuffix("[]")
        if topic is None or last.split("{")[0].lower() not in topic.answer.lower():
            missing.append(fact.topic)
    return missing


def test_every_fact_of_the_references_is_answered(
    facts: tuple[references.Fact, ...], topics: tuple[corpus.Topic, ...]
) -> None:
    """Each command, key, error, metric, field, header and route has a topic whose answer names it."""
    assert uncovered(facts, topics) == []
    for kind, least in {"command": 40, "setting": 60, "policy": 30, "error": 20, "metric": 45}.items():
        assert sum(fact.kind == kind for fact in facts) >= least, kind


@pytest.mark.parametrize("kind", references.KINDS)
def test_a_new_fact_is_missed(kind: str, facts: tuple[references.Fact, ...], topics: tuple[corpus.Topic, ...]) -> None:
    """Control: one more fact of any kind is found to have no topic."""
    new = replace(
        next(fact for fact in facts if fact.kind == kind), name="418 brand_new" if kind == "error" else "new-x"
    )
    assert uncovered((*facts, new), topics) == [new.topic]


def test_the_generated_files_are_those_of_the_references(tmp_path: Path) -> None:
    """The command would write what is committed; control: a changed, a missing and a stray file are told."""
    assert build.stale() == []
    for name, text in generated.pages(references.read()).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "errors.md").write_text("other", encoding="utf-8")
    (tmp_path / "metrics.md").unlink()
    (tmp_path / "more.md").write_text("", encoding="utf-8")
    assert build.stale(tmp_path) == ["errors.md", "metrics.md", "more.md"]


def test_a_page_of_another_form_is_refused(tmp_path: Path) -> None:
    """References without any error, say, are a change of form and not an empty corpus."""
    for path in references.FOLDER.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace("## Errors", "## Faults"), encoding="utf-8")
    with pytest.raises(references.PageError, match="has no error"):
        references.read(tmp_path)


def test_names_that_are_said_to_be_unknown_are(
    facts: tuple[references.Fact, ...], texts: list[tuple[str, str]]
) -> None:
    """No command, key, metric or code of the refusals exists; a new one of that name fails here."""
    commands = {judge.words(fact.name) for fact in facts if fact.kind == "command"}
    named = {judge.words(fact.name) for fact in facts if fact.kind in ("setting", "metric")}
    named |= {judge.words(fact.name)[1:] for fact in facts if fact.kind == "error"}
    refused = [(name, judge.words(text)) for name, text in texts if name.startswith("unknown-")]
    assert len(refused) > 500
    for name, found in refused:
        runs = {found[i:j] for i in range(len(found)) for j in range(i + 2, len(found) + 1)}
        if name != "unknown-command":
            assert runs.isdisjoint(named), found
        elif judge.words(f"athanor {found[-1]}") != found:
            # A command and one word more: `athanor top share`. The command alone may exist.
            assert not any(run in commands for run in runs if len(run) == 3), found
        else:
            assert found not in commands


def test_no_question_of_the_desk_has_two_answers(texts: list[tuple[str, str]]) -> None:
    """Topics of all layers do not contradict each other, whatever template a question is made of."""
    owner: dict[str, str] = {}
    for name, text in texts:
        assert owner.setdefault(corpus.normal(text), name) == name, text


def test_answers_are_short_and_differ(topics: tuple[corpus.Topic, ...]) -> None:
    """Each topic has an answer of its own that ends within the tokens an engine gives it."""
    assert len({topic.answer for topic in topics}) >= len(topics) - 2
    assert max(len(topic.answer) for topic in topics) <= MAX_ANSWER


@pytest.mark.full
def test_the_corpus_has_a_right_answer_to_every_question(
    topics: tuple[corpus.Topic, ...], questions: tuple[judge.Question, ...]
) -> None:
    """The bar can be reached: some answer is right for each question, and few are, so that chance does not reach it."""
    for question in questions:
        right = [t.name for t in topics if judge.judge(question, t.answer).result is judge.Result.RIGHT]
        assert 1 <= len(right) <= 0.1 * len(topics), question.ask


@pytest.mark.full
def test_no_question_shares_eight_words_with_the_corpus(
    topics: tuple[corpus.Topic, ...], texts: list[tuple[str, str]], questions: tuple[judge.Question, ...]
) -> None:
    """Nothing of the hundred questions is in the corpus; control: one that is put there is found."""
    asked = [question.ask for question in questions]
    known = [text for _, text in texts] + [topic.answer for topic in topics]
    long = [text for text in asked if len(judge.words(text)) >= judge.GRAM]
    assert len(long) > 40
    assert judge.shared(long, known) == []
    assert judge.shared(long, [*known, f"and so: {long[5]}, please"]) != []


def test_no_question_is_ever_drawn(topics: tuple[corpus.Topic, ...], questions: tuple[judge.Question, ...]) -> None:
    """What training draws never is one of the hundred, nor holds eight words of one; control: both are refused."""
    refused = train.refusal()
    rng = random.Random(9)
    drawn = [phrasing.ask(rng.choice(topics), rng, refused) for _ in range(DRAWS)]
    assert judge.shared([question.ask for question in questions], drawn) == []
    assert all(refused(f"{question.ask} ") for question in questions)
    long = next(question.ask for question in questions if len(judge.words(question.ask)) > judge.GRAM)
    assert refused(f"hello, {long}, thanks")
    assert not refused("What is a tenant?")


def test_every_form_of_a_question_is_drawn() -> None:
    """Patterns, goals, situations, names and a few words all come up, and one seed gives one sequence."""
    topic = corpus.Topic(
        "t", ("xnamex",), ("xpatternx",), (), "a", goals=("xgoalx",), situations=("xsituationx",), keywords=("xwordx",)
    )
    first, second = ([phrasing.ask(topic, rng) for _ in range(300)] for rng in map(random.Random, (4, 4)))
    assert first == second
    for part in ("xnamex", "xpatternx", "xgoalx", "xsituationx", "xwordx"):
        assert sum(part in text.lower() for text in first) > 5, part


def test_layers_add_phrasings_and_the_last_answer_holds() -> None:
    """A later layer adds to a topic and replaces its answer; what a topic takes over is no topic any more."""
    below = [corpus.Topic("a", (), ("p",), (), "old"), corpus.Topic("b", (), ("q",), (), "other")]
    above = [corpus.Topic("a", ("n",), (), (), "new", absorbs=("b",))]
    (topic,) = corpus.combine([below, above])
    assert (topic.answer, set(topic.patterns), topic.phrases) == ("new", {"p", "q"}, ("n",))
    (kept, _) = corpus.combine([below, [corpus.Topic("a", (), (), (), "", goals=("g",))]])
    assert (kept.answer, kept.goals) == ("old", ("g",))


@pytest.mark.parametrize(
    ("topic", "fault"),
    [
        (corpus.Topic("c", (), ("p",), (), ""), "lacks"),
        (corpus.Topic("c", (), (), (), "answer"), "lacks"),
        (corpus.Topic("c", (), ("p",), (), "answer", absorbs=("gone",)), "takes over 'gone'"),
    ],
)
def test_a_topic_without_answer_or_phrasing_is_refused(topic: corpus.Topic, fault: str) -> None:
    """What no layer completes is an error that names the topic, as is one taken over that is not there."""
    with pytest.raises(corpus.CorpusError, match=fault):
        corpus.combine([[topic]])


def dialogues(count: int, seed: int = 3) -> list[tools.Dialogue]:
    """Seeded dialogues with tools."""
    rng = random.Random(seed)
    return [tools.draw(rng, ("What is a tenant?", "A team or customer.")) for _ in range(count)]


def test_dialogues_call_tools_that_are_offered_with_all_arguments() -> None:
    """Each call names an offered tool and fills what it requires from the question; a quarter of them needs none."""
    found = dialogues(200)
    assert found == dialogues(200) != dialogues(200, seed=4)
    called = 0
    for dialogue in found:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        assert len(offered) == len(dialogue.tools)
        for call in dialogue.messages[1].get("tool_calls", ()):
            called += 1
            arguments = call["function"]["arguments"]
            assert sorted(arguments) == sorted(offered[call["function"]["name"]]["required"])
            assert all(value in dialogue.messages[0]["content"] for value in arguments.values())
            assert dialogue.messages[2]["role"] == "tool"
    assert 120 < called < 190


def test_the_chat_template_renders_tools_as_training_does() -> None:
    """Tools, calls and results are the same text from the template that is written beside the model."""
    from expect import Reference

    reference = Reference(export_folder())
    tokenizer = export.read_model(export_folder())[1]
    for prompt, dialogue in itertools.product(("", "Be brief."), dialogues(20)):
        first = [{"role": "system", "content": prompt}] if prompt else []
        rendered = reference._tokenizer.apply_chat_template(
            [*first, *dialogue.messages], tools=list(dialogue.tools), chat_template=bpe.CHAT_TEMPLATE, tokenize=False
        )
        trained = [token for one in dialogue_exchanges(tokenizer, dialogue, prompt) for token in one.ids]
        assert rendered == tokenizer.decode(trained, skip_special_tokens=False)


def test_the_chat_template_renders_plain_chats_as_before() -> None:
    """Without tools the new template gives what the committed model's own one gives."""
    from expect import Reference

    reference = Reference(export_folder())
    for messages in (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    ):
        old, new = (
            reference._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **{"chat_template": template} if template else {}
            )
            for template in ("", bpe.CHAT_TEMPLATE)
        )
        assert old == new


def test_of_a_dialogue_only_the_assistant_is_trained() -> None:
    """Calls and answers are marked, end mark included; questions, tools and results are not."""
    tokenizer = export.read_model(export_folder())[1]
    dialogue = next(dialogue for dialogue in dialogues(20) if len(dialogue.messages) == 4)
    said = [one.ids[one.start : one.end] for one in dialogue_exchanges(tokenizer, dialogue)]
    spoken = [message for message in dialogue.messages if message["role"] == "assistant"]
    assert said == [bpe.reply(tokenizer, tools.content(message)) for message in spoken]


def test_the_next_model_is_within_its_bounds(topics: tuple[corpus.Topic, ...]) -> None:
    """The network that the recipe trains has at most 8 million parameters, 16 MB, and its whole vocabulary is used."""
    network = training.MiniLlama(training.ModelShape())
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count <= MAX_PARAMETERS
    assert 2 * count < MAX_BYTES
    assert training.ModelShape().vocab_size == bpe.VOCAB_SIZE


@pytest.mark.full
def test_batches_are_deterministic_and_of_every_kind(topics: tuple[corpus.Topic, ...]) -> None:
    """One seed gives one sequence of batches; rows of tools, chats and openings are among them, with little padding."""
    tokenizer = export.read_model(export_folder())[1]
    refused: Callable[[str], bool] = train.refusal()

    def some(seed: int) -> list[list[int]]:
        batches = Source(topics, tokenizer, tokens=1024, seed=seed, refused=refused).batches()
        return [batch.ids.flatten().tolist() for batch in itertools.islice(batches, 12)]

    assert some(1) == some(1) != some(2)
    batches = Source(topics, tokenizer, tokens=1024, seed=5).batches()
    shapes = {tuple(next(batches).ids.shape) for _ in range(60)}
    assert any(length >= 512 for _, length in shapes)
    assert all(rows * length <= 1024 for rows, length in shapes if length < 100)


@pytest.mark.full
def test_a_bag_of_words_tells_topics_apart_and_repeats() -> None:
    """After some steps questions find their topics; before, they do not; two runs give the same embeddings."""
    named = ("policy", "tenant", "sandbox", "engine")
    few = [corpus.Topic(name, (name,), (f"{{how about|what is}} {name}?",), (), f"About {name}.") for name in named]
    tokenizer = export.read_model(export_folder())[1]
    asked = [f"so what is {name}" for name in named]
    untrained, bag, again = (
        embeddings.train_bag(few, tokenizer, 32, 1, effort=embeddings.Effort(800, steps)) for steps in (0, 120, 120)
    )
    assert bag.tell(tokenizer, asked) == [0, 1, 2, 3] != untrained.tell(tokenizer, asked)
    assert bag.start().equal(again.start())
    assert bag.start().shape == (tokenizer.get_vocab_size(), 32)


def export_folder() -> Path:
    """Folder of the committed model, whose tokenizer serves these tests."""
    return MINI / "athanor-mini"
