"""Addresses of other hosts by their names, looked up in threads of their own.

A name server that does not answer holds a look-up for many seconds, and nothing can end it. In the event loop's shared
threads a few of these would hold up everything else that needs one. Here each name has one look-up at a time, which all
callers wait for, and few run at once; a name that is known stays in use while it is looked up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

KNOWN_S = 30.0
"""Seconds for which a name's addresses are used; then they are looked up again, beside their use."""

MAX_LOOK_UPS = 4
"""Look-ups at once, each in a thread. A name that would need one more counts as not found."""

MAX_ADDRESSES = 4
"""Addresses of one name that are tried."""

LookUp = Callable[[str], list[str]]
"""Returns the addresses of a name; blocks, and raises ``OSError`` where there is none."""


def look_up(name: str) -> list[str]:
    """Return the addresses of a name by the machine's resolver; blocks.

    Raises:
        OSError: there is none, or no name server answers.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@dataclass(slots=True)
class HostAddresses:
    """What the names of a configuration stand for; names are few, so all are kept. For one event loop."""

    look_up: LookUp = look_up
    clock: Callable[[], float] = time.monotonic
    _known: dict[str, tuple[list[str], float]] = field(default_factory=dict)
    """By name its addresses, and the time until which they are used."""
    _running: dict[str, asyncio.Future[list[str]]] = field(default_factory=dict)
    """Look-ups that have not ended, by name."""

    async def find(self, name: str) -> list[str]:
        """Return the addresses of a host, ``MAX_ADDRESSES`` at most; of an address itself. The caller bounds the wait,
        which ends no look-up: the next caller may find its result.

        Raises:
            OSError: there are none, too many other names are being looked up, or the machine gives no thread.
        """
        if _is_address(name):
            return [name]
        known = self._known.get(name)
        if known is not None:
            if self.clock() >= known[1]:
                self._begin(name)
            return known[0]
        running = self._begin(name)
        if running is None:
            raise OSError(
                f"{name} cannot be looked up now: {MAX_LOOK_UPS} other names are, and none is answered, or the machine "
                "gives no thread"
            )
        return await asyncio.shield(running)

    def _begin(self, name: str) -> asyncio.Future[list[str]] | None:
        """Return the look-up of a name, which begins unless it runs; None where too many run or none can."""
        running = self._running.get(name)
        if running is not None or len(self._running) >= MAX_LOOK_UPS:
            return running
        loop = asyncio.get_running_loop()
        # A daemon: the process ends without waiting for a name server.
        thread = threading.Thread(target=self._look_up, args=(name, loop), name=f"name {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The machine gives no thread: a later caller may get one.
            return None
        found = self._running[name] = loop.create_future()
        return found

    def _look_up(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Look a name up, in its thread."""
        result: list[str] | OSError
        try:
            # In the resolver's order, each once.
            result = [*dict.fromkeys(self.look_up(name))][:MAX_ADDRESSES]
        except OSError as error:
            result = error
        except ValueError:  # A name that DNS cannot have, as one with a label of 64 characters (``UnicodeError``).
            result = OSError(f"{name} is no name of a host")
        with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
            loop.call_soon_threadsafe(self._end, name, result)

    def _end(self, name: str, result: list[str] | OSError) -> None:
        running = self._running.pop(name)
        if isinstance(result, OSError):
            # A name that was known stays so: a name server that is away ends no connections.
            running.set_exception(result)
            running.exception()  # Seen, also where nobody waits any more.
            return
        self._known[name] = result, self.clock() + KNOWN_S
        running.set_result(result)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
