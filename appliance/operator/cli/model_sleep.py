"""``athanor model sleep | wake``: a model that nobody uses gives its memory back until a request comes for it."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

SLEEP_EXAMPLES = """
athanor model sleep llama | its sandboxes end; the next request wakes it
"""

WAKE_EXAMPLES = """
athanor model wake llama | before a request comes, which then waits for nothing
"""

CONFLICT, NOT_FOUND = 409, 404
"""HTTP statuses of an order that cannot be carried out now, and of one about no model."""

WAKE_S = 630.0
"""Patience for a wake, in seconds: the appliance's own, and a little more."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in requests and policies.")]


def sleep(name: Name, admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Put a model to sleep: its sandboxes end, and its memory is free.

    It stays listed, and the first request for it wakes it. Refused while requests use the model.
    """
    _order(name, "sleep", admin, output_format)


def wake(name: Name, admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Wake a model that sleeps, and wait until it answers.

    Models that are not always kept may be put to sleep for it, the least recently used one first.
    """
    _order(name, "wake", admin, output_format)


def _order(name: str, order: str, admin: str, output_format: Format) -> None:
    from urllib.parse import quote

    from appliance.common.figures import printable
    from appliance.common.sleep_rules import SleepOutcome
    from appliance.operator.cli.admin_client import ask, read

    answer = ask(admin, f"/models/{quote(name, safe='')}/{order}", "POST", WAKE_S)
    outcome = read(SleepOutcome, answer, CONFLICT, NOT_FOUND)
    if print_data(answer.body, output_format):
        raise typer.Exit(exits.OK if outcome.ok else exits.REFUSED)
    if not outcome.ok:
        fail(exits.REFUSED, outcome.message, "athanor model list shows the states of models")
    output().print(printable(outcome.message), soft_wrap=True, markup=False)
