"""A tenant's pseudonyms are unlinked behind all that the log says under them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import from_line
from appliance.common.audit.log import open_log
from appliance.common.errors import AuditNamesError
from appliance.common.residency import ResidentLimits
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.outbox import Outbox
from appliance.supervisor.batches.port import StorePort
from appliance.supervisor.residents import Residents
from appliance.supervisor.unlinking import Unlinking
from tests.appliance.supervisor.batches.test_store import Store

LIMITS = ResidentLimits(engines=0, texts=0, memory_bytes=1, engine_bytes=1)


@pytest.mark.parametrize("fails", [False, True])
async def test_entries_of_the_store_come_before(tmp_path: Path, fails: bool) -> None:
    """What waits in the store's book is in the log under the pseudonym that is unlinked then. Where the log does not
    take it nothing is unlinked, and the next order does it."""
    store = Store(tmp_path)
    store.upload(b"x")
    assert any(b'"tenant":"alpha"' in path.read_bytes() for path in (tmp_path / "kept").iterdir())
    audit = open_log(tmp_path / "audit", pseudonyms=True)
    recorder = Recorder(audit, lambda _state: None)
    refuses = [fails]

    async def write(group: object) -> int | None:
        return None if refuses[0] else await recorder.append(group)  # type: ignore[arg-type]

    port = StorePort(store.store, Outbox(store.store.book, audit.name, write), lambda _message, _fds: True)
    never: Callable[..., object] = lambda *_: None  # noqa: E731
    residents = Residents(LIMITS, never, None, never, never)  # type: ignore[arg-type]
    unlinking = Unlinking(recorder, residents, port)
    if fails:
        with pytest.raises(AuditNamesError, match="files and batches"):
            await unlinking.unlink("alpha")
        refuses[0] = False
    pseudonym = await unlinking.unlink("alpha")
    assert pseudonym
    assert store.store.book.pending(1) == []
    # Neither is the entry, with the tenant's name, left in the book's files.
    assert not any(b'"tenant":"alpha"' in path.read_bytes() for path in (tmp_path / "kept").iterdir())
    await recorder.close()
    lines = [line for path in files.segment_paths(tmp_path / "audit") for line in files.read_segment(path).lines]
    found = [from_line(line)[2] for line in lines]
    assert [one.fields["tenant"] for one in found if one.kind == "file"] == [pseudonym]
    store.close()
