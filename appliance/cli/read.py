"""From an answer of the admin listener to a value, or to an end with a reason."""

from __future__ import annotations

from typing import TypeVar

from appliance.cli import exits
from appliance.cli.admin_client import Answer
from appliance.cli.terminal import fail
from appliance.snapshot import SnapshotError, decode

T = TypeVar("T")


def read(kind: type[T], answer: Answer, *others: int) -> T:
    """The value in an answer of status 200 or one of ``others``; anything else ends the command."""
    if answer.status not in (200, *others):
        fail(exits.REFUSED, answer.message())
    try:
        return decode(kind, answer.body)
    except SnapshotError as error:
        fail(
            exits.UNREACHABLE,
            f"the answer is not understood: {error}",
            "the appliance and this command may be of different versions",
        )
