"""Memory for open charges, as the supervisor hands it over (``appliance.common.usage.open_charges``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from appliance.common.control import Control, Welcome
from appliance.common.control_charges import KeepCharges
from appliance.common.usage.open_charges import OpenCharges

log = structlog.get_logger()

AGAIN_S = 1.0
"""Seconds until memory that did not arrive is asked for again."""


NOTHING_CAME = "no memory came: the supervisor's log says why it has none, or the gateway may open no more files"
"""Why memory that was asked for is not there."""


class ChargeMemory:
    """Asks each supervisor that comes for memory, and again where its descriptor did not arrive."""

    def __init__(self, tell: Callable[[Control], None], charges: OpenCharges, *, wanted: bool) -> None:
        """``tell`` sends to the supervisor; ``wanted``: whether an audit log is kept."""
        self._tell = tell
        self._charges = charges
        self._wanted = wanted
        self.problem = ""
        """Why charges are not kept over the end of this process; empty while they are, and where they need not be."""

    def attached(self, _welcome: Welcome) -> None:
        """Ask a supervisor that has come."""
        if self._wanted:
            self._tell(KeepCharges())

    def take(self, fds: tuple[int, ...]) -> None:
        """Take over the memory, and move what runs into it.

        Raises:
            ValueError: it is none that a supervisor of this release makes.
        """
        try:
            if len(fds) != 2:
                for stray in fds:
                    os.close(stray)
                raise OSError(NOTHING_CAME)
            self._charges.use(*fds)
        except OSError as error:
            if str(error) != self.problem:
                log.warning("charges of running requests are not kept over the end of this process", problem=str(error))
            self.problem = str(error)
            asyncio.get_running_loop().call_later(AGAIN_S, self._tell, KeepCharges())
        else:
            self.problem = ""
