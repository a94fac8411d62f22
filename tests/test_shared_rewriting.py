"""Workers rewrite assertions of test modules, and read constants of all others, once between them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir
from hypothesis.configuration import StorageDirectory
from hypothesis.internal import constants_ast

from tests.shared_rewriting import SOURCES, read_part, rewrite_part


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


def test_each_worker_reads_its_part_of_the_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three modules the first of two workers reads two and the second one. Afterwards a worker that has imported
    one takes what is kept: its source is parsed no more. Control: before, it is."""
    kept = tmp_path / "kept"
    monkeypatch.setattr(constants_ast, "storage_directory", lambda _: StorageDirectory(kept, home_directory=kept))
    paths = [tmp_path / "ours" / f"{name}.py" for name in "abc"]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        path.write_text(f"LIMIT = {123_450 + number}\n")
    parsed: list[bytes | str] = []
    parse = constants_ast._constants_from_source

    def note(source: bytes | str, *, limit: bool) -> constants_ast.Constants:
        parsed.append(source)
        return parse(source, limit=limit)

    monkeypatch.setattr(constants_ast, "_constants_from_source", note)
    read_part([paths[0].parent], 0, 2)
    assert len(list(kept.glob("[0-9a-f]*"))) == 2 and paths[2].read_bytes() in parsed
    read_part([paths[0].parent], 1, 2)
    assert len(list(kept.glob("[0-9a-f]*"))) == 3
    parsed.clear()
    module = ModuleType("b")
    module.__file__ = str(paths[1])
    assert 123_451 in constants_ast.constants_from_module(module)
    assert paths[1].read_bytes() not in parsed and len(parsed) == 1


def test_constants_are_those_of_what_ships(root: Path) -> None:
    """Every package of ours is read, and Hypothesis takes its modules for local; those of tests it leaves out."""
    packages = {path.parent.name for path in root.glob("*/__init__.py")} - {"tests"}
    assert set(SOURCES) == packages
    assert constants_ast.is_local_module_file(str(root / "policy" / "evaluate.py"))
    assert not constants_ast.is_local_module_file(str(root / "tests" / "parts.py"))
