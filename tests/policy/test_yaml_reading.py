"""policy.positions and policy.yaml_text: one reading of a text, frozen answers, and how often a text is read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yaml.cyaml import CParser

import policy.positions
from policy.errors import PolicyError, PolicySyntaxError
from policy.loader import MAX_PROBLEMS, Source, load_policy
from policy.positions import load_yaml
from policy.references import dangling, located
from policy.schema import MAX_TENANTS
from tests.policy.broken_policies import MUTATIONS, Broken, broken_policies

READINGS = json.loads((Path(__file__).parent / "cases" / "yaml_reading.json").read_text())
"""Texts with data and places, or the error, as a reader in pure Python gave them (ruamel.yaml 0.19, YAML 1.2)."""

BROKEN = list(broken_policies(200, seed=1))


class Passes:
    """Parsers made and events read since the beginning of a test."""

    def __init__(self) -> None:
        self.parsers = 0
        self.events = 0

    def parser(self, text: str) -> Any:
        """Return a parser that counts."""
        self.parsers += 1
        real = CParser(text)

        class Counting:
            def get_event(_self) -> Any:
                self.events += 1
                return real.get_event()

        return Counting()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Count what policy.positions reads."""
    found = Passes()
    monkeypatch.setattr(policy.positions, "CParser", found.parser)
    return found


def policy_text(tenants: int) -> str:
    """A policy with so many tenants, each with one key, a line each."""
    lines = (
        f'  t{number:05}: {{credentials: ["key:k{number:05}"], models: ["m"], weight: {number % 9 + 1}, '
        f"limits: {{concurrency: {number % 64 + 1}}}}}\n"
        for number in range(tenants)
    )
    return "version: 1\ntenants:\n" + "".join(lines)


def test_texts_read_as_they_did_through_another_reader() -> None:
    """Data, the place of every key and value, and errors with their places and words are those that another
    implementation of YAML gave: valid texts, broken ones and texts drawn from YAML's signs."""
    for reading in READINGS:
        text = reading["text"]
        try:
            data, locate = load_yaml(text, "x")
        except PolicySyntaxError as error:
            assert str(error) == "x:" + reading["error"], text
            continue
        assert json.dumps(data) == json.dumps(reading["data"]), text
        for path, *place in reading["values"]:
            assert locate(tuple(path)) == tuple(place), (text, path)
        for path, *place in reading["keys"]:
            assert locate.key(tuple(path)) == tuple(place), (text, path)


def test_the_frozen_readings_are_of_both_kinds() -> None:
    """Control of the test above: hundreds of errors of many kinds, and more than a hundred texts with data."""
    errors = [reading["error"].partition(": ")[2] for reading in READINGS if "error" in reading]
    assert len(errors) > 250 and len(set(errors)) > 60
    assert sum(len(reading["values"]) > 3 for reading in READINGS if "values" in reading) > 20


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("a: >\n  x\n  y\n", {"a": "x y\n"}),
        ('a: "x\u2028y"\n', {"a": "x\u2028y"}),
        ("a: x\x85y\n", {"a": "x\x85y"}),
        ('a: "\x85 \\U000F0000"\n', {"a": "\x85 \U000f0000"}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("{a: :b}", "x:1:5: not YAML: while parsing a flow node: expected the node content, but found ':'"),
        ("[a:]", "x:1:3: not YAML: while scanning a plain scalar: found unexpected ':'"),
        ("%FOO\n---\na: 1\n", "x:1:5: directives are not accepted"),
        ("*a : 1\n", "x:1:1: a key must be text"),
        ("|\ntext\n", "x:2:1: not YAML: expected '<document start>', but found ('<scalar>',)"),
    ],
)
def test_where_two_readers_differ(text: str, outcome: object) -> None:
    """What this reader makes of texts on which the other one answered otherwise: folded text has no bell characters,
    characters that end lines in YAML 1.1 alone are ordinary ones, and what libyaml cannot read is refused."""
    try:
        data = load_yaml(text, "x")[0]
    except PolicySyntaxError as error:
        data = str(error)
    assert data == outcome


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a:\t1\n", (1, 3)),
        ("a: b\tc\n", (1, 5)),
        ("a: 1\n\tb: 2\n", (2, 1)),
        ("a: 'x\ty' \t# c\n", (1, 10)),
        ("a: |\t\n  x\n", (1, 5)),
        ("a: 'x\ty'\n", None),
        ("a: |\n  x\ty\n", None),
        ("a: [1,\t2,\n\t3]\n", None),
        ("a: 1 # c\td\n# \t\n", None),
    ],
)
def test_tabs_stand_in_texts_comments_and_brackets_only(text: str, place: tuple[int, int] | None) -> None:
    """A tab between tokens is refused at its place; in quotes, block scalars, comments and brackets it is not."""
    if place is None:
        assert load_yaml(text, "x")[0]["a"]
        return
    with pytest.raises(PolicySyntaxError, match=r"found character '\\t' that cannot start any token") as caught:
        load_yaml(text, "x")
    [problem] = caught.value.problems
    assert (problem.line, problem.column) == place


def test_a_hundred_thousand_tabs_are_looked_at_once() -> None:
    """Tabs of one long line, in a comment and in quotes, are no quadratic work."""
    tabs = "\t" * 100_000
    calls = python_calls(lambda: load_yaml(f'a: "{tabs}" #{tabs}\nb: 1\n', "x"))
    assert calls < 500


def test_deep_brackets_are_refused_at_once() -> None:
    """A hundred thousand brackets are read no further than the depth that is refused, even to find tabs."""
    for text in ("[" * 100_000, "[" * 100_000 + "\t", "- " * 100_000 + "\t"):

        def refused(text: str = text) -> None:
            with pytest.raises(PolicySyntaxError, match="nested deeper than 16"):
                load_yaml(text, "x")

        assert python_calls(refused) < 2_000


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.kind)
def test_a_mistake_is_placed_in_its_line(broken: Broken) -> None:
    """Each of 200 policies with one mistake is refused, with the line of the mistake and a column in that line."""
    with pytest.raises(PolicyError) as caught:
        load_policy([Source("p.yaml", broken.text)])
    first = caught.value.problems[0]
    assert (first.file, first.line) == ("p.yaml", broken.line), first
    assert 1 <= first.column <= len(broken.text.splitlines()[broken.line - 1]) + 1
    assert first.message


def test_the_mistakes_are_of_all_kinds() -> None:
    """Control of the test above: two hundred different texts, every mutation among them."""
    assert len({broken.text for broken in BROKEN}) == 200
    assert {broken.kind for broken in BROKEN} == set(MUTATIONS)


def test_ten_thousand_tenants_are_read_in_one_pass(passes: Passes) -> None:
    """The largest policy costs one parser and a fixed number of events a tenant; no place is looked for."""
    found = load_policy([Source("p.yaml", policy_text(MAX_TENANTS))])
    assert len(found.tenants) == len(found.principals) == MAX_TENANTS == 10_000
    assert passes.parsers == 1
    assert passes.events == 18 * MAX_TENANTS + 11


def test_mistakes_cost_one_more_pass_however_many_they_are(passes: Passes) -> None:
    """A policy with a mistake in each of a thousand tenants is read twice, and so is one whose model is nowhere.
    Control: that one is read once before its warnings are placed."""
    with pytest.raises(PolicyError) as caught:
        load_policy([Source("p.yaml", policy_text(1_000).replace("weight: ", "weight: -"))])
    assert len(caught.value.problems) == MAX_PROBLEMS
    assert passes.parsers == 2
    source = Source("p.yaml", policy_text(1_000))
    found = load_policy([source])
    assert passes.parsers == 3
    problems = located(dangling(found, ["n"], None), [source], "keys")
    assert [problem.line for problem in problems] == list(range(3, 1_003))
    assert passes.parsers == 5  # Once for the data, once for the places.


def test_work_grows_with_the_number_of_tenants() -> None:
    """Twice the tenants are at most twice the calls of Python functions, for loading and for comparing names; equal
    parts of tenants are one object."""
    half, whole = (python_calls(lambda: load_and_compare(count)) for count in (500, 1_000))
    assert whole < 2.05 * half
    tenants = load_policy([Source("p.yaml", policy_text(1_000))]).tenants.values()
    assert len({id(tenant.limits) for tenant in tenants}) == 64
    assert len({id(tenant.models) for tenant in tenants}) == len({id(tenant.kv) for tenant in tenants}) == 1


def load_and_compare(count: int) -> None:
    """Load a policy and compare its names."""
    found = load_policy([Source("p.yaml", policy_text(count))])
    assert not dangling(found, ["m"], Once(f"k{number:05}" for number in range(count)))


class Once(list):
    """A list of keys that must not be searched: a search for each tenant is quadratic work."""

    def __contains__(self, _key: object) -> bool:
        raise AssertionError("the list was searched")


def python_calls(work: Callable[[], object]) -> int:
    """Count the calls of Python functions."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
