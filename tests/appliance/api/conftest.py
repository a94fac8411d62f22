"""Front ends over real sockets, and certificates for mTLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.appliance.api.pki import Pki
from tests.appliance.api.support import Running, serving


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    """Front ends with default settings, plain text."""
    async with serving() as pair:
        yield pair


GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@pytest_asyncio.fixture
async def channel(running: Running) -> AsyncIterator[grpc.aio.Channel]:
    """A gRPC client's channel, which itself bounds no message."""
    async with grpc.aio.insecure_channel(running.target, options=GRPC_OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """A certificate authority of its own, with a server certificate for 127.0.0.1."""
    folder: Path = tmp_path_factory.mktemp("pki")
    return Pki.create(folder)
