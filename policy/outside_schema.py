"""Schema of where and when a tenant may send: networks, regions and hours (``policy.outside`` decides)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from policy.hours import read_span
from policy.networks import read_network

MAX_NETWORKS = 64
"""Largest number of networks of one tenant: each is looked into at every call."""
MAX_REGIONS = 64
"""Largest number of regions of one tenant, of entries of its model_regions, and of regions of each."""
MAX_HOURS = 32
"""Largest number of spans of hours of one tenant."""


def _refusal(message: str) -> PydanticCustomError:
    return PydanticCustomError("policy", "{text}", {"text": message})


def _checked_network(value: str) -> str:
    try:
        read_network(value)
    except ValueError:
        message = "must be a network such as 10.0.0.0/8 or 2001:db8::/32, without bits behind its prefix, or an address"
        raise _refusal(message) from None
    return value


def _checked_span(value: str) -> str:
    try:
        read_span(value)
    except ValueError as error:
        raise _refusal(str(error)) from None
    return value


Network = Annotated[str, AfterValidator(_checked_network)]
Hours = Annotated[str, AfterValidator(_checked_span)]
