"""What a source of models can do, and the source that is a folder of this machine.

Bytes are handed on as they come and never interpreted, but for the manifest and a hub's lists of files.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from appliance.common.errors import ModelSourceError, SourceUnavailableError, reason_of
from appliance.common.model_cache.manifest import ManifestFile, is_name

CHUNK_BYTES = 1 << 20
"""Bytes that are handed on at a time; each download holds one or two of them."""


class Source(Protocol):
    """A folder with a model's files, wherever it is."""

    async def read(self, name: str, limit: int) -> bytes | None:
        """A small file, cut off behind ``limit`` bytes; None where it is not there.

        Raises:
            ModelSourceError: it cannot be read.
        """

    async def files(self) -> tuple[ManifestFile, ...]:
        """Names, sizes and what else the source says of its files; names that no model's file has are left out.

        Raises:
            ModelSourceError: the source does not list files, or cannot be reached.
        """

    def stream(self, file: ManifestFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Bytes of a file from ``start`` up to ``end``.

        Raises:
            ModelSourceError: they cannot be read.
            SourceUnavailableError: trying again may help.
        """


class FolderSource:
    """A folder of this machine, read without following a link out of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        home = folder.resolve()
        # A folder of a hub's cache has links to its store, which lies beside it.
        store = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
        self._homes = (home, store)

    async def read(self, name: str, limit: int) -> bytes | None:
        """Read a small file."""
        try:
            fd = self._open(name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(limit)

    async def files(self) -> tuple[ManifestFile, ...]:
        """List the folder and the folders directly in it."""
        found = []
        try:
            for path in sorted((*self._folder.glob("*"), *self._folder.glob("*/*"))):
                name = str(path.relative_to(self._folder))
                if is_name(name) and path.is_file():
                    found.append(ManifestFile(name, path.stat().st_size))
        except OSError as error:
            raise ModelSourceError(f"cannot read {self._folder}: {reason_of(error)}") from error
        if not found and not self._folder.is_dir():
            raise ModelSourceError(f"{self._folder} is no folder; name that of a model")
        return tuple(found)

    async def stream(self, file: ManifestFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Read a range."""
        try:
            fd = self._open(file.name)
        except FileNotFoundError:
            raise ModelSourceError(f"{self._folder / file.name} is not there") from None
        try:
            while start < end:
                data = await asyncio.to_thread(os.pread, fd, min(CHUNK_BYTES, end - start), start)
                if not data:
                    raise ModelSourceError(f"{self._folder / file.name} is shorter than it should be")
                yield data
                start += len(data)
        except OSError as error:
            raise SourceUnavailableError(f"cannot read {self._folder / file.name}: {reason_of(error)}") from error
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        place = self._folder / name
        path = place.resolve()
        if not any(path.is_relative_to(home) for home in self._homes):
            raise ModelSourceError(f"{place} is a link out of the folder, to {path}; put the file itself there")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ModelSourceError(f"cannot read {place}: {reason_of(error)}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ModelSourceError(f"{place} is no file")
        return fd
