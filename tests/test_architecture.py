"""The shape of the tree: empty ``__init__``, bounded modules and functions, docstrings, nothing forbidden."""

from __future__ import annotations

import ast
import gc
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = ("appliance", "engine", "isolation", "policy")
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 300

BROAD_HANDLERS = {
    "appliance/gateway/http/app.py",
    "appliance/gateway/http/background.py",
    "appliance/gateway/grpc/servicer.py",
    "appliance/gateway/fleet/prefill_service.py",
    "appliance/operator/api/front.py",
    "appliance/gateway/request/follower.py",
    "engine/__main__.py",
    "engine/follow.py",
    "engine/text/grammar_process.py",
    "appliance/selftest/registry.py",
}
"""Where every exception may be caught: the front ends' boundaries, and that of answers that go on without their
request; the engine's and the grammar keeper's, which end the process; the border of one request in a pass over all
streams, behind which it is raised in the request's own task; and that of one row of the self-test."""


BLOCKS = {
    kind: tuple(name for name in reversed(kind._fields) if name in ("body", "handlers", "orelse", "finalbody", "cases"))
    for kind in (ast.Module, *ast.stmt.__subclasses__(), *ast.excepthandler.__subclasses__(), ast.match_case)
}
"""For each kind of statement its fields that hold statements, the last first."""

BOUNDED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""What may have so many lines. Made once: each statement of the tree is compared with it."""


def modules(root: Path) -> list[Path]:
    """Our own modules, generated ones left out."""
    found = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    return [path for path in found if "generated" not in path.parts]


def parse(text: str) -> ast.Module:
    """The syntax tree. CPython 3.11 counts recursion while it builds the tree, and a finaliser that the collector runs
    in between upsets the count (SystemError), so the collector waits."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


def test_init_files_are_empty(root: Path) -> None:
    """Importing a package imports nothing."""
    for path in modules(root):
        if path.name == "__init__.py":
            assert path.read_text() == "", path


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at in a module, which is parsed once for all of them."""

    lines: int
    definitions: list[tuple[int, str, int, int]]
    """Line, name, lines and permitted lines of each class and function."""
    broad: bool
    """Whether a handler takes every exception and raises none."""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node, and all statements, handlers and cases below it; expressions, which are most of a tree, hold none."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        for name in BLOCKS[type(node)]:
            left += getattr(node, name)[::-1]


def shape(text: str) -> Shape:
    """The shape of a module."""
    definitions, broad = [], False
    for node in statements(parse(text)):
        if isinstance(node, BOUNDED):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            most = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            definitions.append((node.lineno, node.name, length, most))
        elif isinstance(node, ast.ExceptHandler):
            name = getattr(node.type, "id", None)
            swallows = not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            broad |= (node.type is None or name in ("Exception", "BaseException")) and swallows
    return Shape(text.count("\n"), definitions, broad)


@pytest.fixture(scope="module")
def shapes(root: Path) -> dict[str, Shape]:
    """Every module of ours by its path."""
    return {path.relative_to(root).as_posix(): shape(path.read_text()) for path in modules(root)}


def test_modules_and_functions_are_of_a_size_to_read(shapes: dict[str, Shape]) -> None:
    """No module over 500 lines, no class over 300, no function over 60."""
    long = [f"{path}: {one.lines} lines" for path, one in shapes.items() if one.lines > MAX_MODULE_LINES]
    for path, one in shapes.items():
        for line, name, length, most in one.definitions:
            if length > most:
                long.append(f"{path}:{line} {name}: {length} lines")
    assert long == []


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods of a module, those within functions left out: no test is one, and to look at all that
    functions do takes most of the time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from functions(node)


def test_every_test_says_what_it_shows(root: Path) -> None:
    """Each test function has a docstring."""
    silent = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in functions(parse(path.read_text())):
            if node.name.startswith("test_") and ast.get_docstring(node) is None:
                silent.append(f"{path}:{node.lineno}")
    assert silent == []


def test_broad_handlers_stand_only_at_the_named_boundaries(shapes: dict[str, Shape]) -> None:
    """``except Exception`` and wider appear where they are named only; a handler that re-raises is none."""
    assert {path for path, one in shapes.items() if one.broad} <= BROAD_HANDLERS


def test_shapes_are_seen() -> None:
    """Positive control: lines, lengths and a broad handler are found, and a handler that re-raises is none."""
    body = "def f():\n    try:\n        pass\n    except Exception:\n        {}\n"
    assert shape(body.format("pass")) == Shape(5, [(1, "f", 5, MAX_FUNCTION_LINES)], True)
    assert not shape(body.format("raise")).broad


@pytest.mark.parametrize(
    "word", ["torch.load", "pickle.", "trust_remote_code", "shell=True", "yaml.load(", "NotImplementedError", "TODO"]
)
def test_words_that_never_appear(root: Path, word: str) -> None:
    """No unsafe loader, no remote code, no stub: searched for in every module of ours."""
    assert [path for path in modules(root) if word in path.read_text()] == []


MACHINE_PATHS = r"(^|[^A-Za-z0-9_.])/(work|home|root/\.pyenv)/|index-url[= ]"
"""Home and work directories, and options that name a package host, as an extended regular expression."""


def tracked_lines(repository: Path, pattern: str) -> list[str]:
    """Lines of tracked text files that match; ``git grep`` has status 1 where there is none, and more on an error."""
    done = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ".", ":!*.lock", ":!tests/test_architecture.py"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_no_path_of_one_machine_is_tracked(root: Path) -> None:
    """Tracked files name no home or work directory and no package host; control: the search sees tracked files."""
    assert tracked_lines(root, MACHINE_PATHS) == []
    assert len(tracked_lines(root, "^def test_")) > 1_000


@pytest.mark.parametrize("line", ["cd /home/someone/x", "pip --index-url https://host.example/", "x=/work/main/a"])
def test_a_path_of_one_machine_is_found(tmp_path: Path, line: str) -> None:
    """Positive control: in a repository of its own each such line is found, and outside of one the search fails."""
    (tmp_path / "file.txt").write_text(f"{line}\nx/home/y\n")
    with pytest.raises(AssertionError, match="not a git repository"):
        tracked_lines(tmp_path, MACHINE_PATHS)
    for command in (["init", "--quiet"], ["add", "file.txt"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert tracked_lines(tmp_path, MACHINE_PATHS) == [f"file.txt:1:{line}"]
