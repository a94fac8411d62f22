"""Both ends of a channel within one process, and the handshake."""

from __future__ import annotations

import os
from dataclasses import dataclass

from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Hello, Role, TextReady
from isolation.ipc.segment import Layout, Segment

READY = {Role.ENGINE: EngineReady(1, 1, 1, 1), Role.TEXT: TextReady(1, False, False, False)}


@dataclass
class Wire:
    """Host, guest, and a hostile guest's view of the same memory."""

    host: Channel
    guest: Channel
    layout: Layout
    raw: Segment

    def close(self) -> None:
        """Close both ends."""
        self.host.close()
        self.guest.close()
        self.raw.close()


def connect(role: Role = Role.ENGINE, *, ready: bool = True) -> Wire:
    """A new wire, after the handshake unless told otherwise."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    raw = segment.map_segment(memfd, layout)
    guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, role)
    wire = Wire(Channel.host(memfd, host_in, host_out, layout, role), guest, layout, raw)
    if ready:
        guest.send(Hello(PROTOCOL_VERSION, role))
        wire.host.receive()
        if role is Role.SPILL:
            return wire
        wire.host.send(Configure(b"{}"))
        guest.receive()
        guest.send(READY[role])
        wire.host.receive()
    return wire
