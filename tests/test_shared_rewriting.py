"""Workers rewrite assertions of test modules once between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir

from tests.shared_rewriting import rewrite_part


def test_each_worker_rewrites_its_part(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Of three modules the first of two workers keeps two and the second one, rewritten and where pytest looks for
    them; one that has changed since is rewritten again, and a kept one is left alone."""
    paths = [tmp_path / f"test_{name}.py" for name in "abc"]
    kept = [get_cache_dir(path) / f"{path.stem}{PYC_TAIL}" for path in paths]
    for path in paths:
        path.write_text("def test():\n    assert 1 + 1 == 2\n")
    rewrite_part(pytestconfig, tmp_path, 0, 2)
    assert [place.exists() for place in kept] == [True, False, True]
    rewrite_part(pytestconfig, tmp_path, 1, 2)
    for path, place in zip(paths, kept, strict=True):
        code = _read_pyc(path, place)
        assert code is not None
        assert "@pytest_ar" in code.co_names
    paths[0].write_text("def test():\n    assert 1 + 1 == 22\n")
    before = [place.stat().st_ino for place in kept]
    assert _read_pyc(paths[0], kept[0]) is None
    rewrite_part(pytestconfig, tmp_path, 0, 1)
    assert _read_pyc(paths[0], kept[0]) is not None
    assert [place.stat().st_ino == inode for place, inode in zip(kept, before, strict=True)] == [False, True, True]


def test_a_module_that_does_not_parse_is_left_to_its_import(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """A module with an error of syntax is passed over, and those behind it are rewritten."""
    broken, sound = tmp_path / "test_a.py", tmp_path / "test_b.py"
    broken.write_text("def test(:\n")
    sound.write_text("def test():\n    assert 1 + 1 == 2\n")
    rewrite_part(pytestconfig, tmp_path, 0, 1)
    assert [(get_cache_dir(path) / f"{path.stem}{PYC_TAIL}").exists() for path in (broken, sound)] == [False, True]
