"""When each API key was last used: noted for each call, told to the supervisor now and then.

A call costs one store in a dictionary. Nothing is written here: the gateway may write to no disk that lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.control import KeysUsed

TELL_S = 5.0
"""Seconds between two messages: so much of a last use is lost when the gateway is killed."""

MAX_TOLD = 500
"""Keys of one message, which must fit a datagram."""

MAX_NOTED = 200_000
"""Keys that are noted between two messages: two secrets of each of the most keys that there may be."""

Send = Callable[[KeysUsed], bool]
"""Sends a message to the supervisor; False when there is none."""


class UnsentKeyUses:
    """Last uses that the supervisor does not know yet."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._noted: dict[str, int] = {}

    def note(self, secret: str, now_s: float) -> None:
        """Note that a secret (``appliance.common.keys.secret_name``) was used at this Unix time."""
        if len(self._noted) < MAX_NOTED or secret in self._noted:
            self._noted[secret] = int(now_s)

    def tell(self) -> None:
        """Tell the supervisor; what it does not take is told later."""
        while self._noted:
            part = dict(islice(self._noted.items(), MAX_TOLD))
            if not self._send(KeysUsed(part)):
                return
            for name in part:
                del self._noted[name]

    async def run(self) -> None:
        """Tell the supervisor every ``TELL_S`` until cancelled."""
        while True:
            await aligned_sleep(TELL_S)
            self.tell()
