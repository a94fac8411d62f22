"""A guest under the test's control at the other end of a real channel: what a sandbox could do to the gateway."""

from __future__ import annotations

import os
from dataclasses import dataclass

from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Hello, Role, TextReady


@dataclass
class Pair:
    """Both ends of one channel, past the handshake."""

    host: Channel
    guest: Channel

    def close(self) -> None:
        """Close the guest's end, as its death would."""
        self.guest.close()


def make_pair(role: Role, ready: Message) -> Pair:
    """A channel over a real sealed segment and real bells, handshake done."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    host = Channel.host(memfd, host_in, host_out, layout, role)
    guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, role)
    guest.send(Hello(PROTOCOL_VERSION, role))
    host.receive()
    host.send(Configure(b"{}"))
    guest.receive()
    guest.send(ready)
    host.receive()
    return Pair(host, guest)


ENGINE_READY = EngineReady(vocab_size=512, max_context=256, block_size=16, num_blocks=64, deterministic=True)
TEXT_READY = TextReady(vocab_size=4, has_chat_template=True, exact_vocabulary=True, strip_leading_space=False)
