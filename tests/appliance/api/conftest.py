"""Front ends over real sockets, and certificates for mTLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.appliance.api.pki import Pki
from tests.appliance.api.support import Running, serving


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    """Front ends with default settings, plain text."""
    async with serving() as pair:
        yield pair


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """A certificate authority of its own, with a server certificate for 127.0.0.1."""
    folder: Path = tmp_path_factory.mktemp("pki")
    return Pki.create(folder)
