"""A pytest plugin: workers share the rewriting of assertions, which takes half a minute of processor for all modules.

Every worker imports every test module, and all begin at once, so in a fresh clone each would rewrite each module by
itself. Here each rewrites its part of them first, where pytest keeps rewritten modules; what another worker has not
done yet is rewritten as usual. Modules are also kept where Python is told to write no byte code.
"""

from __future__ import annotations

from pathlib import Path

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


def pytest_sessionstart(session: pytest.Session) -> None:
    """Rewrite a worker's part of the modules, where it is to run those of the whole suite."""
    given = getattr(session.config, "workerinput", None)
    if given is not None and any(Path(argument).absolute() == TESTS for argument in session.config.args):
        rewrite_part(session.config, TESTS, int(given["workerid"].removeprefix("gw")), given["workercount"])


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
