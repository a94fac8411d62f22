"""policy.cases: the cases of this folder, and how a file of cases that is wrong, or fails, is told."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest

from policy.case_schema import CaseFileSchema, case_schema_text
from policy.cases import CaseResult, load_cases, run_cases
from policy.decision import Effect, Reason
from policy.errors import PolicyError
from policy.feature import Feature
from policy.loader import Source, load_policy
from policy.model import PolicySet
from policy.positions import load_yaml

FOLDER = Path(__file__).parent / "cases"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "errors.yaml")

LEAST_CASES = 300
"""Cases that the folder has at least."""


def policy_of(path: Path) -> PolicySet:
    """The policy that a file of cases holds."""
    file = load_cases(path.read_text(), path.name)
    assert file.content.policy is not None
    return load_policy([Source(path.name, file.content.policy)])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_case_holds(path: Path) -> None:
    """Each case of each file gives the decision that it expects: the engine of ``athanor policy test`` says so."""
    results = run_cases(load_cases(path.read_text(), path.name), policy_of(path))
    assert [str(problem) for result in results for problem in result.problems] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_case_can_fail(path: Path) -> None:
    """Control: with the opposite effect expected, every case of every file fails."""
    file = load_cases(path.read_text(), path.name)
    turned = [
        case.model_copy(update={"expect": case.expect.model_copy(update={"effect": opposite(case.expect.effect)})})
        for case in file.content.cases
    ]
    content = file.content.model_copy(update={"cases": turned})
    results = run_cases(type(file)(file.name, content, file.locator), policy_of(path))
    assert [result.name for result in results if result.passed] == []


def opposite(effect):
    """The other effect."""
    return next(one for one in type(effect) if one is not effect)


def test_the_cases_are_many_and_reach_every_reason_and_feature() -> None:
    """There are some hundred cases with names of their own; together they show each reason and ask for each feature."""
    cases = [(path.name, case) for path in FILES for case in load_cases(path.read_text(), path.name).content.cases]
    assert len(cases) >= LEAST_CASES
    assert len({(name, case.name) for name, case in cases}) == len(cases)
    assert {case.expect.reason for _, case in cases} - {None} == set(Reason)
    assert {case.expect.effect for _, case in cases} == set(Effect)
    assert {case.ask.feature for _, case in cases} >= set(Feature)
    assert {case.ask.credential is None for _, case in cases} == {True, False}


def test_files_of_cases_satisfy_the_published_schema() -> None:
    """The JSON Schema takes each file of this folder, short and long expectations, and refuses what the reader does."""
    validator = jsonschema.Draft202012Validator(json.loads(case_schema_text()))
    for path in FILES:
        validator.validate(load_yaml(path.read_text(), path.name)[0])
    ask = {"tenant": "a", "model": "m"}
    for expect in ("allow", "deny", {"effect": "deny", "reason": "concurrency", "retry_after_s": 1}):
        content = {"cases": [{"name": "n", "ask": ask, "expect": expect}]}
        validator.validate(content)
        CaseFileSchema.model_validate(content)
    for wrong in ("maybe", {"reason": "concurrency"}, {"effect": "deny", "reason": "mood"}):
        assert not validator.is_valid({"cases": [{"name": "n", "ask": ask, "expect": wrong}]})


POLICY = load_policy(
    [
        Source(
            "p.yaml", 'version: 1\ntenants: {alpha: {credentials: ["key:a"], models: ["m"], limits: {concurrency: 2}}}'
        )
    ]
)

TEXT = """\
cases:
  - name: a model that is allowed
    ask: {tenant: alpha, model: m}
    expect: allow
  - name: a model that is not
    ask: {tenant: alpha, model: x}
    expect: allow
  - name: two run already
    ask: {tenant: alpha, model: m}
    use: {running: 2}
    expect:
      effect: deny
      reason: request_rate
      rule: tenants.alpha.limits.concurrency
      limit: 3
      retry_after_s: 2.0
"""


def test_failures_have_places() -> None:
    """A difference is told at the expectation that is not met; what follows from another effect is not repeated."""
    passed, effect, details = run_cases(load_cases(TEXT, "c.yaml"), POLICY)
    assert (passed.passed, passed.line) == (True, 2)
    assert told(effect) == [
        "c.yaml:7:13: cases[1].expect.effect: expected allow, found deny: there is no such model, or this tenant may "
        "not use it (tenants.alpha.models)"
    ]
    assert told(details) == [
        "c.yaml:13:15: cases[2].expect.reason: expected request_rate, found concurrency",
        "c.yaml:15:14: cases[2].expect.limit: expected 3, found 2",
        "c.yaml:16:22: cases[2].expect.retry_after_s: expected 2.0, found 1.0",
    ]


def told(result: CaseResult) -> list[str]:
    """Problems of a case, as lines."""
    return [str(problem) for problem in result.problems]


def test_an_expected_nothing_is_compared() -> None:
    """``null`` expects that there is no such number; a key that is left out expects nothing."""
    text = TEXT.replace("limit: 3", "limit: null").replace("expect: allow", "expect: {effect: allow, limit: null}", 1)
    first, _, last = run_cases(load_cases(text, "c.yaml"), POLICY)
    assert first.passed
    assert "c.yaml:15:14: cases[2].expect.limit: expected none, found 2" in told(last)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cases: []\n", "c.yaml:1:8: cases: must have at least 1 entry"),
        ("cases: 3\n", "c.yaml:1:8: cases: must be a list, found 3"),
        ("tests: []\ncases: []\n", "c.yaml:1:1: tests: unknown key; known here: policy, policy_file, cases"),
        ("\tcases: []\n", "c.yaml:1:"),
        (
            "policy: a\npolicy_file: b\ncases: [{name: n, ask: {tenant: a, model: m}, expect: allow}]\n",
            "c.yaml:2:14: policy_file: policy and policy_file are both given; leave one out",
        ),
        (
            "cases:\n- {name: n, ask: {model: m}, expect: allow}\n",
            "c.yaml:2:18: cases[0].ask: exactly one of tenant and credential names the caller",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, credential: 'key:a', model: m}, expect: allow}\n",
            "c.yaml:2:18: cases[0].ask: exactly one of tenant and credential names the caller",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, model: m, admitted: true}, expect: allow}\n",
            "c.yaml:2:18: cases[0].ask: admitted, uncounted and longest_input need input_tokens",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, model: m, token: 3}, expect: allow}\n",
            "c.yaml:2:40: cases[0].ask.token: unknown key; did you mean 'max_tokens'?",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, model: m}, expect: {effect: deny, rules: x}}\n",
            "c.yaml:2:64: cases[0].expect.rules: unknown key; did you mean 'rule'?",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, model: m, choices: 0}, expect: allow}\n",
            "c.yaml:2:49: cases[0].ask.choices: must be at least 1, found 0",
        ),
        (
            "cases:\n- {name: n, ask: {tenant: a, model: m}, expect: maybe}\n",
            "c.yaml:2:49: cases[0].expect.effect: must be 'allow', 'wait' or 'deny', found 'maybe'",
        ),
    ],
)
def test_files_that_are_no_cases(text: str, problem: str) -> None:
    """Each mistake is told with its line and column."""
    with pytest.raises(PolicyError) as caught:
        load_cases(dedent(text), "c.yaml")
    assert str(caught.value).startswith(problem)
