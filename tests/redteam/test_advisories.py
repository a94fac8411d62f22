"""Every class of mistakes and every advisory leads to tests that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.redteam.advisories import ADVISORIES, Advisory
from tests.redteam.mistakes import MISTAKES, Mistake

TESTS = Path(__file__).resolve().parents[1]
ID = re.compile(r"CVE-20\d\d-\d{4,6}|GHSA(-[0-9a-z]{4}){3}|PYSEC-20\d\d-\d+")


@functools.cache
def functions(path: Path) -> frozenset[str]:
    """The test functions of a file, with those of classes."""
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def missing(tests: tuple[str, ...]) -> list[str]:
    """Of these tests those that are not there."""
    return [name for name in tests if not exists(name)]


def exists(name: str) -> bool:
    """Whether a test of this path and function is there."""
    path, _, function = name.partition("::")
    return (TESTS / path).is_file() and function in functions(TESTS / path)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: f"{one.number:02}")
def test_every_mistake_has_its_tests(mistake: Mistake) -> None:
    """Each of the twenty names tests, and all of them are there."""
    assert mistake.tests
    assert missing(mistake.tests) == []


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda one: "+".join(one.ids))
def test_what_an_advisory_teaches_is_tested(advisory: Advisory) -> None:
    """Each advisory belongs to a class, has well-formed ids, and names only tests that are there."""
    assert advisory.mistake in {one.number for one in MISTAKES}
    assert all(ID.fullmatch(one) for one in advisory.ids)
    assert missing(advisory.tests) == []


def test_the_twenty_are_all_there_and_no_id_stands_twice() -> None:
    """Numbers 1 to 20 in order; an advisory in one row only."""
    assert [one.number for one in MISTAKES] == list(range(1, 21))
    ids = [one for advisory in ADVISORIES for one in advisory.ids]
    assert len(ids) == len(set(ids)) > 80


def test_a_test_that_is_not_there_is_missed() -> None:
    """The control: a wrong function and a wrong file are found."""
    assert missing(("redteam/test_advisories.py::test_nowhere", "nowhere.py::test_x")) == [
        "redteam/test_advisories.py::test_nowhere",
        "nowhere.py::test_x",
    ]
