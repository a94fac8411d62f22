"""Front ends over real sockets with certificates for mTLS, and guests under the test's control behind real channels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from isolation.ipc.messages import Role
from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.front.support import Running, serving
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair


@pytest.fixture
async def engine_pair() -> AsyncIterator[Pair]:
    """A channel to a scripted engine."""
    pair = make_pair(Role.ENGINE, ENGINE_READY)
    yield pair
    pair.guest.close()
    pair.host.close()


@pytest.fixture
async def text_pair() -> AsyncIterator[Pair]:
    """A channel to a scripted text worker."""
    pair = make_pair(Role.TEXT, TEXT_READY)
    yield pair
    pair.guest.close()
    pair.host.close()


@pytest.fixture
def counter() -> Callable[[], int]:
    """Wire ids."""
    state = [100]

    def next_id() -> int:
        state[0] += 1
        return state[0]

    return next_id


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
