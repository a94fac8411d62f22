"""A pull from its order to the model in the cache."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.common.catalog import MAX_SIGNATURE_BYTES, SIGNATURE
from appliance.common.errors import ModelDigestError, ModelSourceError
from appliance.common.model_cache.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ModelManifest,
    choose_files,
    read_manifest,
)
from appliance.common.model_cache.store import ModelCache, Notes
from appliance.fetch.access import access_for, read_access
from appliance.fetch.address import Address, parse_address
from appliance.fetch.download import Download, Report, needs_digest, persist
from appliance.fetch.hub import open_hub
from appliance.fetch.objects import open_store
from appliance.fetch.pace import Pace
from appliance.fetch.source import FolderSource, Source

LOOK_AGAIN_S = 0.25
"""Seconds after which it is looked again whether another pull of a model has ended."""


@dataclass(frozen=True, slots=True)
class PullOrder:
    """What to pull."""

    source: str
    """Address."""
    name: str = ""
    """Name in the cache; empty: the last part of the address."""
    digest: str = ""
    """Digest that the model must have, in hex; empty: the manifest's."""
    pin: bool = False
    """Whether it is pinned."""
    unverified: bool = False
    """Whether weights may come for which nothing says a digest."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a pull."""

    digest: str
    name: str
    folder: str
    size: int
    """Bytes of the model."""
    fetched: int
    """Bytes that came from the source now."""
    seconds: float
    hit: bool
    """Whether the model was in the cache."""
    evicted: tuple[str, ...]
    """Digests of models that left the cache for it."""


class Puller:
    """Pulls into one cache, with one bandwidth."""

    def __init__(self, cache: ModelCache, pace: Pace) -> None:
        self._cache, self._pace = cache, pace

    async def pull(
        self, order: PullOrder, sources: Path | None, limit: int, kept: frozenset[str], report: Report
    ) -> Pulled:
        """Pull one model; another pull of it that runs is waited for, and then nothing is downloaded.

        Args:
            order: what to pull.
            sources: file of endpoints and credentials.
            limit: most bytes of the cache; 0: the disk's.
            kept: digests of models that stay.
            report: progress.

        Raises:
            ModelSourceError: the source cannot be used, or does not answer.
            ModelDigestError: it is not the model that was asked for, or its bytes are not those of its manifest.
            ModelCacheError: there is no room, or the disk takes nothing.
        """
        began = time.monotonic()
        address = parse_address(order.source)
        self._cache.prepare()
        if order.digest and self._cache.has(order.digest):
            return self._hit(order.digest, order, address, began, 0, ())
        source = open_source(address, sources)
        report("asking the source", 0, 0)
        manifest = await _manifest(source, address, order)
        key = manifest.digest or _listing_key(address, manifest)
        evicted: tuple[str, ...] = ()
        while True:
            if manifest.digest and self._cache.has(manifest.digest):
                if (signature := await _signature(source, address)) is not None:
                    await asyncio.to_thread(self._cache.sign, manifest.digest, signature)
                return self._hit(manifest.digest, order, address, began, 0, evicted)
            with self._cache.pulling(key) as folder:
                if folder is not None:
                    if manifest.digest and self._cache.has(manifest.digest):
                        continue
                    wanted = (key, address.text, manifest.size, limit, kept)
                    evicted = await asyncio.to_thread(self._cache.make_room, *wanted)
                    download = Download(source, manifest, folder, self._pace, report)
                    whole = await download.run()
                    _check(whole, order, address)
                    notes = Notes(order.name or address.label, address.text, time.time(), time.time(), order.pin)
                    report("putting it into the cache", manifest.size, manifest.size)
                    signature = await _signature(source, address)
                    model = await asyncio.to_thread(self._cache.commit, key, whole, notes, signature)
                    spent = time.monotonic() - began
                    done = (download.num_fetched, spent, False, evicted)
                    return Pulled(model.digest, notes.name, str(model.folder), model.size, *done)
            report("waiting for another pull of this model", 0, 0)
            await asyncio.sleep(LOOK_AGAIN_S)

    def _hit(
        self, digest: str, order: PullOrder, address: Address, began: float, fetched: int, evicted: tuple[str, ...]
    ) -> Pulled:
        def use(notes: Notes) -> Notes:
            name = order.name or notes.name or address.label
            return replace(notes, name=name, used=time.time(), pinned=notes.pinned or order.pin)

        notes = self._cache.note(digest, use)
        folder = self._cache.model_folder(digest)
        size = next((one.size for one in self._cache.models() if one.digest == digest), 0)
        return Pulled(digest, notes.name, str(folder), size, fetched, time.monotonic() - began, True, evicted)


def open_source(address: Address, sources: Path | None) -> Source:
    """The source at an address, with what the file of sources has for it.

    Raises:
        ModelSourceError: it cannot be used so.
    """
    if address.scheme == "file":
        return FolderSource(Path(address.path))
    access = access_for(address, read_access(sources))
    return open_hub(address, access) if address.scheme == "hf" else open_store(address, access)


async def _manifest(source: Source, address: Address, order: PullOrder) -> ModelManifest:
    """What is to come: by the source's manifest, or by its list of files."""
    data = await persist(lambda: source.read(MANIFEST, MAX_MANIFEST_BYTES + 1))
    if data is not None:
        manifest = read_manifest(data, address.text)
        if order.digest and manifest.digest != order.digest:
            raise ModelDigestError(
                f"{address.text} has the model {manifest.digest}, not {order.digest}; nothing was downloaded"
            )
        return manifest
    manifest = choose_files(await persist(source.files), address.text)
    if needs_digest(manifest) and not order.digest and not order.unverified:
        raise ModelSourceError(
            f"{address.text} has no {MANIFEST}, so nothing says what its weights are; put one there (athanor model "
            f"manifest DIR), name the digest with --digest, or take what comes with --digest any"
        )
    return manifest


async def _signature(source: Source, address: Address) -> bytes | None:
    """The signature that lies beside the model's files; the service that serves the model verifies it."""
    data = await persist(lambda: source.read(SIGNATURE, MAX_SIGNATURE_BYTES + 1))
    if data is not None and len(data) > MAX_SIGNATURE_BYTES:
        raise ModelSourceError(
            f"{address.text}: {SIGNATURE} has more than {MAX_SIGNATURE_BYTES} bytes; remove it there"
        )
    return data


def _listing_key(address: Address, manifest: ModelManifest) -> str:
    """Key of a partial model whose digest is not known yet: where it comes from, and what is listed there."""
    rows = [f"{file.name}\n{file.size}\n{file.sha256}\n{file.tag}\n" for file in manifest.files]
    return hashlib.sha256(f"athanor listing v1\n{address.text}\n{''.join(rows)}".encode()).hexdigest()


def _check(whole: ModelManifest, order: PullOrder, address: Address) -> None:
    if order.digest and whole.digest != order.digest:
        raise ModelDigestError(
            f"{address.text} came with the digest {whole.digest}, not {order.digest}; it is not in the cache. Name the "
            f"other digest if that is the model that you mean"
        )
