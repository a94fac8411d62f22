"""What keeps the harness itself from working; what it finds about the appliance is a breach and no error."""

from __future__ import annotations


class SoakError(Exception):
    """Base of all."""


class UnavailableError(SoakError):
    """This machine cannot show it; the message says why."""


class UsageError(SoakError):
    """The command line asks for what there is not."""


class BreachError(SoakError):
    """The appliance did what it must not while a fault was at work; the message says what."""
