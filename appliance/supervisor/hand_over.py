"""How often a sandbox's descriptors are sent to the gateway again when they did not arrive. Pure.

A process that may open no more descriptors gets a message without those that came beside it; the kernel has dropped
them, and the message is gone from the socket. The supervisor therefore keeps its copies until the gateway has said that
it has them.
"""

from __future__ import annotations

from appliance.common.errors import HandOverError

FIRST_DELAY_S = 0.1
"""Seconds until the first repeat: a burst of connections is over by then."""

MOST_DELAY_S = 5.0
"""Longest time between two repeats; each is twice as long as the one before."""

MOST_REPEATS = 10
"""Repeats, which take some 20 s, after which it is an error for the operator and no moment of crowding."""

REST_S = 30.0
"""Seconds between two attempts after that: nobody has to restart anything once descriptors are free."""


class HandOver:
    """Attempts to hand one sandbox over."""

    def __init__(self) -> None:
        self.pending = False
        """Whether it was sent, and the gateway has not said what became of it."""
        self.repeats = 0
        """Times that its descriptors did not arrive."""

    @property
    def begun(self) -> bool:
        """Whether a gateway may have it, whatever it has said."""
        return self.pending or self.repeats > 0

    def sent(self) -> None:
        """Note that it was sent."""
        self.pending = True

    def cut(self) -> float:
        """Note that the descriptors did not arrive; returns the seconds until it is to be sent again."""
        self.pending = False
        self.repeats += 1
        if self.repeats >= MOST_REPEATS:
            return REST_S
        return min(MOST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self.repeats - 1))

    def problem(self, name: str, most_open: int) -> HandOverError | None:
        """Return what the operator has to know, at the repeat from which on that is so; None at all others.

        Args:
            name: the sandbox's.
            most_open: descriptors that the gateway says it may have.
        """
        if self.repeats != MOST_REPEATS:
            return None
        return HandOverError(
            f"the gateway could not take the descriptors of sandbox {name}, {self.repeats} times: all {most_open} that "
            "it may open are in use (RLIMIT_NOFILE). Raise LimitNOFILE= of athanor-gateway.service, or have fewer "
            f"connections; it is tried again every {REST_S:g} s"
        )
