"""The host's end of an engine's spill channel, for loads: keeps blocks in memory, and compares what comes twice."""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import suppress

from isolation.ipc.channel import Channel
from isolation.ipc.errors import RingFull
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, mark_of

MOST_BYTES = 256 << 20
"""Bytes of blocks that are kept at a time; the oldest go."""

READ_BATCH = 256
"""Most messages that are taken at a time."""


class SpillHost:
    """Blocks that an engine sent away, by namespace and id. Not sealed: it is for loads, and serves no tenant.

    Args:
        channel: the host's end.
        seed: of everything that is drawn.
        forgets: how likely it is that a turn ends with a namespace that the engine is to forget.
    """

    def __init__(self, channel: Channel, seed: int = 0, forgets: float = 0.005) -> None:
        self.kept = self.given = self.absent = self.forgotten = 0
        """Blocks that came, went back and were asked for in vain, and namespaces that were to be forgotten."""
        self.changed = 0
        """Blocks that came a second time with other bytes, although their tokens are the same."""
        self._channel = channel
        self._random = random.Random(seed)  # noqa: S311 - a load, not a secret
        self._forgets = forgets
        self._blocks: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._bytes = 0

    def serve(self) -> None:
        """Answer what has come; now and then a namespace is to be forgotten.

        Raises:
            PeerGoneError: the engine has ended.
            ProtocolError: it broke the protocol.
        """
        for message in self._channel.receive(READ_BATCH):
            if isinstance(message, Keep):
                self._keep(message)
            elif isinstance(message, Fetch):
                self._answer(message)
        if self._blocks and self._random.random() < self._forgets:
            self._forget(self._random.choice(list(self._blocks))[0])

    def figures(self) -> dict[str, int]:
        """Counts by name."""
        names = ("kept", "given", "absent", "forgotten", "changed")
        return {name: getattr(self, name) for name in names}

    def _keep(self, message: Keep) -> None:
        place = message.namespace, message.block
        self.kept += 1
        before = self._blocks.pop(place, None)
        if before is not None:
            self.changed += before != message.content
            self._bytes -= len(before)
        self._blocks[place] = message.content
        self._bytes += len(message.content)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._blocks.popitem(last=False)[1])

    def _answer(self, fetch: Fetch) -> None:
        for index, block in enumerate(fetch.blocks):
            content = self._blocks.get((fetch.namespace, block), b"")
            try:
                self._channel.send(Fetched(fetch.request, index, content))
            except RingFull:
                return  # The engine computes the rest.
            if not content:
                self.absent += 1
                return
            self.given += 1

    def _forget(self, namespace: bytes) -> None:
        with suppress(RingFull):
            self._channel.send(Forget(mark_of(namespace)))
            for place in [place for place in self._blocks if place[0] == namespace]:
                self._bytes -= len(self._blocks.pop(place))
            self.forgotten += 1
