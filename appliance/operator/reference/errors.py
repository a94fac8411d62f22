"""Errors that a caller can meet, from the error table, for the references."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.errors import ApplianceError, ConfigError, ControlError, RoleError, StartError
from appliance.operator.reference.markdown import code, first_paragraph

OF_OPERATORS = (ConfigError, StartError, ControlError, RoleError)
"""Errors that operators meet, and no tenant."""


def error_rows(*, for_grpc: bool) -> list[list[str]]:
    """Errors that a caller can meet, by status: from the error table."""
    rows = []
    for error in errors_of(ApplianceError):
        shown, meaning = error.wire, first_paragraph(error.__doc__)
        if for_grpc:
            rows.append([code(shown.grpc), code(shown.reason), meaning])
        else:
            rows.append([str(shown.http), code(shown.kind), code(shown.code), meaning])
    return sorted(rows)


def errors_of(base: type[ApplianceError]) -> Iterator[type[ApplianceError]]:
    """Yield the classes below one that have a row of their own and can reach a caller."""
    for one in base.__subclasses__():
        if one.__module__ != ApplianceError.__module__ or one in OF_OPERATORS:
            continue
        if "wire" in vars(one):
            yield one
        yield from errors_of(one)
