"""What is known of one call of the operator's API, for the audit log and the metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlencode

MAX_MILLISECONDS = 86_400_000
"""Longest call that is told; a day."""

LOGIN_HEADER = "athanor-login"
"""Header of a command's order: number of the user who had logged in (proc(5), loginuid)."""

_METHOD = re.compile(r"athanor\.(admin|policy)\.v1\.[A-Za-z]{1,32}/[A-Za-z]{1,32}|\*")
_OUTCOME = re.compile(r"[A-Z_]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """One call."""

    method: str
    """``package.Service/Method``, or ``*`` for one that there is not."""
    user: int
    """User id of the caller, by the kernel's word; of a caller on another machine that of nobody, 65534."""
    roles: str
    """Roles that the caller has, separated by commas; empty: none."""
    subject: str
    """What it is about: a model, a key, a request, a version; empty: a tenant, or the appliance."""
    request: str
    """Id of the call, which its error names too."""
    outcome: str
    """Name of gRPC's status, or ``BEGUN``."""
    tenant: str = ""
    """Tenant that it is about; empty: none, or one that is to be forgotten, whom the order's entry names."""
    caller: str = ""
    """Credential of a caller on another machine; empty where the kernel tells the user."""
    reason: str = ""
    """Why a credential was refused; empty where none was."""
    milliseconds: int = 0
    """How long it took."""

    def query(self) -> str:
        """Return what the metrics are told, as a query string."""
        told = {"method": self.method, "outcome": self.outcome, "request": self.request}
        return urlencode(told | {"milliseconds": self.milliseconds})

    @classmethod
    def of_query(cls, query: Mapping[str, str]) -> Self:
        """Read what the metrics are told.

        Raises:
            ValueError: a field is missing or of another form.
        """
        method, outcome, took = (query.get(name, "") for name in ("method", "outcome", "milliseconds"))
        if not _METHOD.fullmatch(method) or not _OUTCOME.fullmatch(outcome):
            raise ValueError("method and outcome must be a method's and a status's names")
        if not (took.isascii() and took.isdigit() and len(took) <= 8 and int(took) <= MAX_MILLISECONDS):
            raise ValueError("milliseconds must be a whole number")
        request = query.get("request", "")[:64]
        return cls(
            method=method, user=0, roles="", subject="", request=request, outcome=outcome, milliseconds=int(took)
        )
