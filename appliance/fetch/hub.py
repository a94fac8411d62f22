"""Models of a hub, in the layout of the one at huggingface.co: lists of files as JSON, and files by revision.

A revision is looked up once and turned into that of a commit, so that all files are those of one. The lists have
SHA-256 digests of large files; those of small ones follow from what comes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from appliance.common.errors import ModelSourceError
from appliance.common.model_cache.manifest import ManifestFile, is_name
from appliance.common.strict_json import JsonError, parse_json
from appliance.fetch.access import SourceAccess
from appliance.fetch.address import Address, parse_address
from appliance.fetch.objects import ObjectSource, open_store

ENDPOINT = "https://huggingface.co"

MAX_LIST_BYTES = 8 << 20
"""Most bytes of a list of files, which has some 300 for each."""

PAGE_FILES = 1_000
"""Files of a page of a list. A list that has so many has a second page, which no model's folder needs."""

FOLDERS = ("", "1_Pooling")
"""Folders that a model's files lie in."""


@dataclass(slots=True)
class HubSource:
    """A model of a hub at one revision."""

    _web: ObjectSource
    _address: Address
    _commit: str = ""

    async def read(self, name: str, limit: int) -> bytes | None:
        """Read a small file."""
        return await self._web.read(await self._place(name), limit)

    async def files(self) -> tuple[ManifestFile, ...]:
        """List the model's files."""
        await self._place("")
        found: list[ManifestFile] = []
        for folder in FOLDERS:
            place = "/".join(filter(None, ("api/models", self._address.host, "tree", self._commit, folder)))
            data = await self._web.read(place, MAX_LIST_BYTES + 1)
            found += [] if data is None else list_files(data, self._address.text)
        return tuple(found)

    async def stream(self, file: ManifestFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Ask for a range."""
        placed = replace(file, name=await self._place(file.name), tag="")
        async for chunk in self._web.stream(placed, start, end):
            yield chunk

    async def _place(self, name: str) -> str:
        """Path of a file at the commit that the revision names."""
        if not self._commit:
            place = f"api/models/{self._address.host}/revision/{self._address.revision}"
            data = await self._web.read(place, MAX_LIST_BYTES + 1)
            if data is None:
                raise ModelSourceError(
                    f"{self._address.text}: the hub has no such model or revision, or shows it to nobody"
                )
            self._commit = commit_of(data, self._address.text)
        return f"{self._address.host}/resolve/{self._commit}/{name}"


def open_hub(address: Address, access: SourceAccess) -> HubSource:
    """The source at an address ``hf://``.

    Raises:
        ModelSourceError: the endpoint cannot be used.
    """
    web = parse_address(access.endpoint or ENDPOINT)
    return HubSource(open_store(replace(web, text=web.text), access), address)


def commit_of(data: bytes, where: str) -> str:
    """Commit that a hub's answer about a revision names.

    Raises:
        ModelSourceError: it names none.
    """
    values = _json(data, where)
    commit = values.get("sha") if isinstance(values, dict) else None
    if not isinstance(commit, str) or not commit.isalnum() or not commit.isascii() or len(commit) > 64:
        raise ModelSourceError(f"{where}: the hub names no commit; is the endpoint a hub?")
    return commit


def list_files(data: bytes, where: str) -> list[ManifestFile]:
    """Files of a hub's list.

    Raises:
        ModelSourceError: it is none, or goes on on a second page.
    """
    rows = _json(data, where)
    if not isinstance(rows, list):
        raise ModelSourceError(f"{where}: the hub's list of files is no list; is the endpoint a hub?")
    if len(rows) >= PAGE_FILES:
        raise ModelSourceError(f"{where}: {PAGE_FILES} files or more; no model's folder has so many")
    found = []
    for row in rows:
        match row:
            case {"type": "file", "path": str(name), "size": int(size)} if is_name(name):
                match row.get("lfs"):
                    case {"oid": str(oid), "size": int(stored)} if len(oid) == 64:
                        found.append(ManifestFile(name, stored, oid))
                    case _:
                        found.append(ManifestFile(name, size))
    return found


def _json(data: bytes, where: str) -> Any:
    try:
        if len(data) > MAX_LIST_BYTES:
            raise JsonError(f"more than {MAX_LIST_BYTES} bytes")
        return parse_json(data)
    except JsonError as error:
        raise ModelSourceError(f"{where}: the hub's answer is not JSON that is taken: {error}") from error
