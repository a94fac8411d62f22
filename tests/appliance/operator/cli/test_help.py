"""Help, version and completion: exact looks, and that they come at once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.common.version import VERSION
from appliance.operator.cli.app import app, for_line
from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

COMMANDS = [
    (),
    ("demo",),
    ("serve",),
    ("status",),
    ("traces",),
    ("top",),
    ("console",),
    ("logs",),
    ("doctor",),
    ("bundle",),
    ("bench",),
    ("selftest",),
    ("reload",),
    ("config",),
    ("config", "reference"),
    ("config", "show"),
    ("policy",),
    ("policy", "init"),
    ("policy", "check"),
    ("policy", "diff"),
    ("policy", "explain"),
    ("policy", "test"),
    ("policy", "schema"),
    ("key",),
    ("key", "create"),
    ("key", "import"),
    ("key", "list"),
    ("key", "revoke"),
    ("key", "rotate"),
    ("tenant",),
    ("tenant", "add"),
    ("tenant", "list"),
    ("tenant", "show"),
    ("tenant", "remove"),
    ("tenant", "usage"),
    ("tenant", "shred"),
    ("tenant", "rotate"),
    ("tenant", "release"),
    ("tenant", "rewrap"),
    ("tenant", "root"),
    ("audit",),
    ("audit", "verify"),
    ("audit", "show"),
    ("install",),
    ("uninstall",),
    ("package",),
    ("package", "deb"),
    ("image",),
    ("image", "build"),
    ("image", "verify"),
    ("image", "list"),
    ("image", "use"),
    ("sandbox",),
    ("sandbox", "calls"),
    ("kernels",),
    ("kernels", "build"),
    ("kernels", "gpu"),
    ("model",),
    ("model", "convert"),
    ("model", "digest"),
    ("model", "pull"),
    ("model", "list"),
    ("version",),
]

HEAVY = ("torch", "grpc", "opentelemetry", "starlette", "uvicorn", "structlog", "numpy")

HELP_COSTS = 3.0
"""Most that ``athanor --help`` may cost, in imports of the two libraries that print it; measured 1.7, or 0.12 s."""


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: "-".join(one) or "root")
def test_help_looks_as_agreed(run: Run, command: tuple[str, ...], columns: int) -> None:
    """Each command's help is exactly as last looked at, and fits the terminal."""
    result = run(*command, "--help", columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert result.stdout.isascii()
    golden.check(GOLDEN / f"help-{'-'.join(command) or 'root'}-{columns}.txt", result.stdout)


def test_no_arguments_is_help(run: Run) -> None:
    """``athanor`` alone shows the help and ends as a usage error."""
    result = run()
    assert result.exit_code == 2
    assert "Usage" in result.output
    assert "athanor demo" in result.output


def test_short_option(run: Run) -> None:
    """-h is --help."""
    assert run("traces", "-h").stdout == run("traces", "--help").stdout


def test_version(run: Run) -> None:
    """--version is one line; ``version`` tells what a report of a problem needs."""
    assert run("--version").stdout == f"athanor {VERSION}\n"
    facts = json.loads(run("version", "-o", "json").stdout)
    assert facts["athanor"] == VERSION
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["semantic_conventions"] == "1.41.1"
    assert "wire protocol" in run("version").stdout


@pytest.mark.parametrize(
    "args", [("nonsense",), ("traces", "--nonsense"), ("traces", "-n", "0"), ("key", "create"), ("-o", "x")]
)
def test_usage_errors(run: Run, args: tuple[str, ...]) -> None:
    """A wrong command line ends with 2, on standard error, with the way to the help."""
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--help" in result.stderr or "-h" in result.stderr


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter in the repository's root."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=Path(__file__).resolve().parents[4],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def spent_s(*args: str) -> float:
    """Processor time of an interpreter, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python(*args).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_comes_at_once() -> None:
    """``athanor --help`` costs little more than the libraries that it is printed with: least of three against least of
    three, as a busy machine only adds. Tried again where it was too busy."""
    bare: list[float] = []
    own: list[float] = []
    for number in range(9):
        bare.append(spent_s("-c", "import typer.main, rich.panel, rich.table"))
        own.append(spent_s("-m", "appliance.operator.cli", "--help"))
        if number >= 2 and min(own) < HELP_COSTS * min(bare):
            return
    assert min(own) < HELP_COSTS * min(bare)


def test_help_imports_nothing_heavy() -> None:
    """Neither the app nor its help load the engine, the servers or telemetry; serving would."""
    code = (
        "import sys, contextlib, appliance.operator.cli.app as a\n"
        "with contextlib.suppress(SystemExit):\n"
        "    a.app(['demo', '--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    assert python("-c", code).stderr == "[]\n"
    control = python("-c", f"import appliance.gateway.process\n{code}")
    assert "opentelemetry" in control.stderr


def test_a_line_reads_only_the_command_that_it_names() -> None:
    """A line brings its own command, or the group of it; options and mistakes bring all (control). The overview brings
    all names without what they take, and prints the very help of the whole application."""
    for words, commands, groups in ((["status", "-h"], ["status"], []), (["policy", "check"], [], ["policy"])):
        part = for_line(words)
        assert [one.name for one in part.registered_commands] == commands
        assert [one.name for one in part.registered_groups] == groups
    for words in ([], ["--version"], ["statsu"]):
        assert for_line(words) is app and len(app.registered_commands) > 10
    for option in ("-h", "--help"):
        part, whole = (CliRunner().invoke(one, [option]) for one in (for_line([option]), app))
        assert part.output == whole.output and part.exit_code == whole.exit_code == 0 and "status" in part.output
        assert CliRunner().invoke(for_line([option]), [option, "status"]).output == part.output


def test_completion_is_built_in() -> None:
    """A shell's question is answered with the commands and with an option's name."""
    found = python(
        "-m", "appliance.operator.cli", _ATHANOR_COMPLETE="complete_bash", COMP_WORDS="athanor t", COMP_CWORD="1"
    )
    assert found.stdout.split() == ["top", "traces", "tenant"]
    found = python(
        "-m",
        "appliance.operator.cli",
        _ATHANOR_COMPLETE="complete_bash",
        COMP_WORDS="athanor traces --li",
        COMP_CWORD="2",
    )
    assert found.stdout.split() == ["--limit"]


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("statsu", "no such command 'statsu'. Did you mean 'status'", "`athanor --help`"),
        ("status --foo", "no such option: --foo", "`athanor status --help`"),
        ("key create", "missing argument 'TENANT'", "`athanor key create --help`"),
        ("logs -n 0", "invalid value for '--lines'", "`athanor logs --help`"),
    ],
)
def test_a_wrong_command_line_is_told_as_every_other_error(run: Run, line: str, said: str, hint: str) -> None:
    """One line that says what is wrong, one that leads to how it would be right; exit code 2, nothing to stdout."""
    result = run(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: {said}")
    assert second.startswith(f"hint:  {hint}")
