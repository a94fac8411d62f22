"""G9, of what was deleted: five seconds after that none of its text is in any memory of the appliance, nor on its disk.

An ordinary tenant keeps a file, a batch with its results, a response and a stream, and a file of several pieces, all
with canaries; it reads them, and deletes them. Then memory of all processes, unnamed files, the state directory and
``/dev/shm`` are searched. No tenant has ``retention: none`` meanwhile: the search must not find nothing only because
memory is cleaned for another. A batch itself cannot be deleted; its metadata, with a canary too, lies sealed.

The control is a search of gateway and supervisor before the deletion, while an upload stands still and a file is read:
each of the two must have the text.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from urllib.parse import urlsplit

from appliance.common.figures import counted
from appliance.selftest.canary import (
    Hits,
    Wanted,
    descendants,
    draw,
    name_of,
    scan_folder,
    scan_memory,
    scan_nameless_files,
)
from appliance.selftest.raw_http import request_bytes
from appliance.selftest.result import Result, judged
from appliance.selftest.spilling_appliance import SpillingAppliance
from appliance.selftest.stored_gateway import FORM, StoredApi, upload_form

COMMAND = "athanor selftest --only G9"

AFTER_S = 5.0
"""Seconds after the last deletion at which the search starts."""

SETS, FULL_SETS = 1, 12
"""Sets of a file, a batch, its results, a response and a stream."""

LINES = 8_000
"""Lines of the larger file: more than two pieces of those that the supervisor seals."""

SETTLE_S = 0.3
"""Seconds for the gateway to have read what a client has sent."""

LOOKS = 5
"""Searches for the control: a copy lives for moments, or until the same place is used again."""

HOLDERS = ("gateway", "supervisor")
"""Processes through which the text of files goes."""

TENANT = "loud"


def deleted_rows(one: SpillingAppliance, *, full: bool) -> list[Result]:
    """Keep things, delete them, and search for them. Takes the tenant with ``retention: none`` out of the policy."""
    one.leave_out("quiet")
    wanted = draw((FULL_SETS if full else SETS) + 2, thorough=full)
    found = asyncio.run(_kept_and_deleted(one, wanted))
    hits = _left(one, wanted)
    where = f" ({', '.join(f'{place}: {count}' for place, count in hits.places.most_common(3))})" if hits.total else ""
    return [
        judged(
            "G9.deleted",
            not hits.total,
            figure=f"{counted(hits.total, 'hit')} in {hits.scanned_bytes >> 20} MiB{where}",
            bar=f"0 hits {AFTER_S:g} s after the deletion",
            command=COMMAND,
        ),
        judged(
            "G9.deleted.control",
            found == set(HOLDERS),
            figure=f"found before the deletion in {' and '.join(sorted(found)) or 'no process'}",
            bar=" and ".join(HOLDERS),
            command=COMMAND,
        ),
    ]


async def _kept_and_deleted(one: SpillingAppliance, wanted: Wanted) -> set[str]:
    """Keep everything, search for it as a control, and delete it; returns the processes that had it."""
    port = urlsplit(one.target.url).port
    assert port is not None, "the appliance listens at a port"
    api = StoredApi(port, {TENANT: one.key(TENANT)}, one.target.model, {"max_output_tokens": 2})
    *each, large, half = wanted.canaries
    kept = [await api.keep(TENANT, canary) for canary in each]
    file = await api.upload(TENANT, large, LINES)
    found = await _searched(one, api, wanted, file, half)
    ways = [f"/v1/files/{one_file}" for thing in kept for one_file in (thing.output, thing.file)]
    ways += [f"/v1/responses/{name}" for thing in kept for name in (thing.response, thing.stream)]
    for path in ways:
        await api.made(TENANT, "GET", path + ("/content" if "files" in path else ""), None)
    for path in [*ways, f"/v1/files/{file}"]:
        await api.made(TENANT, "DELETE", path, None)
    await asyncio.sleep(AFTER_S)
    return found


async def _searched(one: SpillingAppliance, api: StoredApi, wanted: Wanted, file: str, half: str) -> set[str]:
    """Return the processes that have the text while an upload stands still in its middle and a file is read."""
    body = upload_form(api.model, half, LINES)
    request = request_bytes(
        "POST", "/v1/files", body, ("authorization", f"Bearer {api.keys[TENANT]}"), ("content-type", FORM)
    )
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    found: set[str] = set()
    try:
        writer.write(request[: len(request) // 2])
        await writer.drain()
        await asyncio.sleep(SETTLE_S)
        for _ in range(LOOKS):
            await api.made(TENANT, "GET", f"/v1/files/{file}/content", None)
            for pid in descendants(one.target.pid):
                if (name := name_of(pid)) in HOLDERS and name not in found:
                    hits = Hits()
                    await asyncio.to_thread(scan_memory, pid, wanted, hits, Hits())
                    found |= {name} if hits.total else set()
            if found == set(HOLDERS):
                break
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return found


def _left(one: SpillingAppliance, wanted: Wanted) -> Hits:
    """Search for the text everywhere."""
    hits, ids = Hits(), Hits()
    files: set[tuple[int, int]] = set()
    shared: set[str] = set()
    for pid in descendants(one.target.pid):
        scan_nameless_files(pid, wanted, hits, ids, files)
        scan_memory(pid, wanted, hits, ids, shared)
    for folder in (one.target.state, Path("/dev/shm")):
        scan_folder(folder, wanted, hits)
    return hits
