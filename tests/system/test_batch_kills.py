"""Batches over the deaths of both host processes: each line is answered once and charged once."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from appliance.common.batches.values import line_request
from tests.system.batch_appliance import MINI, Kept, requests_file, wait
from tests.system.conftest import saved_as_demos

pytestmark = [pytest.mark.runsc]

NULL = {**MINI, "runner": "null", "step_us": 2_000, "max_num_seqs": 64}
"""A model of which everything is real but the numbers: it computes nothing, and takes 2 ms for a step."""

KILLED = ("gateway", "supervisor")
INPUT_PRICE, OUTPUT_PRICE = 500, 1_000
"""Billionths of a token of a batch, by the policy."""


@pytest.fixture
def kept(runsc_path: Path) -> Iterator[Kept]:
    """An appliance with the null engine; its folder's name is short, because sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Kept(Path(folder), runsc_path, [NULL], sandbox=saved_as_demos())
        made.prepare()
        made.start()
        yield made
        made.stop()


def done(kept: Kept) -> int:
    """Lines that have a result, by the book itself: nobody has to be there to be asked."""
    with closing(sqlite3.connect(f"file:{kept.state / 'batches' / 'batches.db'}?mode=ro", uri=True)) as book:
        return int(book.execute("SELECT COALESCE(SUM(completed + failed), 0) FROM batches").fetchone()[0])


def charged(kept: Kept, lines: int) -> tuple[Counter[str], int, int]:
    """Requests by id in the audit log, and requests and cost in the usage book, once it has counted them."""

    def used() -> tuple[int, int]:
        with closing(sqlite3.connect(f"file:{kept.state / 'audit' / 'usage' / 'usage.db'}?mode=ro", uri=True)) as book:
            row = book.execute("SELECT COALESCE(SUM(requests), 0), COALESCE(SUM(cost), 0) FROM used").fetchone()
            return int(row[0]), int(row[1])

    wait(lambda: used()[0] >= lines, 30)
    time.sleep(2.5)  # What would be written twice is, by now: a group of entries waits a second at most.
    ids = Counter(str(one["request"]) for one in kept.entries() if one["kind"] == "request" and one["batch"])
    return ids, *used()


def run_over_kills(kept: Kept, lines: int, kills: int, most_s: float, prompts: int = 1) -> None:
    """Run a batch of so many lines, each of so many prompts, and kill a host process so many times while it runs."""
    draw, client = random.Random(f"{lines} {kills}"), kept.openai()
    several = {"prompt": [f"prompt {number}" for number in range(prompts)]} if prompts > 1 else {}
    text = requests_file(lines, "/v1/completions", ignore_eos=True, **several)
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    until = time.monotonic() + most_s
    for number in range(kills):
        goal = lines * (number + 1) // (kills + 2) + draw.randrange(max(1, lines // (2 * kills + 4)))
        wait(lambda goal=goal: done(kept) >= goal, until - time.monotonic(), kept.tail)  # type: ignore[misc]
        pid = wait(lambda role=KILLED[number % 2]: kept.pid(role), 60)  # type: ignore[misc]
        assert done(kept) < lines, "a kill after the end shows nothing"
        os.kill(pid, signal.SIGKILL)

    def ended() -> Any:
        with suppress(Exception):  # whoever is asked may just have been killed
            one = client.batches.retrieve(batch.id)
            return one if one.status == "completed" else None

    found = wait(ended, until - time.monotonic(), kept.tail)
    assert (found.request_counts.completed, found.request_counts.failed) == (lines, 0)
    results = [json.loads(line) for line in client.files.content(found.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in results] == [f"line-{number}" for number in range(lines)]
    assert {len(one["response"]["body"]["choices"]) for one in results} == {prompts}
    ids, requests, cost = charged(kept, lines * prompts)
    wanted = [line_request(batch.id, number, prompt) for number in range(1, lines + 1) for prompt in range(prompts)]
    assert ids == dict.fromkeys(wanted, 1)
    assert requests == lines * prompts
    usages = [one["response"]["body"]["usage"] for one in results]
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    inputs, outputs = (sum(one[name] for one in usages) for name in ("prompt_tokens", "completion_tokens"))
    assert cost == inputs * INPUT_PRICE + outputs * OUTPUT_PRICE, cached
    print(f"{lines} lines over {kills} kills: each answered once and charged once, {cost} billionths")


@pytest.mark.timeout(400)
def test_some_kills(kept: Kept) -> None:
    """200 lines of two prompts over a kill of each host process: 200 results, 400 entries of the audit log, 400 in the
    usage book, at the price of batches."""
    run_over_kills(kept, 200, 2, 300, prompts=2)


@pytest.mark.full
@pytest.mark.timeout(2_400)
def test_twenty_kills(kept: Kept) -> None:
    """The count of the bar: 10,000 lines over 20 kills."""
    run_over_kills(kept, 10_000, 20, 2_000)
