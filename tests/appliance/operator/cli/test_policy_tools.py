"""``policy explain``, ``policy test``, ``policy init`` and ``policy schema``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.operator.cli import exits
from policy.case_schema import case_schema_text
from policy.schema import schema_text
from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run, without_digests

GOLDEN = Path(__file__).parent / "golden"

POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["athanor-mini", "qwen3-*"]
    limits: {requests_per_minute: 60, tokens_per_minute: 6000, concurrency: 8, max_context_tokens: 2048}
    features: {tools: false}
"""

PRICED = POLICY.replace(
    "max_context_tokens: 2048}", "max_context_tokens: 2048, spend_per_day: 5, spend_per_month: 100}"
)
PRICED += "prices: {currency: EUR, rules: [{models: ['*'], input: 1, output: 2}]}\n"

CASES = """\
policy_file: policy.yaml
cases:
  - name: alpha chats
    ask: {credential: "key:alpha-1", model: athanor-mini, input_tokens: 900}
    expect: allow
  - name: alpha has no tools
    ask: {tenant: alpha, model: athanor-mini, feature: tools}
    expect: {effect: deny, reason: feature_not_allowed, rule: tenants.alpha.features.tools}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a policy and its cases."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "cases.yaml").write_text(CASES)
    return tmp_path


ALPHA = ("policy", "explain", "policy.yaml", "--tenant", "alpha", "--model", "qwen3-8b")


def test_an_allowance_is_explained(run: Run, folder: Path) -> None:
    """The rule, the grant and the tenant's terms; exit code 0."""
    told = run(*ALPHA, "--input-tokens", "900", "--max-tokens", "100")
    assert told.exit_code == exits.OK
    golden.check(GOLDEN / "policy-explain-allow-80.txt", without_digests(told.stdout))


def test_a_denial_is_explained(run: Run, folder: Path) -> None:
    """The rule, its limit, the number found and the time to wait; exit code 1."""
    told = run(*ALPHA, "--running", "8")
    assert told.exit_code == exits.REFUSED
    golden.check(GOLDEN / "policy-explain-deny-80.txt", without_digests(told.stdout))


def test_spend_is_explained_in_the_currency(run: Run, folder: Path) -> None:
    """A limit of spend and what was found are amounts, not billionths; the wait ends with the day. An allowance names
    the price."""
    (folder / "policy.yaml").write_text(PRICED)
    denied = run(*ALPHA, "--spent-today", "6.25").stdout
    assert "rule: tenants.alpha.limits.spend_per_day\n  limit: 5.00, found: 6.25\n  retry after: " in denied
    wait = float(denied.partition("retry after: ")[2].split()[0])
    assert 0 <= wait <= 86_400
    assert "price: 1.00 for a million prompt tokens, 2.00 for output" in run(*ALPHA).stdout


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((), "allowed"),
        (("--input-tokens", "2048"), "context_too_long"),
        (("--max-tokens", "1025"), "output_too_long"),
        (("--choices", "9"), "concurrency"),
        (("--feature", "tools"), "feature_not_allowed"),
        (("--feature", "tokenize"), "allowed"),
        (("--requests-left", "0"), "request_rate"),
        (("--tokens-left", "-1"), "token_rate"),
        (("--tokens-left", "100", "--input-tokens", "100"), "token_rate"),
        (("--spent-today", "4.99"), "allowed"),
        (("--spent-today", "5"), "spend"),
        (("--spent-this-month", "100"), "spend"),
    ],
)
def test_every_option_counts(run: Run, folder: Path, more: tuple[str, ...], reason: str) -> None:
    """Each option reaches the decision, which programs get whole."""
    (folder / "policy.yaml").write_text(PRICED)
    told = run(*ALPHA, *more, "-o", "json")
    data = json.loads(told.stdout)
    assert (data["reason"], data["tenant"]) == (reason, "alpha")
    assert told.exit_code == (exits.OK if reason == "allowed" else exits.REFUSED)
    assert (data["obligations"] is not None) == (reason == "allowed")


RATED = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits:
      requests_per_minute: {rate: 60, exceeded: queue}
      input_tokens_per_minute: 600
      output_tokens_per_minute: {rate: 6000, exceeded: downgrade}
      max_queued_requests: 2
"""


@pytest.mark.parametrize(
    ("more", "effect", "line"),
    [
        (("--requests-left", "0"), "wait", "  waits: 1.0 s if nothing else changes, and is then decided on again"),
        (("--requests-left", "0", "--queued", "2"), "deny", "  retry after: 1.0 s"),
        (("--input-tokens", "20", "--input-tokens-left", "10"), "deny", "  retry after: 1.0 s"),
        (
            ("--input-tokens", "20", "--output-tokens-left", "0"),
            "allow",
            "  downgraded: beyond output_tokens_per_minute",
        ),
    ],
)
def test_rates_are_explained(run: Run, folder: Path, more: tuple[str, ...], effect: str, line: str) -> None:
    """What is left of each rate, and how many wait, reach the decision; only a denial has another exit code."""
    (folder / "policy.yaml").write_text(RATED)
    told = run(*ALPHA, *more)
    assert told.stdout.startswith(f"{effect}: ")
    assert line in told.stdout.splitlines()
    assert told.exit_code == (exits.REFUSED if effect == "deny" else exits.OK)


ROUTED = (
    POLICY.replace('"qwen3-*"]', '"fast"]')
    + """\
routes:
  fast: {to: [{model: athanor-mini, weight: 3}, {model: qwen3-8b}], fallback: [spare], fall_back_when: [unready, busy]}
"""
)


@pytest.mark.parametrize(
    ("more", "model", "reason"),
    [
        ((), "athanor-mini", "weight"),
        (("--unready", "athanor-mini"), "spare", "unready"),
        (("--busy", "athanor-mini"), "spare", "busy"),
        (("--unready", "athanor-mini", "--unready", "spare"), "athanor-mini", "none_ready"),
        (("--asleep", "athanor-mini"), "athanor-mini", "weight"),
    ],
)
def test_a_route_is_explained(run: Run, folder: Path, more: tuple[str, ...], model: str, reason: str) -> None:
    """Where it leads and which model is chosen, for people and for programs. A model has no route (control)."""
    (folder / "policy.yaml").write_text(ROUTED)
    ask = ("policy", "explain", "policy.yaml", "--tenant", "alpha", "--model")
    told = run(*ask, "fast", *more)
    assert told.exit_code == exits.OK
    assert "route: requests for fast go to athanor-mini 75%, qwen3-8b 25%; when unready or busy to spare" in told.stdout
    assert f"chosen: {model} ({reason})" in told.stdout
    data = json.loads(run(*ask, "fast", *more, "-o", "json").stdout)
    assert data["route"] == {"alias": "fast", "model": model, "reason": reason, "asleep": ""}
    assert json.loads(run(*ask, "athanor-mini", "-o", "json").stdout)["route"] is None
    hidden = run(*ask, "qwen3-8b")
    assert (hidden.exit_code, "chosen:" in hidden.stdout) == (exits.REFUSED, False)


def test_callers_by_credential(run: Run, folder: Path) -> None:
    """A credential leads to its tenant or to none; exactly one caller is named."""
    ask = ("policy", "explain", "policy.yaml", "--model", "athanor-mini")
    known = json.loads(run(*ask, "--credential", "key:alpha-1", "-o", "json").stdout)
    assert (known["tenant"], known["rule"]) == ("alpha", "tenants.alpha.models[0]")
    unknown = json.loads(run(*ask, "--credential", "key:other", "-o", "json").stdout)
    assert (unknown["tenant"], unknown["reason"]) == (None, "unknown_credential")
    assert run(*ask).exit_code == exits.USAGE
    assert run(*ask, "--tenant", "alpha", "--credential", "key:alpha-1").exit_code == exits.USAGE
    assert run(*ask, "--tenant", "alpha", "--feature", "magic").exit_code == exits.USAGE
    assert run("policy", "explain", "none.yaml", "--tenant", "a", "--model", "m").exit_code == exits.REFUSED


def test_cases_that_pass(run: Run, folder: Path) -> None:
    """A table of the files and their cases; exit code 0."""
    told = run("policy", "test", "cases.yaml")
    assert told.exit_code == exits.OK
    golden.check(GOLDEN / "policy-test-good-80.txt", told.stdout)


def test_cases_that_fail(run: Run, folder: Path) -> None:
    """Each difference with its line, column and a caret; exit code 1."""
    (folder / "policy.yaml").write_text(POLICY.replace("max_context_tokens: 2048", "max_context_tokens: 512"))
    wrong = CASES.replace("reason: feature_not_allowed", "reason: request_rate")
    (folder / "more.yaml").write_text(wrong)
    told = run("policy", "test", "cases.yaml", "more.yaml")
    assert told.exit_code == exits.REFUSED
    golden.check(GOLDEN / "policy-test-bad-80.txt", told.stdout)
    data = json.loads(run("policy", "test", "cases.yaml", "more.yaml", "-o", "json").stdout)
    assert (data["ok"], [one["passed"] for one in data["cases"]]) == (False, [False, True, False, False])
    assert data["cases"][3]["problems"][0]["line"] == 8
    assert data["cases"][0]["found"]["limit"] == 512


def test_the_policy_of_cases(run: Run, folder: Path) -> None:
    """The policy is named by the file, from its folder; is in it; or is given, and then precedes. Without any the file
    is refused; so is a file of cases, or a policy in one, that has problems."""
    below = folder / "below"
    below.mkdir()
    (below / "cases.yaml").write_text(CASES.replace("policy_file: policy.yaml", "policy_file: ../policy.yaml"))
    assert run("policy", "test", "below/cases.yaml").exit_code == exits.OK
    inline = "policy: |\n" + "".join(f"  {line}\n" for line in POLICY.splitlines())
    (folder / "inline.yaml").write_text(CASES.replace("policy_file: policy.yaml\n", inline))
    assert run("policy", "test", "inline.yaml").exit_code == exits.OK
    (folder / "other.yaml").write_text(POLICY.replace("tools: false", "tools: true"))
    assert run("policy", "test", "cases.yaml", "--policy", "other.yaml").exit_code == exits.REFUSED
    (folder / "bare.yaml").write_text(CASES.replace("policy_file: policy.yaml\n", ""))
    assert run("policy", "test", "bare.yaml", "--policy", "policy.yaml").exit_code == exits.OK
    bare = run("policy", "test", "bare.yaml")
    assert (bare.exit_code, "name one with --policy" in bare.stderr) == (exits.REFUSED, True)
    (folder / "inline.yaml").write_text(CASES.replace("policy_file: policy.yaml\n", inline.replace("alpha:", "Alpha:")))
    wrong = run("policy", "test", "inline.yaml")
    assert (wrong.exit_code, "inline.yaml, policy:3:3: tenants.Alpha" in wrong.stdout) == (exits.REFUSED, True)
    (folder / "bare.yaml").write_text(CASES.replace("expect: allow", "expect: maybe"))
    wrong = run("policy", "test", "bare.yaml")
    assert (wrong.exit_code, "bare.yaml:5:13" in wrong.stdout) == (exits.REFUSED, True)
    assert run("policy", "test", "none.yaml").exit_code == exits.REFUSED
    (folder / "bare.yaml").write_bytes(b"cases: \xff\n")
    assert "is not UTF-8" in run("policy", "test", "bare.yaml").stderr


def test_the_repositorys_own_cases_pass(run: Run, root: Path) -> None:
    """The command runs the cases of tests/policy/cases, all of them."""
    files = [str(path) for path in sorted((root / "tests/policy/cases").glob("*.yaml")) if path.name != "errors.yaml"]
    told = run("policy", "test", *files, "-o", "json")
    data = json.loads(told.stdout)
    assert (told.exit_code, data["ok"], len(data["cases"]) >= 300) == (exits.OK, True, True)


def test_a_first_policy_is_written_once(run: Run, folder: Path) -> None:
    """It stands with its schema beside it, passes the check, and a second time nothing is overwritten: neither the
    policy, nor a schema that somebody changed."""
    told = run("policy", "init", "drafts.yaml", "--tenant", "acme")
    assert told.exit_code == exits.OK
    golden.check(GOLDEN / "policy-init-80.txt", told.stdout)
    text = (folder / "drafts.yaml").read_text()
    golden.check(GOLDEN / "policy-init-file.txt", text)
    assert (folder / "policy.schema.json").read_text() == schema_text()
    assert run("policy", "check", "drafts.yaml").exit_code == exits.OK
    again = run("policy", "init", "drafts.yaml", "--tenant", "other")
    assert (again.exit_code, "is there already" in again.stderr) == (exits.REFUSED, True)
    assert (folder / "drafts.yaml").read_text() == text
    assert run("policy", "init", "second.yaml").exit_code == exits.OK
    (folder / "policy.schema.json").write_text("{}")
    assert run("policy", "init", "third.yaml").exit_code == exits.REFUSED
    assert not (folder / "third.yaml").exists()
    assert (folder / "policy.schema.json").read_text() == "{}"


def test_the_last_hint_is_what_puts_it_in_force(run: Run, folder: Path) -> None:
    """A policy that a configuration beside it names is reloaded; another one is applied, and explain finds the
    configured one without a path."""
    values = {"run_dir": "run", "policy": "first.yaml", "models": [{"name": "m", "path": str(folder)}]}
    (folder / "athanor.yaml").write_text(json.dumps(values | {"credentials": "keys", "pepper": "pepper"}))
    named = run("policy", "init", "first.yaml").stdout
    other = run("policy", "init", "second.yaml").stdout
    assert ("athanor reload" in named, "athanor policy apply" in named) == (True, False)
    assert ("athanor reload" in other, "athanor policy apply second.yaml" in other) == (False, True)
    asked = ("--tenant", "alpha", "--model", "m", "--running", "64")
    told = run("policy", "explain", "--config", "athanor.yaml", *asked)
    assert (told.exit_code, "tenants.alpha.limits.concurrency" in told.stdout) == (exits.REFUSED, True)


def test_what_cannot_be_begun(run: Run, folder: Path) -> None:
    """A folder that is not there, an id that is none, the schema's own name; a policy that is there leaves no schema
    behind."""
    assert run("policy", "init", "none/policy.yaml").exit_code == exits.REFUSED
    assert run("policy", "init", "a.yaml", "--tenant", "Acme").exit_code == exits.REFUSED
    assert run("policy", "init", "policy.schema.json").exit_code == exits.USAGE
    assert run("policy", "init").exit_code == exits.REFUSED
    assert sorted(path.name for path in folder.iterdir()) == ["cases.yaml", "policy.yaml"]


def test_schemas_are_printed(run: Run) -> None:
    """Both, as they are published."""
    assert run("policy", "schema").stdout == schema_text()
    assert run("policy", "schema", "--cases").stdout == case_schema_text()


INHERITED = """\
version: 1
defaults: {limits: {max_output_tokens: 50}}
tenant_groups:
  staff: {models: ["qwen3-*"], limits: {requests_per_minute: 60}}
tenants:
  alpha: {inherits: staff, credentials: ["key:alpha-1"], limits: {concurrency: 8}}
"""


def test_an_inherited_value_is_explained_with_its_place(run: Run, folder: Path) -> None:
    """Below the rule stands where a group or the defaults have the value, and programs get the place of every value
    that is written. Control: an own value has the rule as its place, and no line more."""
    (folder / "policy.yaml").write_text(INHERITED)
    told = run(*ALPHA, "--requests-left", "0")
    assert told.exit_code == exits.REFUSED
    golden.check(GOLDEN / "policy-explain-inherited-80.txt", without_digests(told.stdout))
    assert "  from: defaults.limits.max_output_tokens (policy.yaml:2:40)\n" in run(*ALPHA, "--max-tokens", "51").stdout
    own = run(*ALPHA, "--running", "8").stdout
    assert "rule: tenants.alpha.limits.concurrency\n  limit: 8" in own
    data = json.loads(run(*ALPHA, "--running", "8", "-o", "json").stdout)
    assert data["origin"] == {
        "path": "tenants.alpha.limits.concurrency",
        "file": "policy.yaml",
        "line": 6,
        "column": 80,
        "inherited": False,
    }
    unwritten = json.loads(run(*ALPHA, "--tokens-left", "-1", "-o", "json").stdout)
    assert (unwritten["rule"], unwritten["origin"]) == ("tenants.alpha.limits.tokens_per_minute", None)
