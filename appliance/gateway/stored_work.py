"""What the HTTP front end asks for files, batches and stored responses: values, and protocols of what keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from appliance.common.batches.values import PURPOSE, StoredBatch, StoredFile
from appliance.common.errors import ApplianceError
from appliance.gateway.generate_request import Principal


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a list that is asked for."""

    limit: int
    after: str = ""
    """Id behind which it begins; empty: at the beginning."""
    ascending: bool = False
    """Whether the oldest come first."""
    purpose: str = ""
    """Purpose of the files that are asked for; empty: any."""


@dataclass(frozen=True, slots=True)
class FilePage:
    """Part of a list of files."""

    files: tuple[StoredFile, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class BatchPage:
    """Part of a list of batches."""

    batches: tuple[StoredBatch, ...]
    more: bool


class Upload(Protocol):
    """A file of which more comes."""

    async def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes.

        Raises:
            ApplianceError: typed, from the closed list; the file is gone.
        """
        ...

    async def end(self, keep_s: int, purpose: str = PURPOSE) -> StoredFile:
        """Keep the file, for so many seconds; 0: as long as files are kept. ``purpose``: one of ``PURPOSES``, as the
        upload was begun.

        Raises:
            ApplianceError: typed, from the closed list; the file is gone.
        """
        ...

    async def drop(self) -> None:
        """Forget the file; after ``end`` nothing."""
        ...


class ResponseKeeper(Protocol):
    """Responses of tenants that are kept, as bytes that the front end alone reads."""

    def withheld(self, principal: Principal, param: str) -> ApplianceError | None:
        """Return the error for a caller whose tenant may keep no responses, and asks for it by a field; None where it
        may."""
        ...

    def epoch(self, tenant: str) -> bytes:
        """Return a value that changes when the tenant's key is destroyed, or its region withdrawn."""
        ...

    async def keep(self, principal: Principal, response: str, document: bytes) -> bool:
        """Keep a response; False where it cannot be kept."""
        ...

    async def read(self, principal: Principal, response: str, param: str = "id") -> bytes:
        """Return a response; ``param`` is the field that names it.

        Raises:
            ApplianceError: typed, from the closed list: the policy does not let the tenant have any, or it has not this
                one, as for those of others.
        """
        ...

    async def delete(self, principal: Principal, response: str) -> None:
        """Delete a response; raises as ``read``."""
        ...


class StoredWork(Protocol):
    """Files and batches of tenants. All methods raise ``ApplianceError``, typed, from the closed list: where the policy
    does not let the tenant have any, for what it has not (as for what others have), and beyond a bound."""

    @property
    def responses(self) -> ResponseKeeper:
        """What keeps responses."""
        ...

    def check(self, principal: Principal) -> None:
        """Return where the caller's tenant may have files and batches."""
        ...

    async def upload(self, principal: Principal, name: str, *, lines: bool = True) -> Upload:
        """Begin a file; ``lines``: whether a batch may read it, so that its lines are bounded."""
        ...

    async def file(self, principal: Principal, file: str) -> StoredFile:
        """Return a file's facts."""
        ...

    async def files(self, principal: Principal, page: Page) -> FilePage:
        """Return the tenant's files."""
        ...

    def content(self, principal: Principal, file: str) -> AsyncIterator[bytes]:
        """Yield a file's bytes, piece by piece."""
        ...

    async def delete(self, principal: Principal, file: str) -> None:
        """Delete a file."""
        ...

    async def begin(
        self,
        principal: Principal,
        file: str,
        endpoint: str,
        window_s: int,
        metadata: Mapping[str, str],
        key: str = "",
        *,
        output_keep_s: int = 0,
    ) -> StoredBatch:
        """Make a batch of a file, or return the one that was made with the same ``key``, where that is not empty.
        ``output_keep_s``: seconds for which its results are kept; 0: as long as files are."""
        ...

    async def batch(self, principal: Principal, batch: str) -> StoredBatch:
        """Return a batch."""
        ...

    async def batches(self, principal: Principal, page: Page) -> BatchPage:
        """Return the tenant's batches."""
        ...

    async def cancel(self, principal: Principal, batch: str) -> StoredBatch:
        """Cancel a batch."""
        ...
