"""A list of system calls with more allowed: what a collection found outside of it, and nothing else. Pure.

For one question only, which the collector's command asks: with these, does the program live under enforcement?
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.sandbox.allowed_calls import Call


def widened(calls: Sequence[Call], added: Iterable[Mapping[str, Any]]) -> tuple[Call, ...]:
    """The list with these calls.

    Args:
        calls: the list.
        added: name and number of each call that was found outside. One that is listed loses its conditions: its
            descriptors have other numbers in the next process.
    """
    wanted = {str(one["name"]): int(one["number"]) for one in added}
    result = [replace(call, arguments=(), answer=None) if call.name in wanted else call for call in calls]
    listed = {call.name for call in calls}
    machine = os.uname().machine
    for name, number in wanted.items():
        if name not in listed:
            x86_64, aarch64 = (number, None) if machine == "x86_64" else (None, number)
            result.append(Call(name, x86_64, aarch64, "found by a collection"))
    return tuple(result)
