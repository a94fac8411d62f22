"""Parts of the suite: together all of it, no test in two."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import LONG, MACHINE, ROOT, gives_way
from tests.parts import check_names, keep_part, part_of


def test_parts_make_the_whole() -> None:
    """Each file is in one part; control: a part is not the whole."""
    items: list[Any] = [SimpleNamespace(path=Path(f"test_{number // 3}.py"), name=number) for number in range(30)]
    seen: list[int] = []
    for number in range(1, 5):
        kept = list(items)
        others = keep_part(kept, f"{number}/4")
        assert 0 < len(kept) < len(items) and len(kept) + len(others) == len(items)
        seen += [item.name for item in kept]
    assert sorted(seen) == list(range(30))
    whole = list(items)
    assert keep_part(whole, "1/1") == [] and whole == items


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1", "a/b", "1/0", "-1/4"])
def test_what_is_no_part_is_refused(text: str) -> None:
    """By the option's name."""
    with pytest.raises(pytest.UsageError, match="--part is K/N"):
        part_of(text)


def test_a_name_with_a_set_is_refused() -> None:
    """Control: with one entry, as a list, or under a name of its own a set does no harm."""

    def item(value: object, name: str) -> Any:
        return SimpleNamespace(nodeid=f"test_x.py::test_y[{name}]", callspec=SimpleNamespace(params={"value": value}))

    for value in ({"a"}, ["a", "b"], (1, {"a"})):
        check_names([item(value, str(value))])
    check_names([item({"a", "b"}, "both"), SimpleNamespace(nodeid="test_x.py::test_z")])  # type: ignore[list-item]
    for value in ({"a", "b"}, (1, [{"a", "b"}])):
        with pytest.raises(pytest.UsageError, match="order of a set"):
            check_names([item(value, str(value))])


@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("group", ["tests/a.py", MACHINE])
def test_a_worker_gives_way_only_where_groups_are_whole(worker: bool, grouped: bool, group: str) -> None:
    """A worker lowers its priority for good: it may have no test that compares times behind that, which is so only
    where each group is one worker's."""
    config = SimpleNamespace(getoption=lambda name, default: grouped if name == "loadgroup" else default)
    if worker:
        config.workerinput = {}
    item = SimpleNamespace(config=config, get_closest_marker=lambda _name: pytest.mark.xdist_group(group).mark)
    assert gives_way(item) is (worker and grouped and group != MACHINE)  # type: ignore[arg-type]


def test_long_files_are_there() -> None:
    """A file that has another name now would come last again."""
    assert [name for name in LONG if not (ROOT / name).is_file()] == []
