"""Choice of the host that computes a prompt: the router's, if it is one of the configured hosts, else the one with the
least tokens in flight. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from appliance.common.split_config import PrefillHost

MAX_CALLS = 8
"""Most calls in flight to one host: a prefill engine computes one or two long prompts at once, and what waits behind
eight is sooner computed locally. A host gives each caller twice as many connections (``operator_door.MAX_EACH``)."""

REST_S = 2.0
"""Seconds for which a host that was away or silent is not asked: each attempt costs a request up to 250 ms."""


@dataclass(slots=True)
class _Load:
    calls: int = 0
    tokens: int = 0
    rests_until: float = float("-inf")


@dataclass(slots=True)
class PrefillHosts:
    """The hosts that may be asked, and what they were asked for."""

    hosts: Sequence[PrefillHost]
    _loads: dict[str, _Load] = field(default_factory=dict)

    def named(self, address: str) -> PrefillHost | None:
        """Return the host with this HOST:PORT; None where there is none."""
        return next((one for one in self.hosts if one.address == address), None)

    def choose(self, address: str, now: float) -> PrefillHost | None:
        """Return the host to ask; None where none has room, or all of them rest.

        Args:
            address: HOST:PORT that the router named. Unless it is that of a host with room, the least loaded is taken.
            now: monotonic seconds.
        """
        ready = [one for one in self.hosts if self._ready(one, now)]
        wanted = self.named(address)
        if wanted is not None and wanted in ready:
            return wanted
        return min(ready, key=lambda one: self._load(one).tokens, default=None)

    @contextmanager
    def asking(self, host: PrefillHost, tokens: int) -> Iterator[None]:
        """Count a call with so many tokens for the time of the block."""
        load = self._load(host)
        load.calls += 1
        load.tokens += tokens
        try:
            yield
        finally:
            load.calls -= 1
            load.tokens -= tokens

    def rest(self, host: PrefillHost, now: float) -> None:
        """Ask a host no more for a while."""
        self._load(host).rests_until = now + REST_S

    def in_flight(self, host: PrefillHost) -> tuple[int, int]:
        """Return the calls to a host that have not ended, and their tokens."""
        load = self._load(host)
        return load.calls, load.tokens

    def _ready(self, host: PrefillHost, now: float) -> bool:
        load = self._load(host)
        return load.calls < MAX_CALLS and now >= load.rests_until

    def _load(self, host: PrefillHost) -> _Load:
        return self._loads.setdefault(host.host, _Load())
