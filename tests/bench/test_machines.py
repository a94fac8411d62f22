"""The table of results names its machines, and their cards are cards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.operator.bench.errors import CardError
from appliance.operator.bench.machine_card import MachineCard

HEADING = "| machine |"
"""Beginning of the table of machines; the tables of figures have the machine in a later column."""

PLACE = 4
"""Column of the machine in a table of figures: bar, figure, date, commit, machine, command."""


def rows(text: str) -> list[list[str]]:
    """Cells of all rows of tables."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def machine_table(text: str) -> dict[str, str]:
    """Card's link of each machine, empty where it has none, by letter."""
    table = text[text.index(HEADING) :].partition("\n\n")[0]
    return {row[0].split()[0]: row[-1] for row in rows(table)[1:]}


def strangers(text: str) -> list[str]:
    """Letters in rows of figures that the table of machines lacks."""
    known = machine_table(text)
    figures = [row for row in rows(text) if len(row) == PLACE + 2 and row[PLACE] != "machine"]
    assert figures
    return [letter for row in figures for letter in re.findall(r"\w+", row[PLACE]) if letter not in known]


def broken_cards(text: str, folder: Path) -> list[str]:
    """Links of the table of machines that lead to no card."""
    broken = []
    for cell in filter(None, machine_table(text).values()):
        link = re.fullmatch(r"\[[\w-]+\]\((machines/[\w-]+\.json)\)", cell)
        try:
            MachineCard.from_json((folder / link[1]).read_text() if link else "")
        except (CardError, OSError) as error:
            broken.append(f"{cell}: {error}")
    return broken


@pytest.fixture
def results(root: Path) -> str:
    """The table of results."""
    return (root / "bench/RESULTS.md").read_text()


def test_every_figure_is_of_a_machine_that_the_table_names(results: str) -> None:
    """No row of figures has an unknown letter; control: one with the letter Z is found."""
    assert strangers(results) == []
    assert strangers(f"{results}\n| bar | 1 | 2026-11-23 | `0` | Z | same |\n") == ["Z"]


def test_every_linked_card_is_one(results: str, root: Path) -> None:
    """Links of machines lead to cards; control: a link to no file, and to a file that is no card, are found."""
    assert broken_cards(results, root / "bench") == []
    assert sum(map(bool, machine_table(results).values())) >= 2
    spoiled = results.replace("(machines/epyc-zen1-2.json)", "(machines/none.json)")
    assert len(broken_cards(spoiled, root / "bench")) == 1
    assert len(broken_cards(results.replace("](machines/epyc-zen4-2.json)", "](RESULTS.md)"), root / "bench")) == 1


def test_every_card_is_linked(results: str, root: Path) -> None:
    """The folder of cards has no card that the table forgets."""
    cards = {f"machines/{path.name}" for path in (root / "bench/machines").iterdir()}
    assert cards and all(card in results for card in cards)


def test_no_fact_of_the_earlier_machine_is_made_up(root: Path) -> None:
    """The card of machine C, which is gone, has nothing that was not written down of it."""
    card = MachineCard.from_json((root / "bench/machines/epyc-zen1-2.json").read_text())
    assert (card.family, card.model, card.logical_cores) == (23, 1, 2)
    assert card.stepping is card.kernel is card.memory_read_gb_s_one_core is card.best_kernel_variant is None
