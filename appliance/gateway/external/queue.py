"""Requests that wait for a place at an external model's endpoint: tenants take turns. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from isolation.ipc.engine import Submit


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a request."""

    request: int
    """Wire id of the output."""
    choice: int
    submit: Submit


class FairQueue:
    """Outputs that wait, in the order of arrival for each namespace; the namespaces take turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, deque[Output]] = OrderedDict()
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def add(self, output: Output) -> None:
        """Add an output."""
        self._waiting.setdefault(output.submit.namespace, deque()).append(output)
        self._number += 1

    def take(self) -> Output | None:
        """Remove and return the next output; None where none waits."""
        if not self._waiting:
            return None
        namespace, outputs = self._waiting.popitem(last=False)
        output = outputs.popleft()
        self._number -= 1
        if outputs:
            self._waiting[namespace] = outputs
        return output

    def remove(self, request: int) -> bool:
        """Remove the output with this id; returns whether it was waiting."""
        for namespace, outputs in self._waiting.items():
            for output in outputs:
                if output.request == request:
                    outputs.remove(output)
                    self._number -= 1
                    if not outputs:
                        del self._waiting[namespace]
                    return True
        return False
