"""``policy diff``: what changes for whom, at two widths and as data, and what the audit log says to it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry, entry
from appliance.common.audit.log import open_log
from appliance.operator.cli import exits
from tests.appliance import golden
from tests.appliance.common.audit.entries import filled
from tests.appliance.operator.cli.conftest import Run, without_digests

GOLDEN = Path(__file__).parent / "golden"

OLD = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1", "key:alpha-2"]
    models: ["athanor-mini", "qwen3-*"]
    limits: {requests_per_minute: 600, concurrency: 8}
  beta:
    credentials: ["key:beta-1"]
    models: ["*"]
    features: {tools: false}
  delta:
    credentials: ["key:delta-1"]
    models: ["*"]
public_prefixes:
  style: {model: athanor-mini, tenants: [alpha], text: "You are brief."}
"""

NEW = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["athanor-mini"]
    limits: {requests_per_minute: 600, concurrency: 4}
    kv: {reservation: 20%, cap: 50%}
    retention: none
  beta:
    credentials: ["key:beta-1", "key:alpha-2"]
    models: ["*", "athanor-mini"]
    limits: {requests_per_minute: 100, max_context_tokens: 2048, max_output_tokens: 512}
  gamma:
    credentials: ["spiffe://example.org/tenant/gamma"]
    models: ["*"]
  epsilon:
    credentials: ["key:epsilon-1"]
    models: ["*"]
sharing_groups:
  lab: {tenants: [gamma, epsilon]}
public_prefixes:
  style: {model: athanor-mini, tenants: [gamma], text: "You are brief and kind."}
"""

BEGIN = "2026-01-31T08:00Z"
BEGIN_MS = 1_769_846_400_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two policies, and no configuration of a service."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text(OLD)
    (tmp_path / "new.yaml").write_text(NEW)
    (tmp_path / "athanor.yaml").write_text(
        "models: [{name: athanor-mini, path: models/athanor-mini}]\npolicy: old.yaml\n"
        "credentials: credentials.json\npepper: pepper\nrun_dir: run\naudit: {directory: audit}\n"
    )
    return tmp_path


def request(tenant: str, credential: str, **values) -> Entry:
    """An allowed request."""
    usual = {
        "request": "r",
        "tenant": tenant,
        "principal": credential,
        "model": "athanor-mini",
        "operation": "chat",
        "rule": "tenants.x.models[0]",
        "policy": "ab",
        "outcome": "OK",
        "input_tokens": 100,
        "output_tokens": 50,
    }
    return filled("request", "", **{**usual, **values})


@pytest.fixture
def log(folder: Path) -> Path:
    """An audit log of an hour: requests of three tenants, two denials, a gap, and a request of the day before."""
    entries = [(BEGIN_MS - 86_400_000, request("beta", "key:beta-1", input_tokens=3_000))]
    for second in range(0, 3_600, 10):
        entries.append((BEGIN_MS + second * 1_000, request("beta", "key:beta-1")))
        entries.append((BEGIN_MS + second * 1_000, request("alpha", "key:alpha-1")))
    later = BEGIN_MS + 3_700_000
    entries += [(later, request("beta", "key:beta-1", input_tokens=3_000))] * 12
    entries += [(later, request("beta", "key:beta-1", output_tokens=600))] * 3
    entries += [(later, request("alpha", "key:alpha-1", model="qwen3-8b"))]
    entries += [(later, request("delta", "key:delta-1"))]
    usual = {"principal": "key:beta-1", "model": "athanor-mini", "policy": "ab", "tenant": "beta", "alias": ""}
    entries += [
        (later, entry("denied", **usual, rule="tenants.beta.features.tools", outcome="FEATURE_NOT_ALLOWED", count=7)),
        (later, entry("denied", **usual, rule="tenants.beta.limits.concurrency", outcome="RATE_LIMITED", count=2)),
        (later, entry("gap", where="gateway", dropped=1)),
    ]
    audit = open_log(folder / "audit")
    audit.append(entries)
    audit.close()
    return folder / "audit"


@pytest.mark.parametrize("columns", [80, 120])
def test_changes_and_replay(run: Run, log: Path, columns: int) -> None:
    """Every change in a sentence, by tenant, with its path; what the log says; what was not replayed; what the signs
    mean. A comparison is no failure."""
    result = run("policy", "diff", "old.yaml", "new.yaml", "--from", str(log), "--since", BEGIN, columns=columns)
    assert (result.exit_code, result.stderr) == (exits.OK, "")
    assert max(map(len, result.stdout.splitlines())) <= columns
    golden.check(GOLDEN / f"policy-diff-{columns}.txt", without_digests(result.stdout))


def test_nothing_changes(run: Run, folder: Path) -> None:
    """Comments and order are no change; the log is not mentioned."""
    (folder / "same.yaml").write_text("# the same\n" + OLD)
    result = run("policy", "diff", "old.yaml", "same.yaml", "--no-replay")
    assert (result.exit_code, result.stderr) == (exits.OK, "")
    golden.check(GOLDEN / "policy-diff-nothing-80.txt", without_digests(result.stdout))


def test_json(run: Run, log: Path) -> None:
    """Programs get each change with subject, path, direction and values, and the findings as numbers."""
    told = run("policy", "diff", "old.yaml", "new.yaml", "--from", str(log), "--since", BEGIN, "-o", "json")
    data = json.loads(told.stdout)
    change = next(one for one in data["changes"] if one["path"] == "tenants.beta.limits.requests_per_minute")
    assert change == {
        "subject": "beta",
        "kind": "tenant",
        "path": "tenants.beta.limits.requests_per_minute",
        "direction": "narrower",
        "text": "beta may send 100 requests a minute instead of 600",
        "old": 600,
        "new": 100,
    }
    replay = data["replay"]
    assert replay["requests"] == {"alpha": 361, "beta": 375, "delta": 1}
    rule = "tenants.beta.limits.max_context_tokens"
    assert {"tenant": "beta", "rule": rule, "requests": 12, "sure": True} in replay["refused"]
    assert (replay["lost"], replay["inexact"], replay["problem"]) == (1, 0, "")
    assert [one["path"] for one in replay["not_replayed"]] == ["tenants.alpha.limits.concurrency"]
    assert f"12 of 375 requests of beta would have been refused, by {rule}" in replay["sentences"]


def test_the_span_of_time_counts(run: Run, log: Path) -> None:
    """A span that begins before all entries has all; one of a day has none of a log that is older. A time that is none
    is a wrong command line."""

    def requests(since: str) -> int:
        told = run("policy", "diff", "old.yaml", "new.yaml", "--from", str(log), "--since", since, "-o", "json")
        return sum(json.loads(told.stdout)["replay"]["requests"].values())

    assert requests("2026-01-01") == 738
    assert requests("2026-01-31T09:01:40") == 17
    newer = open_log(log)
    newer.append([(round((time.time() - 7_200) * 1_000), request("beta", "key:beta-1"))])
    newer.close()
    assert (requests("24h"), requests("3h"), requests("30m")) == (1, 1, 0)
    wrong = run("policy", "diff", "old.yaml", "new.yaml", "--since", "someday")
    assert (wrong.exit_code, "'someday' is no time" in wrong.stderr) == (exits.USAGE, True)


def test_against_the_policy_in_force(run: Run, log: Path) -> None:
    """One path is compared with the policy that the configuration names, and its log is replayed; that policy itself
    is no draft."""
    both = ("--config", "athanor.yaml", "--since", BEGIN)
    alone, pair = run("policy", "diff", "new.yaml", *both), run("policy", "diff", "old.yaml", "new.yaml", *both)
    assert alone.exit_code == exits.OK
    assert alone.stdout == pair.stdout
    assert "12 of 375 requests of beta" in alone.stdout
    itself = run("policy", "diff", "old.yaml", *both)
    assert (itself.exit_code, "itself" in itself.stderr) == (exits.USAGE, True)
    three = run("policy", "diff", "old.yaml", "new.yaml", "new.yaml")
    assert three.exit_code == exits.USAGE


def test_a_log_that_cannot_be_read_is_told(run: Run, folder: Path) -> None:
    """The comparison stands without it; where the log was named, it is a failure. Without a section audit there is
    none."""
    pair = ("policy", "diff", "old.yaml", "new.yaml")
    told = run(*pair, "--config", "athanor.yaml")
    assert told.exit_code == exits.OK
    assert "not replayed: cannot read the audit log" in told.stderr
    assert "beta\n" in told.stdout
    assert run(*pair, "--from", "none").exit_code == exits.REFUSED
    config = folder / "athanor.yaml"
    config.write_text(config.read_text().replace("audit: {directory: audit}\n", ""))
    assert "has no section audit" in run(*pair, "--config", "athanor.yaml").stderr
    assert run(*pair, "--no-replay").stderr == ""


@pytest.mark.parametrize(
    ("new", "kinds"),
    [
        (OLD.replace("requests_per_minute: 600", "requests_per_minute: 601"), {"wider", "any"}),
        (OLD.replace("requests_per_minute: 600", "requests_per_minute: 599"), {"narrower", "any"}),
        (OLD.replace("You are brief.", "You are kind."), {"any"}),
        (OLD, set()),
    ],
)
def test_refuse(run: Run, folder: Path, new: str, kinds: set[str]) -> None:
    """--refuse fails on changes of its kind, and on no other."""
    (folder / "new.yaml").write_text(new)
    pair = ("policy", "diff", "old.yaml", "new.yaml", "--no-replay")
    codes = {kind: run(*pair, "--refuse", kind).exit_code for kind in ("nothing", "wider", "narrower", "any")}
    assert {kind for kind, code in codes.items() if code == exits.REFUSED} == kinds
    assert codes["nothing"] == exits.OK


def test_problems_of_a_policy(run: Run, folder: Path) -> None:
    """A policy with problems is told as ``policy check`` tells it, whichever of the two it is."""
    (folder / "bad.yaml").write_text("version: 1\ntenants: {a: {}}\n")
    for pair in (("bad.yaml", "new.yaml"), ("old.yaml", "bad.yaml")):
        told = run("policy", "diff", *pair)
        assert told.exit_code == exits.REFUSED
        assert "bad.yaml:2:14: tenants.a.credentials: this key is required" in told.stdout
    assert run("policy", "diff", "old.yaml", "none.yaml").exit_code == exits.REFUSED


def test_tenants_of_a_group_are_shown_together(run: Run, folder: Path, log: Path) -> None:
    """One change in a group is one paragraph for its tenants, with their number; a tenant with another change has its
    own, and two tenants with equal changes have one each. What was not replayed is told once. Programs get every change
    of every tenant."""
    names = [f"intern-{number}" for number in range(5)]
    lines = [f'  {name}: {{inherits: interns, credentials: ["key:{name}"]}}\n' for name in names]
    lines += [f'  {name}: {{credentials: ["key:{name}"], models: ["*"], weight: 1}}\n' for name in ("one", "two")]
    head = 'version: 1\ntenant_groups:\n  interns: {models: ["*"], limits: {requests_per_minute: 30}}\ntenants:\n'
    (folder / "old.yaml").write_text(head + "".join(lines))
    text = (head + "".join(lines)).replace("30}}", "10, concurrency: 2}, features: {tools: false}}")
    text = text.replace("weight: 1", "weight: 2").replace('"key:intern-3"]', '"key:intern-3"], weight: 3')
    (folder / "new.yaml").write_text(text)
    told = run("policy", "diff", "old.yaml", "new.yaml", "--no-replay").stdout
    golden.check(GOLDEN / "policy-diff-group-80.txt", without_digests(told))
    replayed = run("policy", "diff", "old.yaml", "new.yaml", "--from", str(log), "--since", BEGIN).stdout
    notes = [line.split(": ")[1] for line in replayed.splitlines() if "not replayed: " in line]
    assert notes == ["tenants.*.limits.concurrency", "tenants.*.features.tools"]
    data = json.loads(run("policy", "diff", "old.yaml", "new.yaml", "--no-replay", "-o", "json").stdout)
    assert len(data["changes"]) == 5 * 3 + 1 + 2
    assert all("*" not in change["path"] for change in data["changes"])
