"""Dataclasses whose methods nothing compiles do what the library's do."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from appliance.common import quick_dataclasses
from appliance.common.quick_dataclasses import KNOWN, quicken_dataclasses

pytestmark = pytest.mark.skipif(sys.version_info[:2] not in KNOWN, reason="this Python's library is left as it is")

NAMES = ("_repr_fn", "_cmp_fn", "_hash_fn", "_frozen_get_del_attr")
library: Any = dataclasses


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library with quick methods, for one test."""
    for name in NAMES:
        monkeypatch.setattr(library, name, getattr(library, name))
    assert quicken_dataclasses()


def classes() -> dict[str, type]:
    """One class of each kind, made by the library as it is now."""

    @dataclasses.dataclass
    class Plain:
        first: int = 1
        second: object = "two"
        shown: int = dataclasses.field(default=3, repr=False)
        told: int = dataclasses.field(default=4, compare=False)

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        first: object = 1
        unhashed: int = dataclasses.field(default=2, hash=False)

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        first: object = 1
        second: object = (2,)

    @dataclasses.dataclass(frozen=True, slots=True)
    class One:
        first: object = 1

    @dataclasses.dataclass(frozen=True)
    class Nothing:
        pass

    @dataclasses.dataclass(frozen=True)
    class Below(Frozen):
        third: object = 3

    @dataclasses.dataclass(order=True, kw_only=True)
    class Ordered:
        first: object = 1
        second: object = 2

    @dataclasses.dataclass(frozen=True)
    class Own:
        first: object = 1

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    made = (Plain, Frozen, Slotted, One, Nothing, Below, Ordered, Own)
    return {cls.__name__: cls for cls in made}


def outcome(act: Callable[[], object]) -> object:
    """What a call gives, or the kind and text of what it raises."""
    try:
        return act()
    except (AttributeError, TypeError) as error:
        return type(error), str(error)


class Undefined:
    """A value that equals nothing, not even itself."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 5


def looks(cls: Any) -> list[object]:
    """What objects of a class answer to everything that a program can ask."""
    one, undefined = cls(), Undefined()
    found: list[object] = [repr(one), outcome(lambda: hash(one)), one == cls(), one != cls(), one == 1, one == object()]
    names = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        same, other = cls(**{name: undefined}), cls(**{name: math.nan})
        found += [same == one, same == same, cls(**{name: undefined}) == same, other == cls(**{name: math.nan})]
        found += [outcome(lambda same=same: hash(same)), repr(other), outcome(lambda same=same: one < same)]
        found += [dataclasses.replace(one, **{name: 9}) == cls(**{name: 9}), dataclasses.asdict(one)]
    for name in (*names, "unknown"):
        found.append(outcome(lambda name=name: setattr(one, name, 1)))
        found.append(outcome(lambda name=name: delattr(one, name)))
    below = type("Below", (cls,), {})()
    found += [repr(below), below == one, outcome(lambda: setattr(below, "unknown", 1)), cls.__match_args__]
    found += [cls.__qualname__, cls.__eq__.__qualname__, cls.__repr__.__qualname__, cls.__hash__ is None]
    return found


@pytest.mark.parametrize("name", list(classes()))
def test_a_class_answers_as_the_librarys(name: str, request: pytest.FixtureRequest) -> None:
    """Every kind of class gives the same texts, comparisons, hashes and errors, with the same names of methods."""
    expected = looks(classes()[name])
    request.getfixturevalue("quick")
    assert looks(classes()[name]) == expected


def test_an_object_within_itself_is_shown(quick: None) -> None:
    """A cycle ends the text, as in the library."""
    cls = classes()["Plain"]
    one = cls(second=[])
    one.second.append(one)
    assert "second=[...]" in repr(one)


def test_nothing_compiles_but_what_makes_objects(quick: None) -> None:
    """Source of ``__init__`` alone is compiled, and of the order that few classes have. Control: the library compiles
    all methods."""
    of = {name: {key for key, one in vars(cls).items() if compiled(one)} for name, cls in classes().items()}
    assert of.pop("Ordered") == {"__init__", "__lt__", "__le__", "__gt__", "__ge__"}
    assert all(names == {"__init__"} for names in of.values())


def test_the_library_compiles_all() -> None:
    """What the test above rests on: without the replacement every method comes from source."""
    assert {"__init__", "__repr__", "__eq__"} <= {key for key, one in vars(classes()["Plain"]).items() if compiled(one)}


def compiled(method: object) -> bool:
    """Whether a method came from source that the library wrote."""
    code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
    return code is not None and code.co_filename == "<string>"


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library is unknown, nothing is changed."""
    monkeypatch.setattr(quick_dataclasses, "KNOWN", ((2, 7),))
    before = [getattr(library, name) for name in NAMES]
    assert not quicken_dataclasses()
    assert [getattr(library, name) for name in NAMES] == before


CHILD = """
import appliance.operator.child as child
before = dataclasses._repr_fn.__module__
child.run_role = lambda *_: None
child.main(["gateway", "x", "1", "3"])
"""
COMMAND = """
import appliance.operator.cli.app as app
before = dataclasses._repr_fn.__module__
sys.argv = ["athanor", "version"]
try:
    app.main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("begin", [CHILD, COMMAND], ids=["child", "command"])
def test_host_processes_and_commands_have_quick_ones(begin: str) -> None:
    """The launcher's child and the ``athanor`` command replace the methods when they begin; importing them does not."""
    program = f"import dataclasses, sys\n{begin}\nprint(before, dataclasses._repr_fn.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["dataclasses", "appliance.common.quick_dataclasses"]
