"""Messages of ``appliance.common.control`` about charges that outlive the gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeepCharges:
    """Gateway: asks for memory in which charges of running requests outlive it
    (``appliance.common.usage.open_charges``)."""


@dataclass(frozen=True, slots=True)
class ChargesUp:
    """Supervisor: that memory comes with this message, in place of earlier one, and the end of a pipe that the gateway
    keeps open as long as it lives."""
