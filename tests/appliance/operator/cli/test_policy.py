"""``policy check``: problems like a compiler's, tenants when there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

GOOD = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["athanor-mini", "qwen3-*"]
    limits: {requests_per_minute: 6000, concurrency: 8}
  beta-research-group:
    credentials: ["key:beta-1", "spiffe://example.org/tenant/beta"]
    models: ["*"]
    retention: none
"""

BAD = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits: {burts: 3, concurrency: 0}
  Beta:
    credentials: []
    models: ["*"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("columns", [80, 120])
def test_a_good_policy(run: Run, folder: Path, columns: int) -> None:
    """A policy without problems shows its tenants and limits and ends with 0."""
    (folder / "policy.yaml").write_text(GOOD)
    result = run("policy", "check", "policy.yaml", columns=columns)
    assert result.exit_code == 0
    golden.check(GOLDEN / f"policy-good-{columns}.txt", result.stdout)


def test_a_large_policy_shows_its_first_tenants(run: Run, folder: Path) -> None:
    """The table of a policy of thousands ends after 200 tenants and says how many there are; JSON has all of them.
    Control: 200 tenants are all shown."""
    for count, rest in ((1_000, "and 800 tenants more"), (200, "")):
        lines = (f'  t{number:04}: {{credentials: ["key:k{number}"], models: ["m"]}}' for number in range(count))
        (folder / "policy.yaml").write_text("version: 1\ntenants:\n" + "\n".join(lines))
        shown = run("policy", "check", "policy.yaml").stdout
        assert "t0199" in shown and "t0200" not in shown
        assert ("more; -o json has all of them" in shown) == bool(rest) and rest in shown
        assert f"{count:,} tenants" in shown
        data = json.loads(run("policy", "check", "policy.yaml", "-o", "json").stdout)
        assert len(data["tenants"]) == count


def test_problems_like_a_compilers(run: Run, folder: Path) -> None:
    """Every problem has its place, its path, the line and a caret; the end is 1."""
    (folder / "policy.yaml").write_text(BAD)
    result = run("policy", "check", "policy.yaml")
    assert result.exit_code == 1
    golden.check(GOLDEN / "policy-bad-80.txt", result.stdout)


def test_the_caret_stands_under_the_column(run: Run, folder: Path) -> None:
    """In a line far wider than the terminal the caret still points at the culprit."""
    line = "    models: [" + ", ".join(f'"model-{n}"' for n in range(40)) + ', "bad model"]\n'
    text = GOOD.replace('    models: ["*"]\n', line)
    (folder / "policy.yaml").write_text(text)
    result = run("policy", "check", "policy.yaml")
    shown = result.stdout.splitlines()
    caret = next(n for n, one in enumerate(shown) if one.rstrip().endswith("^"))
    column = shown[caret].index("^")
    assert shown[caret - 1][column:].startswith('"bad model"')
    assert len(shown[caret - 1]) <= 80


def test_broken_yaml(run: Run, folder: Path) -> None:
    """A file that is no YAML is one problem with its place."""
    (folder / "policy.yaml").write_text("version: 1\ntenants:\n\talpha: {}\n")
    result = run("policy", "check", "policy.yaml")
    assert result.exit_code == 1
    assert result.stdout.startswith("policy.yaml:3:1: not YAML")
    assert "1 problem" in result.stdout


def test_drop_ins_are_one_policy(run: Run, folder: Path) -> None:
    """A folder and several files are checked together: a tenant stands in one of them only."""
    drop_ins = folder / "policy.d"
    drop_ins.mkdir()
    (drop_ins / "10.yaml").write_text(GOOD)
    assert run("policy", "check", "policy.d").exit_code == 0
    other = folder / "20.yaml"
    other.write_text(GOOD.replace("beta-research-group", "gamma"))
    result = run("policy", "check", "policy.d", "20.yaml")
    assert result.exit_code == 1
    assert "stands in" in result.stdout


def test_json(run: Run, folder: Path) -> None:
    """-o json gives problems, or tenants and digest, to programs."""
    (folder / "bad.yaml").write_text(BAD)
    (folder / "good.yaml").write_text(GOOD)
    bad = json.loads(run("policy", "check", "bad.yaml", "-o", "json").stdout)
    assert bad["ok"] is False
    assert {"file", "line", "column", "path", "message"} == set(bad["problems"][0])
    good = json.loads(run("policy", "check", "good.yaml", "-o", "json").stdout)
    assert good["ok"] is True
    assert len(good["digest"]) == 64
    assert good["tenants"]["alpha"]["limits"]["concurrency"] == 8


def test_unreadable(run: Run, folder: Path) -> None:
    """A file that is not there ends with 1 and its name; no file at all is a usage error."""
    result = run("policy", "check", "none.yaml")
    assert result.exit_code == 1
    assert "cannot read none.yaml: no such file" in result.stderr
    assert run("policy", "check").exit_code == 2


def test_texts_cannot_steer_the_terminal(run: Run, folder: Path) -> None:
    """Markup in a file is shown as it stands."""
    (folder / "policy.yaml").write_text('version: 1\ntenants:\n  "[red]x[/red]": {}\n')
    result = run("policy", "check", "policy.yaml")
    assert "[red]x[/red]" in result.stdout


CONFIG = """\
models: [{name: athanor-mini, path: models/athanor-mini}]
policy: policy.yaml
credentials: credentials.json
pepper: pepper
run_dir: run
"""


@pytest.fixture
def configured(folder: Path) -> Path:
    """A configuration of one model and one key beside a policy that names more."""
    (folder / "athanor.yaml").write_text(CONFIG)
    record = {"hmac_sha256": "0" * 64, "created": "2026-01-01T00:00:00+00:00"}
    (folder / "credentials.json").write_text(
        json.dumps({"keys": {"alpha-1": record, "spare-1": record, "beta-1": {**record, "revoked": True}}})
    )
    (folder / "credentials.json").chmod(0o600)
    (folder / "policy.yaml").write_text(GOOD)
    return folder


def test_names_that_lead_nowhere_are_warned_of(run: Run, configured: Path) -> None:
    """A pattern that no served model has, a key that is not in force, and a key that nobody owns: each with its place,
    and the policy is still usable; --strict refuses it."""
    result = run("policy", "check", "policy.yaml", columns=160)
    assert result.exit_code == 0
    assert (
        "policy.yaml:5:30: tenants.alpha.models[1]: no model is named 'qwen3-*'; served: athanor-mini" in result.stdout
    )
    assert "tenants.beta-research-group.credentials[0]: no key in force has the id 'beta-1'" in result.stdout
    assert "credentials.json: key 'spare-1' belongs to no tenant" in result.stdout
    assert "3 warnings" in result.stdout
    assert "credentials[1]" not in result.stdout, "a client certificate is in no table"
    assert run("policy", "check", "policy.yaml", "--strict").exit_code == 1


def test_a_policy_without_loose_ends_is_strictly_good(run: Run, configured: Path) -> None:
    """Control: when every name leads somewhere nothing is warned of, and --strict accepts."""
    text = GOOD.replace('"athanor-mini", "qwen3-*"', '"athanor-*"').replace('"key:beta-1"', '"key:spare-1"')
    (configured / "policy.yaml").write_text(text)
    result = run("policy", "check", "policy.yaml", "--strict", "-o", "json")
    assert (result.exit_code, json.loads(result.stdout)["warnings"]) == (0, [])


def test_a_tenant_that_may_do_everything_is_warned_of(run: Run, configured: Path) -> None:
    """`unsafe_allow_all` is warned of at its place, and refused by --strict; explain names it as the reason."""
    text = (
        'version: 1\ntenants:\n  alpha:\n    credentials: ["key:alpha-1", "key:spare-1"]\n    unsafe_allow_all: true\n'
    )
    (configured / "policy.yaml").write_text(text)
    result = run("policy", "check", "policy.yaml", columns=200)
    assert result.exit_code == 0
    assert "policy.yaml:5:5: tenants.alpha.unsafe_allow_all: this tenant may use every model" in result.stdout
    assert "1 warning" in result.stdout
    assert run("policy", "check", "policy.yaml", "--strict").exit_code == 1
    shown = run("policy", "explain", "policy.yaml", "--tenant", "alpha", "--model", "x", "--running", "9000")
    assert "from: tenants.alpha.unsafe_allow_all (policy.yaml:5:23)" in shown.stdout


def test_routes_are_shown_and_held_against_the_models(run: Run, configured: Path) -> None:
    """A route is told with where it leads; a target that no model serves is warned of at its place, and refused by
    --strict."""
    good = GOOD.replace('"athanor-mini", "qwen3-*"', '"athanor-*"').replace('"key:beta-1"', '"key:spare-1"')
    text = good + "routes:\n  fast:\n    to: [{model: athanor-mini, weight: 9}, {model: athanor-next}]\n"
    (configured / "policy.yaml").write_text(text)
    result = run("policy", "check", "policy.yaml", columns=160)
    assert result.exit_code == 0
    assert "route fast   requests go to athanor-mini 90%, athanor-next 10%" in result.stdout
    place = f"policy.yaml:{text.count(chr(10))}:52: routes.fast.to[1].model"
    assert f"{place}: no model is named 'athanor-next'; served: athanor-mini" in result.stdout
    assert run("policy", "check", "policy.yaml", "--strict").exit_code == 1
    data = json.loads(run("policy", "check", "policy.yaml", "-o", "json").stdout)
    assert data["routes"]["fast"]["to"][0] == {"model": "athanor-mini", "weight": 9}


def test_files_beside_drop_ins_are_told(run: Run, configured: Path) -> None:
    """A drop-in takes part in the check of the file beside it; one with another suffix is named as not read."""
    drop_ins = configured / "policy.d"
    drop_ins.mkdir()
    (drop_ins / "10.yaml").write_text(
        'version: 1\ntenants: {gamma: {credentials: ["key:spare-1"], models: ["nowhere"]}}\n'
    )
    (drop_ins / "20.yml").write_text("version: 1\n")
    shown = json.loads(run("policy", "check", "policy.yaml", "-o", "json").stdout)
    assert "gamma" in shown["tenants"]
    told = {(Path(one["file"]).name, one["line"]): one["message"] for one in shown["warnings"]}
    assert "not read" in told["20.yml", 0]
    assert "no model is named 'nowhere'" in told["10.yaml", 2]


def test_a_draft_is_held_against_a_configuration(run: Run, configured: Path, tmp_path_factory) -> None:
    """A policy elsewhere is compared with the configuration that is named; without one nothing is, which is said, and
    --strict refuses to say that all is well."""
    draft = tmp_path_factory.mktemp("draft") / "new.yaml"
    draft.write_text(GOOD)
    alone = run("policy", "check", str(draft), columns=160)
    assert (alone.exit_code, "models and keys are not compared" in alone.stderr) == (0, True)
    assert "qwen3-*'" not in alone.stdout
    assert run("policy", "check", str(draft), "--strict").exit_code == 1
    named = run("policy", "check", str(draft), "--config", str(configured / "athanor.yaml"), columns=160)
    assert "no model is named 'qwen3-*'" in named.stdout
