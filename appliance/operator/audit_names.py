"""Unlinking of the audit log's pseudonyms where no supervisor runs. Blocks."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from appliance.common.audit.names import NameBook
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.usage.book import FOLDER, NAME, UsageAccessError, open_book


def unlink(directory: Path, tenant: str) -> bool:
    """Destroy what leads from the pseudonyms of the audit log in ``directory`` to a tenant; False where there is none.

    Raises:
        ConfigError: the folder or the usage book in it takes no change; asking again goes on.
        UsageError: the usage book cannot be opened.
    """
    names = NameBook(directory)
    with os_errors_as(f"cannot destroy the key of pseudonyms in {directory}"):
        pseudonym = names.pseudonym(tenant)
        if not pseudonym:
            return False
        if (directory / FOLDER / NAME).exists():
            _rename(directory, tenant, pseudonym)
        names.forget(tenant)
    return True


def _rename(directory: Path, tenant: str, pseudonym: str) -> None:
    book, _damaged = open_book(directory)
    with closing(book):
        try:
            book.rename(time.time(), tenant, pseudonym)
        except UsageAccessError as error:
            raise ConfigError(str(error)) from error
