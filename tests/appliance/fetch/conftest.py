"""Fixtures of the downloader's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.appliance.fetch.s3_server import S3Server, serve_s3


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server."""
    with serve_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def sources(s3: S3Server, tmp_path: Path) -> Path:
    """A file of sources for it."""
    return s3.sources(tmp_path / "sources.yaml")
