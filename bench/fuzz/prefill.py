"""Readers of what hosts of a fleet send each other about prompts: the prompt, and the answer to it."""

from __future__ import annotations

import asyncio
import ssl
import time
from array import array
from typing import Any

import h2.config
import h2.connection

from appliance.common.split_config import PrefillHost
from appliance.gateway.fleet.generated import fleet_pb2 as pb
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.fleet.prefill_call import Dialer, call
from appliance.gateway.fleet.prefill_service import _asked
from appliance.gateway.grpc.wire import framed

HOST = PrefillHost(host="p", address="127.0.0.1:1", identity="spiffe://fleet.example/p")

PROMPT = pb.ComputeRequest(
    request_id="req_1",
    tenant="alpha",
    model="m",
    model_digest="00" * 32,
    policy_digest="11" * 32,
    token_ids=array("I", [1, 200, 30_000]),
    priority=pb.PRIORITY_LOW,
    alias="fast",
)


def prompt(data: bytes) -> None:
    """Read the bytes as the message of a decode host."""
    _asked(pb.ComputeRequest.FromString(data), 1.0)


class _Writer:
    """The sending side of a connection to a host with the right certificate; nothing is sent."""

    transport: Any

    def __init__(self) -> None:
        self.transport = self

    def get_extra_info(self, _name: str) -> Any:
        return {"subjectAltName": (("URI", HOST.identity),)}

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def abort(self) -> None:
        pass


class _Said(Dialer):
    """A way to a host that says these bytes and closes."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        super().__init__(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), HostAddresses())
        object.__setattr__(self, "_data", data)

    async def open(self, host: PrefillHost) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        del host
        reader = asyncio.StreamReader()
        reader.feed_data(self._data)
        reader.feed_eof()
        return reader, _Writer()  # type: ignore[return-value]  # all that a call needs of it


def answer(data: bytes) -> None:
    """Read the bytes as what a prefill host sends in a call."""
    asyncio.run(call(HOST, _Said(data), PROMPT, "", time.monotonic() + 5, lambda: None))


def _answers() -> bytes:
    """What a prefill host sends: that it works, and that the prompt is computed."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":scheme", "https"), (":path", "/"), (":authority", "p")])
    server.receive_data(client.data_to_send())
    server.send_headers(1, [(":status", "200"), ("content-type", "application/grpc+proto")])
    for one in (pb.ComputeResponse(waiting=pb.Waiting()), pb.ComputeResponse(computed=pb.Computed(blocks=3))):
        server.send_data(1, framed(one.SerializeToString()))
    server.send_headers(1, [("grpc-status", "0")], end_stream=True)
    return server.data_to_send()


PROMPTS = (PROMPT.SerializeToString(), pb.ComputeRequest(token_ids=[1]).SerializeToString())
ANSWERS = (_answers(),)
