"""SECURITY.md names a test for every claim, and a state for every control, and all those tests are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.redteam.test_advisories import exists

CONTROLS = (
    *(
        f"AISVS {number}"
        for number in (
            "2.1.4",
            "2.1.7",
            "3.1.2",
            "3.1.3",
            "4.1.1",
            "4.1.2",
            "4.1.3",
            "4.2.4",
            "5.3.1",
            "5.3.2",
            "6.1.3",
            "6.2.1",
            "6.2.2",
            "11.2.2",
            "11.3.2",
            "12.1.1",
            "12.2.5",
            "12.4.3",
            "12.5.3",
        )
    ),
    *(f"OWASP LLM{number}:2026" for number in ("02", "04", "06", "08")),
    *(f"ATLAS AML.T{number}" for number in ("0010", "0024", "0029", "0034", "0057", "0105")),
    *(
        f"NIST {name}"
        for name in ("SC-4", "SC-5", "SC-7", "SC-12", "SC-13", "SC-28", "SC-31", "SI-10", "SI-11", "AU-9", "AU-10")
    ),
)
"""What the project is measured against."""


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its two first lines."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def security(root: Path) -> str:
    """The document."""
    return (root / "SECURITY.md").read_text()


def test_every_claim_names_tests_that_are_there(root: Path, security: str) -> None:
    """Each row of what holds names a file or folder of tests; a name without its folder belongs to the one before."""
    claims = rows(security, "What holds today")
    assert len(claims) > 25
    for claim in claims:
        named = re.findall(r"`(tests/[\w./]+?)(?:::\w+)?`", claim[-1])
        assert named, claim
        assert all((root / one).exists() for one in named), claim


def test_every_control_has_a_state_and_its_tests(security: str) -> None:
    """Each control is listed once; "yes" and "in part" name tests, all of which are there; "no" names none."""
    table = rows(security, "Public controls and what shows them")
    listed: list[str] = []
    for names, _asks, state, shown in table:
        family, _, numbers = names.partition(" ")
        listed += [f"{family} {number.strip()}" for number in numbers.split(",")]
        tests = re.findall(r"`tests/([\w./]+::\w+)`", shown)
        assert state.startswith(("yes", "in part", "no")), names
        assert bool(tests) != state.startswith("no"), names
        assert [one for one in tests if not exists(one)] == [], names
    assert [one for one in CONTROLS if one not in listed] == []
    assert len(listed) == len(set(listed))


def test_a_missing_test_would_be_seen() -> None:
    """The control: the table is read, and a wrong name is found."""
    text = "x\n## H\n\n| a | b |\n|---|---|\n| c | `tests/nowhere.py::test_x` |\n\n## I\n| d |\n"
    assert rows(text, "H") == [["c", "`tests/nowhere.py::test_x`"]]
    assert not exists("nowhere.py::test_x")
