"""Downloads a model's files into a folder: several ranges at once, each tried again where it broke off."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from appliance.common.errors import ModelCacheError, ModelDigestError, SourceUnavailableError, reason_of
from appliance.common.model_cache.manifest import ManifestFile, ModelManifest
from appliance.common.model_digests import DigestCache
from appliance.fetch.pace import Pace
from appliance.fetch.partial_file import PartialFile
from appliance.fetch.source import Source

JOBS = 8
"""Ranges that are asked for at once; each holds a chunk of 1 MiB or two, and what the connection has read ahead."""

MAX_TRIES = 8
"""Times that one piece is asked for; with the pauses that is about a minute."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds before the second try of a piece, and most seconds between two; doubled in between, and drawn from the upper
half, so that the ranges of a source that failed for all do not come back at once."""

T = TypeVar("T")

Report = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


@dataclass(slots=True)
class _Open:
    """A file that pieces are missing of, or whose digest is."""

    part: PartialFile
    left: int
    """Pieces that are not there yet."""


class Download:
    """One run over the files of a model; ``run`` gives the manifest with all digests."""

    def __init__(self, source: Source, manifest: ModelManifest, folder: Path, pace: Pace, report: Report) -> None:
        self._source, self._manifest, self._folder = source, manifest, folder
        self._pace, self._report = pace, report
        self._waiting = deque(manifest.files)
        self._pieces: Iterator[tuple[_Open, int]] = iter(())
        self._opening = asyncio.Lock()
        self._opened: list[PartialFile] = []
        self._digests: dict[str, str] = {}
        self._done = 0
        self.num_fetched = 0
        """Bytes that came from the source."""

    async def run(self) -> ModelManifest:
        """Download what is missing.

        Raises:
            ModelSourceError: the source has other files, refuses, or does not answer; what has come is kept.
            ModelDigestError: a file is not what the manifest says; it was removed.
            ModelCacheError: the disk does not take it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(JOBS):
                    group.create_task(self._work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            await _in_thread(self._close)
        files = (replace(file, sha256=self._digests[file.name], tag="") for file in self._manifest.files)
        return ModelManifest(tuple(files))

    def _close(self) -> None:
        """Keep what has come of files that are not whole."""
        for part in self._opened:
            with suppress(OSError):
                part.record(now=True)
            part.close()

    async def _work(self) -> None:
        """Take pieces until there is none; what the disk refuses ends the download."""
        try:
            while (found := await self._next()) is not None:
                opened, piece = found
                await self._fetch(opened.part, piece)
                opened.part.finish(piece)
                opened.left -= 1
                if not opened.left:
                    await self._complete(opened.part)
        except OSError as error:
            raise ModelCacheError(
                f"cannot write to {self._folder}: {reason_of(error)}; what has come is kept, pull again to go on"
            ) from error

    async def _next(self) -> tuple[_Open, int] | None:
        """The next missing piece, of the next file where this one has none."""
        while True:
            async with self._opening:
                found = next(self._pieces, None)
                if found is not None or not self._waiting:
                    return found
                # To allocate a large file takes long on some file systems.
                part = await _in_thread(self._open)
                missing = part.missing()
                opened = _Open(part, len(missing))
                self._pieces = iter([(opened, piece) for piece in missing])
                self._count(part.file.size - sum(end - start for start, end in map(part.rest, missing)))
            if not missing:
                await self._complete(part)

    def _open(self) -> PartialFile:
        part = PartialFile(self._folder, self._waiting.popleft())
        self._opened.append(part)
        return part

    async def _fetch(self, part: PartialFile, piece: int) -> None:
        """Get one piece, from where it broke off."""

        async def go_on() -> None:
            at, end = part.rest(piece)
            if at == end:  # all of it had come, and the record was written before the piece was counted as whole
                return
            async with aclosing(self._source.stream(part.file, at, end)) as chunks:
                async for chunk in chunks:
                    part.write(piece, chunk, at)
                    at += len(chunk)
                    self.num_fetched += len(chunk)
                    self._count(len(chunk))
                    await _in_thread(part.record)
                    await self._pace.spend(len(chunk))

        await persist(go_on)

    async def _complete(self, part: PartialFile) -> None:
        """Flush a file whose pieces are all there, and compare its digest."""
        await _in_thread(lambda: part.record(now=True))
        found = await _in_thread(lambda: DigestCache().hash(part.path).digest.hex())
        if part.file.sha256 not in ("", found):
            part.discard()
            raise ModelDigestError(
                f"{part.file.name} came with the digest {found}, and the manifest says {part.file.sha256}; what came "
                f"was removed. Pull again; if it stays so, the file at the source is not the one in its manifest"
            )
        self._digests[part.file.name] = found
        self._opened.remove(part)
        part.close()

    def _count(self, count: int) -> None:
        self._done += count
        self._report("downloading", self._done, self._manifest.size)


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """Call until it succeeds, with pauses, ``MAX_TRIES`` times at most.

    Raises:
        SourceUnavailableError: it failed so often.
    """
    for number in range(1, MAX_TRIES):
        try:
            return await call()
        except SourceUnavailableError:
            await asyncio.sleep(pause(number))
    try:
        return await call()
    except SourceUnavailableError as error:
        raise SourceUnavailableError(
            f"{error.message}; tried {MAX_TRIES} times. What has come is kept: pull again to go on"
        ) from error


def pause(number: int, draw: Callable[[], float] = random.random) -> float:
    """Seconds after the failed try ``number``."""
    longest: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1))
    return longest * (0.5 + draw() / 2)


def needs_digest(manifest: ModelManifest) -> tuple[ManifestFile, ...]:
    """Weight files whose digests the source does not say."""
    return tuple(file for file in manifest.files if not file.sha256 and file.name.endswith(".safetensors"))


async def _in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread, and see it end even where this task is cancelled: it uses an open file."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
