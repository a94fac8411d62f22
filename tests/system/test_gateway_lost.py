"""kill -9 of a gateway under load: what it had served is charged, once, and nothing else is."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.usage.open_charges import GATEWAY_LOST
from appliance.selftest.processes import rooms
from bench.host import Served, null_appliance
from tests.system.audit_files import written
from tests.system.conftest import as_demos

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(300)]

STEP_US = 2_000
CLIENTS = 12
"""Half of them stream."""

TOKENS, STREAMED = 20, 300
"""Tokens of a whole answer, and of a stream: that takes 0.6 seconds, so that a kill cuts some."""


@pytest.fixture(scope="module")
def served(runsc_path: Path) -> Iterator[Served]:
    """An appliance that computes nothing and keeps an audit log."""
    with null_appliance(STEP_US, audit=True, sandbox=as_demos()) as found:
        yield found


@dataclass(slots=True)
class Seen:
    """What clients saw of answers, by the request's id."""

    whole: dict[str, int] = field(default_factory=dict)
    """Output tokens of whole answers."""
    cut: dict[str, int] = field(default_factory=dict)
    """Pieces of text that came of streams without an end: each is a token or more."""


async def ask(served: Served, stream: bool, seen: Seen, stop: asyncio.Event) -> None:
    """Ask for one answer after the other, whatever becomes of them."""
    tokens = STREAMED if stream else TOKENS
    body = {"model": "athanor-mini", "prompt": "Say", "max_tokens": tokens, "stream": stream, "ignore_eos": True}
    headers = {"authorization": f"Bearer {served.keys[0]}"}
    async with httpx.AsyncClient(base_url=served.ready["http"], headers=headers, timeout=20) as client:
        while not stop.is_set():
            name, pieces, ended = "", 0, False
            with suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    name = answer.headers.get("x-request-id", "")
                    if answer.status_code != 200:
                        await asyncio.sleep(0.05)
                        continue
                    if not stream:
                        document = json.loads(await answer.aread())
                        seen.whole[name] = document["usage"]["completion_tokens"]
                        continue
                    async for line in answer.aiter_lines():
                        ended = ended or line == "data: [DONE]"
                        pieces += line.startswith("data: {") and bool(json.loads(line[6:])["choices"][0]["text"])
            if ended:
                seen.whole[name] = tokens
            elif name and stream:
                seen.cut[name] = pieces
            elif not name:
                await asyncio.sleep(0.05)


def gateway_of(served: Served) -> int:
    """The process of the gateway."""
    (pid,) = (pid for pid, room in rooms(served.process.pid, served.sandboxes()).items() if room == "gateway")
    return pid


async def over_kills(served: Served, kills: int) -> Seen:
    """Ask while the gateway is killed so often."""
    seen, stop, draw = Seen(), asyncio.Event(), random.Random(kills)
    asking = [asyncio.create_task(ask(served, bool(number % 2), seen, stop)) for number in range(CLIENTS)]
    for _ in range(kills):
        before = len(seen.whole)
        async with asyncio.timeout(60):
            while len(seen.whole) < before + 30:
                await asyncio.sleep(0.01)
        # Not in this thread: while clients stand still, all that runs would end.
        pid = await asyncio.to_thread(gateway_of, served)
        await asyncio.sleep(draw.random() / 2)
        os.kill(pid, signal.SIGKILL)
    before = len(seen.whole)
    async with asyncio.timeout(60):
        while len(seen.whole) < before + 30:
            await asyncio.sleep(0.01)
    stop.set()
    await asyncio.gather(*asking)
    return seen


def entries(served: Served) -> list[dict[str, Any]]:
    """Entries of requests."""
    return [one for one in written(served.state / "audit") if one["kind"] == "request"]


def used(served: Served) -> tuple[int, int]:
    """Requests and output tokens of the usage book."""
    path = served.state / "audit" / "usage" / "usage.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as book:
        row = book.execute("SELECT COALESCE(SUM(requests), 0), COALESCE(SUM(output), 0) FROM used").fetchone()
        return int(row[0]), int(row[1])


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_nothing_that_was_served_is_free(served: Served, kills: int) -> None:
    """Every whole answer has one entry with its tokens, whichever gateway gave it; every stream that was cut has one
    too, with at least the tokens that came and at most all; no request has two; and the usage book equals the log.
    Control: kills left requests whose entries the gateway could not make."""
    seen = asyncio.run(over_kills(served, kills))
    deadline = time.monotonic() + 30
    while True:
        found = entries(served)
        sums = len(found), sum(one["output_tokens"] for one in found)
        if {*seen.whole, *seen.cut} <= {one["request"] for one in found} and used(served) == sums:
            break
        assert time.monotonic() < deadline, (sums, used(served), len(seen.whole), len(seen.cut))
        time.sleep(0.2)
    assert max(Counter(one["request"] for one in found).values()) == 1
    charged = {one["request"]: one for one in found}
    assert {name: charged[name]["output_tokens"] for name in seen.whole} == seen.whole
    for name, pieces in seen.cut.items():
        assert pieces <= charged[name]["output_tokens"] <= STREAMED
    lost = [one for one in found if one["outcome"] == GATEWAY_LOST]
    assert lost and all(one["output_tokens"] == 0 or one["input_tokens"] for one in lost)
    shown = sum(one["output_tokens"] > 0 for one in lost)
    print(
        f"{kills} kills: {len(seen.whole)} whole answers and {len(seen.cut)} cut ones, all charged once; "
        f"{len(lost)} entries by the supervisor, {shown} of them of answers that were shown in part"
    )
