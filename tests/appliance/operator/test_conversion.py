"""``athanor model convert``: what it says and leaves, and the wall around what reads the file."""

from __future__ import annotations

import json
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from appliance.common.catalog import read_model
from appliance.common.errors import ConfigError
from appliance.operator import conversion_child
from appliance.operator.cli import model as model_command
from appliance.operator.conversion import convert
from isolation.host.process import owned_children
from tests.appliance.operator.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.engine.convert.write_gguf import Kind, write_embedded

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """athanor-mini as a file of 8 bits a weight."""
    folder = tmp_path_factory.mktemp("mini")
    write_embedded(folder, folder / "mini.gguf", Kind.Q8_0)
    return folder / "mini.gguf"


def test_the_command_makes_a_folder_that_can_be_served(run: Run, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """One line says what was made; the catalog takes the folder; nothing else is left beside it."""
    folder = tmp_path / "models" / "mini"
    result = run("model", "convert", str(source), str(folder), columns=200)
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.stdout
    assert "Q8_0 as bfloat16" in result.stdout
    assert [one.name for one in folder.parent.iterdir()] == ["mini"]
    found = read_model("mini", folder)
    assert {name for name, _path in found.engine} == {"config.json", "generation_config.json", "model.safetensors"}
    assert {stat.S_IMODE(one.stat().st_mode) & 0o004 for one in folder.iterdir()} == {0o004}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_json_is_for_other_programs(run: Run, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """-o json gives one document and nothing else."""
    result = run("model", "convert", str(source), str(tmp_path / "made"), "--dtype", "float16", "-o", "json")
    assert json.loads(result.stdout) == {
        "folder": str(tmp_path / "made"),
        "architecture": "LlamaForCausalLM",
        "tensors": 47,
        "types": ["F32", "Q8_0"],
        "dtype": "float16",
        "weight_bytes": 2 * 7_721_088,
        "chat_template": True,
    }
    assert result.stderr == ""


def test_progress_is_told_in_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word about progress is that everything was written; a person at a terminal sees a bar."""
    told: list[tuple[int, int]] = []
    convert(source, tmp_path / "made", dtype="auto", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2 * 7_721_088, 2 * 7_721_088)
    screen = Console(force_terminal=True, width=80, file=(tmp_path / "screen").open("w"))
    monkeypatch.setattr(model_command, "errors", lambda: screen)
    model_command.convert(source, tmp_path / "again", "auto", output_format=model_command.Format.TABLE)
    screen.file.close()
    assert "converting" in (tmp_path / "screen").read_text()


def test_refusals(run: Run, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """A missing file, a full folder, an unknown dtype, a file of another kind or cut short: code 1, a sentence, nothing
    left behind."""
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[: 2 * MIB])
    (tmp_path / "other.gguf").write_bytes(b"\x7fELF" + bytes(4_096))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("kept")
    before = sorted(tmp_path.iterdir())
    for arguments, message in (
        ((str(tmp_path / "none.gguf"), "made"), "is not a file"),
        ((str(tmp_path / "cut.gguf"), "made"), "it is truncated"),
        ((str(tmp_path / "other.gguf"), "made"), "is not a GGUF file"),
        ((str(source), "full"), "is not an empty folder"),
        ((str(source), "made", "--dtype", "int8"), "the dtype must be one of"),
    ):
        name, folder, *rest = arguments
        result = run("model", "convert", name, str(tmp_path / folder), *rest, columns=300)
        assert result.exit_code == 1, arguments
        assert message in result.stderr
        assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "full" / "precious").read_text() == "kept"


def test_a_full_disk_is_told(source: Path, tmp_path: Path) -> None:
    """When the drive has no room, that is said and nothing is left."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(ConfigError, match="No space left"):
            convert(source, small / "made", dtype="auto", progress=lambda done, total: None)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


TRY = """
import json, os, socket, sys
import numpy
from engine.convert.calls import converter_calls
from engine.sandbox.lockdown import lock_down
source = os.open(sys.argv[1], os.O_RDONLY)
target = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
other = os.open(sys.argv[1], os.O_RDONLY)
wall = ""
actions = {
    "reads": lambda: os.preadv(source, [bytearray(4)], 0),
    "writes": lambda: os.write(target, b"x"),
    "opens": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "connects": lambda: socket.socket(),
    "starts": lambda: os.execv("/bin/true", ["true"]),
    "forks": lambda: os.fork(),
    "reads another": lambda: os.preadv(other, [bytearray(4)], 0),
    "writes another": lambda: os.write(other, b"x") if wall == "locked" else None,
    "removes": lambda: os.unlink(sys.argv[2]),
}
ended = {}
for wall in ("open", "locked"):
    for name, act in actions.items():
        os.close(os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT))
        child = os.fork()
        if child == 0:
            if wall == "locked":
                lock_down(converter_calls((source,), (target,)))
            act()
            os._exit(0)
        ended[wall + " " + name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""
"""Every action in a process of its own, with the wall and without it; the one that they come from loads numpy once."""


@pytest.fixture(scope="module")
def endings(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How a process ended with each action, by the wall and the action."""
    out = tmp_path_factory.mktemp("tries") / "out"
    done = subprocess.run([sys.executable, "-c", TRY, str(source), str(out)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("action", "allowed"),
    [
        ("reads", True),
        ("writes", True),
        ("opens", False),
        ("connects", False),
        ("starts", False),
        ("forks", False),
        ("reads another", False),
        ("writes another", False),
        ("removes", False),
    ],
)
def test_what_the_converter_cannot_do(action: str, allowed: bool, endings: dict[str, int]) -> None:
    """Locked down it reads the one file and writes the others; anything else ends it. Without lock-down it could."""
    assert endings[f"locked {action}"] == (0 if allowed else -signal.SIGSYS)
    assert endings[f"open {action}"] == 0


def test_the_converter_locks_itself_down_before_it_reads(source: Path, tmp_path: Path) -> None:
    """The program's order, in its own process: the filter is there when the first byte is read."""
    code = (
        "import os, sys\n"
        "import engine.convert.__main__ as program\n"
        "def look(fd, name):\n"
        "    os.preadv(fd, [bytearray(4)], 0)\n"
        "    os.open('/etc/passwd', os.O_RDONLY)\n"
        "program.GgufFile = look\n"
        "sys.exit(program.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path), "auto"], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGSYS


def test_a_converter_that_misbehaves_is_held_to_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A taken-over converter says control characters, numbers that are none, too much, or nothing: each is an error."""
    source = tmp_path / "a.gguf"
    source.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    package, python = tmp_path / "talker", sys.executable
    (package / "bin").mkdir(parents=True)
    for number, (line, message) in enumerate(
        (
            ("print('done {}')", "without a word"),
            ("print('progress x y\\nprogress 1 2 3\\ndone []')", "without a word"),
            ("print('error ' + 'x' * 5000); raise SystemExit(3)", "x" * 1_000),
            ("while True: print('y' * 1000)", "printed more than a conversion"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSYS)", "do not trust it"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "memory or time"),
        )
    ):
        script = package / "bin" / "python"
        script.write_text(f"#!{python}\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(conversion_child.sys, "executable", str(script))
        with pytest.raises(ConfigError) as caught:
            convert(source, tmp_path / f"made-{number}", dtype="auto", progress=lambda done, total: None)
        assert message in str(caught.value)
        assert len(str(caught.value)) <= 1_000
        assert sorted(one.name for one in tmp_path.iterdir()) == ["a.gguf", "talker"]


def test_breaking_off_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """An interrupt while it converts ends the child and removes what was written."""

    with owned_children() as before:
        pass

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "made", dtype="auto", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    with owned_children() as children:
        assert children == before
