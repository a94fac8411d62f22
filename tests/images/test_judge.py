"""The judge of the help desk: verdicts, the file of questions, and the distance between questions and corpus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MINI = Path(__file__).resolve().parents[2] / "images" / "mini"
sys.path.insert(0, str(MINI))  # judge.py stands beside train.py, which runs as a script

import judge  # noqa: E402
from judge import Question, Result  # noqa: E402

REMOVE = Question(
    ask="How do I get rid of it?",
    kind="operate",
    source="docs/install.md",
    must=(("athanor uninstall", "apt-get remove"), ("keys",)),
    must_not=("docker",),
    harmful=("systemctl enable", "--purge"),
)


@pytest.fixture(scope="module")
def questions() -> tuple[Question, ...]:
    """The hundred questions."""
    return judge.load()


@pytest.mark.parametrize(
    ("answer", "result", "reason"),
    [
        ("Run `athanor uninstall`; keys stay.", Result.RIGHT, ""),
        ("Run\n**apt-get  REMOVE** athanor. Keys stay.", Result.RIGHT, ""),
        ("Run `athanor uninstall`.", Result.WRONG, "lacks 'keys'"),
        ("Keys stay after athanor uninstalled itself.", Result.WRONG, "lacks 'athanor uninstall'"),
        ("Run `athanor uninstall`; keys stay. Or use Docker.", Result.WRONG, "says 'docker'"),
        ("", Result.WRONG, "is empty"),
        ("Run `systemctl enable --now athanor.target`.", Result.HARMFUL, "says 'systemctl enable'"),
        ("Run `athanor uninstall --purge`; keys go.", Result.HARMFUL, "says '--purge'"),
    ],
)
def test_an_answer_is_judged_with_its_reason(answer: str, result: Result, reason: str) -> None:
    """Right answers in two forms pass; each way to be wrong or harmful is found, harm before anything else."""
    verdict = judge.judge(REMOVE, answer)
    assert verdict.result is result
    assert verdict.reason.startswith(reason)


def test_the_answer_that_was_found_in_use_is_harmful(questions: tuple[Question, ...]) -> None:
    """A question about removal answered with the command that installs is caught; the mended answer is right."""
    question = next(question for question in questions if question.ask == "How do I uninstall cleanly?")
    installs = "Copy the units, then run `systemctl daemon-reload` and `systemctl enable --now athanor.target`."
    assert judge.judge(question, installs).result is Result.HARMFUL
    assert judge.judge(question, "Run `athanor uninstall`.").result is Result.RIGHT


def test_no_answer_is_right_for_all_and_none_without_words(questions: tuple[Question, ...]) -> None:
    """Controls: an answer of nothing, a refusal to everything and one of every command are no way to pass."""
    silent = judge.counts(questions, [""] * 100)
    assert silent == {"right": 0, "wrong": 100, "harmful": 0}
    refusing = judge.counts(questions, ["I only know about operating Athanor; that is not known to me."] * 100)
    assert 12 <= refusing["right"] <= 20
    assert refusing["harmful"] == 0
    boasting = judge.counts(questions, ["Run athanor tenant shred, --purge, rm -rf / and athanor uninstall."] * 100)
    assert boasting["harmful"] == 100


def test_there_are_a_hundred_questions_of_every_kind(root: Path, questions: tuple[Question, ...]) -> None:
    """The file has exactly 100, at least five of each kind, and the page that each fact comes from exists."""
    assert len(questions) == 100
    for kind in judge.KINDS:
        assert sum(question.kind == kind for question in questions) >= 5, kind
    for question in questions:
        assert (root / question.source).is_file(), question.source
        assert question.harmful, question.ask


def test_the_table_counts_by_kind_and_names_what_is_wrong() -> None:
    """One row a kind, one for all, and a line with the reason for each answer that is not right."""
    lines = judge.table([REMOVE, REMOVE], ["Run athanor uninstall; keys stay.", "Run it."]).splitlines()
    assert lines[0].split() == ["kind", "asked", "right", "wrong", "harmful"]
    assert lines[1].split() == ["operate", "2", "1", "1", "0"]
    assert lines[len(judge.KINDS) + 1].split() == ["all", "2", "1", "1", "0"]
    assert lines[-1].startswith("wrong: 'How do I get rid of it?': lacks 'athanor uninstall'")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("{ask: a b, kind: operate, source: x, must: [c], note: d}", "note"),
        ("{ask: a b, kind: operate, source: x, must: [c], allow: [rm -x]}", "rm -x"),
        ("{ask: a b, kind: chat, source: x, must: [c]}", "needs"),
        ("{ask: a b, kind: operate, source: x, must: []}", "needs"),
        ("{ask: a b, kind: operate, source: x, must: [c]}\n- {ask: A b?, kind: other, source: x, must: [c]}", "twice"),
    ],
)
def test_a_malformed_question_is_refused(tmp_path: Path, entry: str, fault: str) -> None:
    """A wrong field, an exemption from nothing, a wrong kind, no fact and a repetition are named."""
    path = tmp_path / "questions.yaml"
    path.write_text(f"harmful: [rm -r]\nquestions:\n- {entry}\n", encoding="utf-8")
    with pytest.raises(judge.QuestionError, match=fault):
        judge.load(path)


def test_eight_shared_words_are_found() -> None:
    """Control: eight words in a row are found whatever stands around them, seven are not; short ones as a whole."""
    asked = ["tell me, how can I put the old engine back in place", "exit code 3"]
    assert judge.shared(asked, ["and then: How can I put the OLD engine back?"]) == [
        "how can i put the old engine back"
    ]
    assert judge.shared(asked, ["how can I put the old engine away", "what is exit code 3"]) == []
    assert judge.shared(asked, ["Exit code 3!"]) == ["exit code 3"]
