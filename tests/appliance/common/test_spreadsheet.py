"""Comma-separated values: no name in them is computed by a spreadsheet, whichever command or page wrote them."""

from __future__ import annotations

import csv
import io

import pytest

from appliance.common.spreadsheet import FORMULA_SIGNS, csv_text
from appliance.common.usage.host_cost import host_cost
from appliance.common.usage.report import By, Sum
from appliance.gateway.console import usage as console
from appliance.operator.cli import host_cost_view, usage_view

NAMES = ['=cmd|"x"!A1,', "+1", "-1", "@x", "\t=1", "a\r=1", "b\n=1", "alpha", ""]
SHOWN = ['\'=cmd|"x"!A1,', "'+1", "'-1", "'@x", "?=1", "a?=1", "b?=1", "alpha", ""]


def read(text: str) -> list[list[str]]:
    """Cells of all lines behind the titles."""
    return list(csv.reader(io.StringIO(text, newline="")))[1:]


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(lambda: console.csv_text(dict.fromkeys(NAMES, [1] * 6)), id="console"),
        pytest.param(
            lambda: usage_view.csv_text([Sum((name,), *[1] * 6) for name in NAMES], [By.TENANT]), id="usage-command"
        ),
        pytest.param(
            lambda: host_cost_view.csv_text(host_cost(1.0, 1.0, "EUR", [Sum((name,), *[1] * 6) for name in NAMES])),
            id="cost-command",
        ),
    ],
)
def test_no_name_is_a_formula(written) -> None:
    """Names that begin as formulas do get an apostrophe, and no name begins a cell of its own behind the end of a line;
    others stay as they are (control)."""
    assert sorted(line[0] for line in read(written())) == sorted(SHOWN)


def test_every_name_of_a_row_is_looked_at_and_no_number_is() -> None:
    """Two names and a negative number: the names are guarded, the number is a number. All signs are looked at."""
    assert read(csv_text(["a", "b", "c"], [["=1", "@2", -3]], 2)) == [["'=1", "'@2", "-3"]]
    assert all(read(csv_text(["a"], [[f"{sign}1"]], 1)) == [[f"'{sign}1"]] for sign in FORMULA_SIGNS)
