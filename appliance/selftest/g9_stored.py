"""G9, of what is kept on request: files, batches, responses and their streams lie sealed, and a shred ends all of them.

A tenant keeps everything with a canary in each text that it may give. The store's folder, the keys' and the audit log's
are searched for it in every form; the control searches the same folder with the owner's own answers in it. Then the
tenant's key is destroyed as the operator's order does it: every way is answered as for an id that nothing has, and a
copy of the store from before opens no more, also with the wrapped key put back. Another tenant's things stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from appliance.common.figures import counted
from appliance.selftest.canary import Hits, Wanted, draw, scan_folder
from appliance.selftest.g1_stored import OTHER, OWNER, Way, asked, ways
from appliance.selftest.result import Result, judged
from appliance.selftest.stored_gateway import KeptThings, StoredGateway, stored_gateway, unknown
from appliance.supervisor.batches.book import NAME
from isolation.keys.errors import KeysError
from isolation.keys.kept import KeptName, KeptSealer
from isolation.keys.keyring import Keyring

OBJECTS, FULL_OBJECTS = 2, 20
"""Sets of a file, a batch, its results, a response and a stream, in the short and the full form."""

COMMAND = "athanor selftest --only G9"

PARTS = 5
"""Sealed parts of a set: the file's bytes, the batch's notes, its result, and two responses."""

NEXT_NAMESPACE = bytes([200]) * 32
"""Namespace key of the tenant after the shred; the supervisor draws one."""


def run(full: bool) -> Iterator[Result]:
    """Run the rows about what is kept; ``full`` searches for all forms of a canary."""
    yield from asyncio.run(kept_rows(FULL_OBJECTS if full else OBJECTS, full=full))


async def kept_rows(count: int, *, full: bool) -> list[Result]:
    """Keep ``count`` sets, search for them, and destroy their key."""
    wanted = draw(count + 1, thorough=full)
    with tempfile.TemporaryDirectory(prefix="ath-g9-") as name:
        async with stored_gateway(Path(name)) as one:
            kept = [await one.api.keep(OWNER, canary) for canary in wanted.canaries[:count]]
            neighbour = await one.api.keep(OTHER, wanted.canaries[count])
            return [*await _searched(one, kept, wanted), *await _shredded(one, kept, neighbour)]


async def _searched(one: StoredGateway, kept: list[KeptThings], wanted: Wanted) -> list[Result]:
    hits = Hits()
    scan_folder(one.folder, wanted, hits)
    answers = [await asked(one, OWNER, way, getattr(thing, way.kind)) for thing in kept for way in ways() if way.shows]
    plain = one.folder / "plain"
    plain.write_bytes(b"\n".join(text for _, text in answers))
    control = Hits()
    scan_folder(one.folder, wanted, control)
    plain.unlink()
    return [
        judged(
            "G9.stored",
            not hits.total,
            figure=f"{counted(hits.total, 'hit')} in {hits.scanned_bytes >> 10} KiB of store, keys and log",
            bar="0 hits",
            command=COMMAND,
        ),
        judged(
            "G9.stored.control",
            control.total >= len(answers),
            figure=f"{counted(control.total, 'hit')} with {counted(len(answers), 'answer')} to the owner beside them",
            bar=f"{len(answers)} or more",
            command=COMMAND,
        ),
    ]


async def _shredded(one: StoredGateway, kept: list[KeptThings], neighbour: KeptThings) -> list[Result]:
    copy = one.folder / "copy"
    shutil.copytree(one.folder / "kept", copy)
    before = _opened(copy, one.keyring, OWNER)
    key = one.folder / "keys" / f"{OWNER}.kek"
    wrapped = key.read_bytes()
    await asyncio.to_thread(one.store.shred, OWNER)
    service = one.gateway.service
    service.ledger.replace(service.ledger.policy, {**service.ledger.namespaces, OWNER: NEXT_NAMESPACE})
    tried, told = 0, 0
    for thing in kept:
        for way in ways():
            tried += 1
            told += not await _gone(one, way, thing)
    key.write_bytes(wrapped)
    key.chmod(0o600)
    after = _opened(copy, one.keyring, OWNER)
    stays = [await asked(one, OTHER, way, getattr(neighbour, way.kind)) for way in ways() if way.shows]
    served = sum(status == 200 for status, _ in stays)
    return [
        judged(
            "G9.kept",
            told == after == 0,
            figure=f"{told} of {counted(tried, 'way')} are no unknown id's 404 after the shred; "
            f"{after} of {before} sealed parts of an earlier copy open",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G9.kept.control",
            before == PARTS * len(kept) and served == len(stays),
            figure=f"{before} parts open before it; {served} of {len(stays)} of another tenant served after it",
            bar=f"{PARTS * len(kept)} and all",
            command=COMMAND,
        ),
    ]


async def _gone(one: StoredGateway, way: Way, thing: KeptThings) -> bool:
    """Whether its owner is told of an id what it is told of one that nothing has."""
    named = getattr(thing, way.kind)
    none = unknown(named)
    (status, text), (other, nothing) = await asked(one, OWNER, way, named), await asked(one, OWNER, way, none)
    return status == other == 404 and text.replace(named.encode(), b"") == nothing.replace(none.encode(), b"")


SEALED = (
    ("file", "SELECT file, number, data FROM parts JOIN files ON files.id = parts.file WHERE tenant = ?"),
    ("result", "SELECT batch, line, data FROM results JOIN batches ON batches.id = results.batch WHERE tenant = ?"),
    ("notes", "SELECT id, 0, notes FROM batches WHERE tenant = ?"),
    ("response", "SELECT id, 0, data FROM responses WHERE tenant = ?"),
)
"""Kind under which a part is sealed, and where a store's book has those of a tenant."""


def _opened(folder: Path, keyring: Keyring, tenant: str) -> int:
    """How many sealed parts of a tenant in a copy of a store open with a keyring."""
    sealer, found = KeptSealer(keyring), 0
    with contextlib.closing(sqlite3.connect(folder / NAME)) as connection:
        for kind, query in SEALED:
            for owner, part, sealed in connection.execute(query, (tenant,)).fetchall():
                with contextlib.suppress(KeysError):
                    sealer.open(KeptName(tenant, kind, owner, part), sealed)
                    found += 1
    return found
