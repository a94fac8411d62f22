"""A pytest plugin: workers share the rewriting of assertions, which takes half a minute of processor for all modules.

Every worker imports every test module, and all begin at once, so in a fresh clone each would rewrite each module by
itself. Here each rewrites its part of them first, where pytest keeps rewritten modules; what another worker has not
done yet is rewritten as usual. Modules are also kept where Python is told to write no byte code.

Hypothesis likewise looks for numbers and words in every module of ours that is loaded, to draw them more often, and
keeps what it found: 7 s of processor in each worker, and the kept ones 0.7.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _read_pyc,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)

TESTS = Path(__file__).parent

SOURCES = ("appliance", "bench", "engine", "isolation", "policy")
"""Packages in whose modules Hypothesis looks for constants; it leaves out those of tests."""


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Rewrite and read a worker's part of the modules, where it is to run those of the whole suite; last of all, since
    Hypothesis keeps nothing before it has begun."""
    given = getattr(session.config, "workerinput", None)
    if given is not None and any(Path(argument).absolute() == TESTS for argument in session.config.args):
        number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
        rewrite_part(session.config, TESTS, number, count)
        read_part([TESTS.parent / name for name in SOURCES], number, count)


def read_part(folders: list[Path], number: int, count: int) -> None:
    """Have Hypothesis keep the constants of every ``count``-th module below some folders, from place ``number`` on,
    unless it has them; the other workers find them when all is collected."""
    from hypothesis.internal.constants_ast import constants_from_module

    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    for path in paths[number::count]:
        module = ModuleType(path.stem)
        module.__file__ = str(path)
        constants_from_module(module)


def rewrite_part(config: pytest.Config, folder: Path, number: int, count: int) -> None:
    """Rewrite every ``count``-th test module below a folder, from place ``number`` on, unless it is kept already."""
    state = config.stash.get(assertstate_key, None)
    if state is None:  # with --assert=plain
        return
    for path in sorted(folder.rglob("test_*.py"))[number::count]:
        kept = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
        if try_makedirs(kept.parent) and _read_pyc(path, kept) is None:
            try:
                stat, code = _rewrite_test(path, config)
            except SyntaxError:
                continue  # Its import tells, and ends that module's tests alone.
            _write_pyc(state, code, stat, kept)
