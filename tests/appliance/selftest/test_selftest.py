"""The self-test around its checks: what is absent, what breaks, what comes out; with checks made for the purpose."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.common.selftest_record import read_record
from appliance.common.version import VERSION
from appliance.operator.cli.selftest_view import Estimate
from appliance.selftest import registry
from appliance.selftest.registry import GUARANTEES, Guarantee
from appliance.selftest.result import Result, judged
from tests.appliance.operator.cli.conftest import Run, run  # noqa: F401 - the fixture

MADE = Guarantee("G1", "Made for a test", ("g1_made_for_a_test",))
CLAIM = judged("G1.memory", True, figure="0 of 10", bar="0", command="c")
CONTROL = judged("G1.memory.control", True, figure="10 of 10", bar="10", command="c")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[bool], list[Result]]], None]:
    """Put a check where the registry looks for G1, and leave the other nine out."""
    name = f"appliance.selftest.{MADE.modules[0]}"
    monkeypatch.setattr(registry, "GUARANTEES", (MADE,))

    def put(check: Callable[[bool], list[Result]]) -> None:
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
        module.run = check  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)

    return put


def test_all_ten_are_in_the_table() -> None:
    """Ids in order, modules that name their guarantee."""
    assert [one.id for one in GUARANTEES] == [f"G{number}" for number in range(1, 11)]
    assert all(module.startswith(one.id.lower() + "_") for one in GUARANTEES for module in one.modules)


def test_every_module_of_this_build_is_in_the_table() -> None:
    """No check lies beside the table unused: what is named as one is run."""
    import appliance.selftest

    there = {path.stem for path in Path(appliance.selftest.__path__[0]).glob("g[0-9]*_*.py")}
    assert there <= {module for one in GUARANTEES for module in one.modules}


def test_a_check_that_is_not_there_is_absent_and_says_so() -> None:
    """No module of that name: a row with the reason, neither a pass nor a failure."""
    (row,) = registry.check(Guarantee("G1", "x", ("g1_nowhere",)), full=False)
    assert (row.verdict, row.id) == ("absent", "G1")
    assert "g1_nowhere" in row.figure


@pytest.mark.parametrize("full", [False, True])
def test_rows_come_out_as_they_are(made: Callable[..., None], full: bool) -> None:
    """A claim with its control passes through, and the check hears which counts are wanted."""
    heard: list[bool] = []
    made(lambda full: heard.append(full) or [CLAIM, CONTROL])  # type: ignore[func-returns-value]
    assert registry.check(MADE, full=full) == [CLAIM, CONTROL]
    assert heard == [full]


def _raises(_full: bool) -> list[Result]:
    raise OSError("no such thing\nsecond line")


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (_raises, "the check broke: OSError: no such thing"),
        (lambda _full: [], "no row"),
        (lambda _full: [CLAIM], "no positive control"),
        (lambda _full: [CLAIM, CONTROL, judged("G10.x", True, figure="", bar="", command="")], "another guarantee"),
    ],
)
def test_a_check_that_proves_nothing_fails(made: Callable[..., None], check: Callable[..., object], says: str) -> None:
    """An exception, no row, no control, a row of another guarantee: a failure that says which."""
    made(check)
    last = registry.check(MADE, full=False)[-1]
    assert last.verdict == "fail"
    assert says in last.figure


def test_one_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Absent is only what is not there: a module that breaks while it is imported is a failure."""
    import appliance.selftest

    (tmp_path / "g1_broken.py").write_text("import nowhere_at_all\n")  # type: ignore[operator]
    monkeypatch.setattr(appliance.selftest, "__path__", [*appliance.selftest.__path__, str(tmp_path)])
    (row,) = registry.check(Guarantee("G1", "x", ("g1_broken",)), full=False)
    assert row.verdict == "fail"
    assert "nowhere_at_all" in row.figure


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(("pass", "pass"), 0), (("pass", "fail"), 1), (("pass", "absent"), 5), (("fail", "absent"), 1)],
)
def test_exit_code_and_json(made: Callable[..., None], run: Run, verdicts: tuple[str, str], code: int) -> None:  # noqa: F811
    """0 only when everything passed; rows come as a list of objects with the five fields."""
    made(lambda _full: [Result(f"G1.{verdict}", verdict, "1", "0", "c") for verdict in verdicts] + [CONTROL])  # type: ignore[arg-type]
    result = run("selftest", "--json")
    assert result.exit_code == code
    rows = json.loads(result.stdout)
    assert [row["verdict"] for row in rows] == [*verdicts, "pass"]
    assert [list(row) for row in rows] == [["id", "verdict", "figure", "bar", "command"]] * 3


@pytest.mark.parametrize(("options", "form"), [((), "short"), (("--full",), "full")])
def test_an_outcome_is_recorded(
    made: Callable[..., None],
    run: Run,  # noqa: F811
    tmp_path: Path,
    options: tuple[str, ...],
    form: str,
) -> None:
    """With its verdicts, form and version, also where a row failed, and the exit code is the same; a part of the
    self-test, and a folder that is not there, are refused before anything runs. Control: without the option no file."""
    bad = judged("G1.disk", False, figure="3 of 10", bar="0 of 10", command="c")
    made(lambda _full: [CLAIM, CONTROL, bad])
    assert run("selftest", "--from", str(tmp_path), *options).exit_code == 1
    assert read_record(tmp_path) is None
    assert run("selftest", "--record", "--from", str(tmp_path), *options).exit_code == 1
    found = read_record(tmp_path)
    assert found is not None
    assert (found.version, found.form, found.rows) == (VERSION, form, (2, 1, 0, 0))
    made(lambda _full: pytest.fail("nothing runs"))
    assert run("selftest", "--record", "--only", "G1", "--from", str(tmp_path)).exit_code == 2
    assert run("selftest", "--record", "--from", str(tmp_path / "nowhere")).exit_code == 1


def test_the_table_shows_every_word(made: Callable[..., None], run: Run) -> None:  # noqa: F811
    """Verdict, name, figure, bar, and for a failure the command to see it again; no escape reaches the terminal."""
    bad = Result("G1.disk", "fail", "3 of 10\x1b[31m", "0 of 10", "athanor selftest --only G1")
    made(lambda _full: [CLAIM, CONTROL, bad])
    result = run("selftest", columns=120)
    assert result.exit_code == 1
    for word in ("Made for a test", "memory.control", "0 of 10", "2 pass", "1 fail", "athanor selftest --only G1"):
        assert word in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(("options", "runs"), [((), False), (("--only", "G1"), True), (("--full",), True)])
def test_the_short_form_names_what_it_leaves_out(
    made: Callable[..., None],
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    runs: bool,
) -> None:
    """A module that is left out is not run, its claims are named as such, and the exit code is that of the others."""
    heard: list[bool] = []
    made(lambda full: heard.append(full) or [CLAIM, CONTROL])  # type: ignore[func-returns-value]
    monkeypatch.setattr(registry, "LEFT_OUT", {MADE.modules[0]: ("G1.memory", "G1.disk")})
    result = run("selftest", "--json", *options)
    assert result.exit_code == 0
    verdicts = {row["id"]: row["verdict"] for row in json.loads(result.stdout)}
    if runs:
        assert heard == ["--full" in options]
        assert verdicts == {"G1.memory": "pass", "G1.memory.control": "pass"}
    else:
        assert heard == []
        assert verdicts == {"G1.memory": "not run", "G1.disk": "not run"}
        assert "not run, --full: G1.memory, G1.disk" in run("selftest", columns=120).stdout


def test_what_is_left_out_and_estimated_is_in_the_table() -> None:
    """Every module has an estimate; those left out exist, name claims of their guarantee, and leave each short form
    within its two minutes."""
    modules = {module: one.id for one in GUARANTEES for module in one.modules}
    assert set(registry.SECONDS) == set(modules)
    for module, claims in registry.LEFT_OUT.items():
        assert {claim.partition(".")[0] for claim in claims} == {modules[module]}
    assert registry.seconds(module for module in modules if module not in registry.LEFT_OUT) <= 120


def test_a_row_is_given_before_the_next_has_ended(made: Callable[..., None]) -> None:
    """A check that gives rows one by one is not waited for; what breaks after a row keeps the row."""

    def slowly(_full: bool) -> Iterator[Result]:
        yield CLAIM
        raise OSError("later")

    made(slowly)
    rows = registry.check_module(MADE, MADE.modules[0], full=False)
    assert next(rows) == CLAIM
    assert "OSError: later" in next(rows).figure


def test_rows_and_what_remains_come_through_a_pipe_as_they_end() -> None:
    """The command as it is typed: the estimate and the first rows are there while later checks still run."""
    argv = [sys.executable, "-m", "appliance.operator.cli", "selftest", "--only", "G1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert re.fullmatch(r"5 checks, about \d+ s on two idle cores", next(lines).strip())
        assert any("pass" in line and "memory.control" in line for line in lines)
        assert process.poll() is None, "four more checks run"
        process.terminate()
        assert process.wait(60) == 128 + 15


def test_what_remains_follows_this_machines_pace() -> None:
    """Nothing is said before the first check has ended; a slow machine needs longer; release counts give none."""
    estimate = Estimate(100.0)
    assert estimate.remaining(5.0) == ""
    estimate.done_s = 20.0
    assert estimate.remaining(20.0) == "about 80 s remain"
    assert estimate.remaining(60.0) == "about 240 s remain"
    assert Estimate(100.0, endless=True, done_s=20.0).remaining(20.0) == ""


def test_an_unknown_id_is_a_usage_error(run: Run) -> None:  # noqa: F811
    """The ids there are are named."""
    result = run("selftest", "--only", "G1,G11")
    assert result.exit_code == 2
    assert "G11" in result.stderr
    assert "G10" in result.stderr


def test_chosen_ones_come_in_the_table_s_order() -> None:
    """Whatever the order and case in which they are named."""
    assert [one.id for one in registry.choose(("g8", "G2 "))] == ["G2", "G8"]
    assert registry.choose(()) == GUARANTEES
