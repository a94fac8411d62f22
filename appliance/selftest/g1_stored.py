"""G1, of what is kept on request: a tenant's files, batches, responses and streams are there for that tenant alone.

One tenant keeps everything, and another asks for it in every way that the routes have: the status must be 404, and the
answer, but for the request's id, that to an id which nothing has. The control repeats each way as the owner.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.common.figures import counted
from appliance.selftest.canary import draw
from appliance.selftest.result import Result, judged
from appliance.selftest.scripted_gateway import MODEL
from appliance.selftest.stored_gateway import KeptThings, StoredGateway, stored_gateway, unknown

OBJECTS, FULL_OBJECTS = 2, 20
"""Sets of a file, a batch, its results, a response and a stream, in the short and the full form."""

COMMAND = "athanor selftest --only G1"
OWNER, OTHER = "alpha", "beta"

_REQUEST_ID = re.compile(rb"req[_-][0-9a-zA-Z]+")


@dataclass(frozen=True, slots=True)
class Way:
    """A request about an id, which stands for ``{}`` in path and body."""

    kind: str
    """Field of ``KeptThings`` with the id."""
    method: str
    path: str
    body: Any = None
    shows: bool = False
    """Whether the owner is shown text of its own."""


def ways() -> tuple[Way, ...]:
    """Every way; those that remove or end something come last."""
    ask = {"model": MODEL, "input": "?", "previous_response_id": "{}"}
    batch = {"input_file_id": "{}", "endpoint": "/v1/completions", "completion_window": "24h"}
    return (
        Way("file", "GET", "/v1/files/{}", shows=True),
        Way("file", "GET", "/v1/files/{}/content", shows=True),
        Way("file", "GET", "/v1/files?after={}"),
        Way("file", "POST", "/v1/batches", batch),
        Way("output", "GET", "/v1/files/{}"),
        Way("output", "GET", "/v1/files/{}/content", shows=True),
        Way("batch", "GET", "/v1/batches/{}", shows=True),
        Way("batch", "GET", "/v1/batches?after={}"),
        Way("response", "GET", "/v1/responses/{}", shows=True),
        Way("response", "GET", "/v1/responses/{}/input_items", shows=True),
        Way("response", "POST", "/v1/responses", ask),
        Way("response", "POST", "/v1/responses/input_tokens", ask),
        Way("stream", "GET", "/v1/responses/{}?stream=true", shows=True),
        Way("stream", "GET", "/v1/responses/{}?stream=true&starting_after=0"),
        Way("stream", "GET", "/v1/responses/{}", shows=True),
        Way("batch", "POST", "/v1/batches/{}/cancel"),
        Way("stream", "DELETE", "/v1/responses/{}"),
        Way("response", "DELETE", "/v1/responses/{}"),
        Way("output", "DELETE", "/v1/files/{}"),
        Way("file", "DELETE", "/v1/files/{}"),
    )


def run(full: bool) -> Iterator[Result]:
    """Run the rows about what is kept."""
    yield from asyncio.run(stored_rows(FULL_OBJECTS if full else OBJECTS))


async def stored_rows(count: int) -> list[Result]:
    """Ask for ``count`` sets as another tenant, then as their owner."""
    wanted = draw(count, thorough=False)
    with tempfile.TemporaryDirectory(prefix="ath-g1-") as name:
        async with stored_gateway(Path(name)) as one:
            kept = [await one.api.keep(OWNER, canary) for canary in wanted.canaries]
            tried, reached = 0, 0
            for thing in kept:
                for way in ways():
                    tried += 1
                    reached += not await _hidden(one, way, thing, wanted.stem.encode())
            listed = await _listed(one, OTHER, kept)
            control = await _listed(one, OWNER, kept)
            served = [await _served(one, way, thing, wanted.stem.encode()) for thing in kept for way in ways()]
    return [
        judged(
            "G1.stored",
            reached == listed == 0,
            figure=f"{reached} of {counted(tried, 'way')} to another's are no unknown id's 404; {listed} listed",
            bar="0",
            command=COMMAND,
        ),
        judged(
            "G1.stored.control",
            all(served) and control == 3 * count,
            figure=f"{sum(served)} of {len(served)} served to their owner, {control} of {3 * count} listed",
            bar="all",
            command=COMMAND,
        ),
    ]


async def asked(one: StoredGateway, tenant: str, way: Way, found: str) -> tuple[int, bytes]:
    """Status and body of one way to an id, without the id of the request."""
    body = None if way.body is None else {name: value.replace("{}", found) for name, value in way.body.items()}
    status, text = await one.api.ask(tenant, way.method, way.path.replace("{}", found), body)
    return status, _REQUEST_ID.sub(b"", text)


async def _hidden(one: StoredGateway, way: Way, thing: KeptThings, stem: bytes) -> bool:
    """Whether another tenant is told of an id what it is told of one that nothing has, and nothing of the owner's."""
    named = getattr(thing, way.kind)
    none = unknown(named)
    theirs, nobodys = await asked(one, OTHER, way, named), await asked(one, OTHER, way, none)
    same = theirs[1].replace(named.encode(), b"") == nobodys[1].replace(none.encode(), b"")
    return same and theirs[0] == nobodys[0] == 404 and stem not in theirs[1]


async def _served(one: StoredGateway, way: Way, thing: KeptThings, stem: bytes) -> bool:
    """Whether the owner gets an answer, with its text where there is any; a batch that is over is not cancelled."""
    status, text = await asked(one, OWNER, way, getattr(thing, way.kind))
    return status in (200, 409) and (stem in text or not way.shows)


async def _listed(one: StoredGateway, tenant: str, kept: list[KeptThings]) -> int:
    """How many of these files, results and batches a tenant's lists have."""
    files = (await one.api.ask(tenant, "GET", "/v1/files?limit=1000"))[1]
    batches = (await one.api.ask(tenant, "GET", "/v1/batches?limit=100"))[1]
    return sum(
        text.count(f'"id":"{found}"'.encode()) + text.count(f'"id": "{found}"'.encode())
        for thing in kept
        for text, found in ((files, thing.file), (files, thing.output), (batches, thing.batch))
    )
