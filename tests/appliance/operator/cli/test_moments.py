"""Times on the command line: every form that the help names, and what is none."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
import typer

from appliance.operator.cli.moments import MOMENTS, read_moment

NOW = datetime(2026, 11, 24, 13, 45, 6, tzinfo=UTC)

CASES = [
    ("now", NOW),
    ("today", datetime(2026, 11, 24)),
    ("yesterday", datetime(2026, 11, 23)),
    ("month", datetime(2026, 11, 1)),
    ("last-month", datetime(2026, 10, 1)),
    ("30s", datetime(2026, 11, 24, 13, 44, 36)),
    ("90m", datetime(2026, 11, 24, 12, 15, 6)),
    ("36h", datetime(2026, 11, 23, 1, 45, 6)),
    ("7d", datetime(2026, 11, 17, 13, 45, 6)),
    ("2w", datetime(2026, 11, 10, 13, 45, 6)),
    ("2026-11", datetime(2026, 11, 1)),
    ("2026-11-24", datetime(2026, 11, 24)),
    ("2026-11-24T13", datetime(2026, 11, 24, 13)),
    ("2026-11-24T13:30:00Z", datetime(2026, 11, 24, 13, 30)),
    ("2026-11-24T13:30", datetime(2026, 11, 24, 13, 30)),
    ("2026-11-24T13:30+02:00", datetime(2026, 11, 24, 11, 30)),
]


@pytest.mark.parametrize(("text", "moment"), CASES)
def test_times_are_read_as_they_are_said(text: str, moment: datetime) -> None:
    """Every form is the moment that it says, in UTC."""
    assert read_moment(text, NOW, "--since") == moment.replace(tzinfo=UTC)


def test_the_first_month_of_a_year_follows_the_last() -> None:
    """In January last month is December of the year before."""
    january = datetime(2027, 1, 31, 23, tzinfo=UTC)
    assert read_moment("last-month", january, "--since") == datetime(2026, 12, 1, tzinfo=UTC)


def test_the_help_names_forms_that_are_read() -> None:
    """No form is named that the reader refuses."""
    for form in re.split(r", | or ", MOMENTS):
        assert form in {text for text, _ in CASES}


@pytest.mark.parametrize("text", ["", "someday", "7", "7y", "-7d", "9999999d", "999999w", "2026-13", "2026-11-31", "d"])
def test_what_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A usage error that names the option, the text and the forms that are taken; a time before all times too."""
    with pytest.raises(typer.Exit) as caught:
        read_moment(text, NOW, "--until")
    assert caught.value.exit_code == 2
    assert f"--until {text!r} is no time; write now, today" in capsys.readouterr().err
