"""The gateway against a text worker that is slow, dead or wrong."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from appliance.gateway.sandboxes import text_link
from appliance.gateway.sandboxes.text_link import TextFullError, TextLink, TextLostError
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.text import Encode, Encoded, ReadVocabulary, SourceKind, Vocabulary
from tests.appliance.gateway.pairs import TEXT_READY, Pair


class Watched:
    """A link with a record of how it ended."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.ends: list[tuple[str, bool]] = []
        self.link = TextLink(pair.host, TEXT_READY, 1, lambda _link, reason, fault: self.ends.append((reason, fault)))

    def ask(self, request: int, tenant: str = "", text: bytes = b"hi") -> asyncio.Task[object]:
        """Send a job."""
        return asyncio.ensure_future(self.link.ask(Encode(request, SourceKind.TEXT, text, 10), tenant))


@pytest.fixture
async def watched(text_pair: Pair) -> Watched:
    """A link to a scripted worker."""
    return Watched(text_pair)


async def take(pair: Pair, count: int, most: int = 64) -> list[object]:
    """The next jobs at the worker."""
    got: list[object] = []
    async with asyncio.timeout(20):
        while len(got) < count:
            got += pair.guest.receive(most)
            await asyncio.sleep(0.005)
    return got


async def cancelled(*tasks: asyncio.Task[object]) -> None:
    """Cancel these and see them end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_answers_reach_their_questions(watched: Watched) -> None:
    """Two jobs, answered in order, end with their own ids."""
    one, two = watched.ask(1), watched.ask(2)
    await take(watched.pair, 2)
    watched.pair.guest.send(Encoded(1, array("I", [5])))
    watched.pair.guest.send(Encoded(2, array("I", [6])))
    assert await one == Encoded(1, array("I", [5]))
    assert await two == Encoded(2, array("I", [6]))


@pytest.mark.parametrize(
    "lie",
    [Encoded(2, array("I", [1])), Encoded(77, array("I", [1])), Vocabulary(1, 0, (b"a",))],
    ids=["out of order", "forged", "another question's answer"],
)
async def test_a_wrong_answer_ends_the_worker(watched: Watched, lie: Encoded | Vocabulary) -> None:
    """Order, id and kind of an answer are fixed by the question."""
    one, two = watched.ask(1), watched.ask(2)
    await take(watched.pair, 2)
    watched.pair.guest.send(lie)
    results = await asyncio.gather(one, two, return_exceptions=True)
    assert all(isinstance(result, TextLostError) for result in results)
    assert watched.ends[0][1] is True


async def test_a_hanging_job_is_the_culprit_and_the_others_are_not(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest job is watched by a clock; those behind it are told that they may try again."""
    monkeypatch.setattr(text_link, "JOB_TIMEOUT_S", 0.1)
    one, two = watched.ask(1), watched.ask(2)
    results = await asyncio.gather(one, two, return_exceptions=True)
    assert [result.culprit for result in results if isinstance(result, TextLostError)] == [True, False]
    assert watched.ends == [("took longer than 0.1 s over one text", True)]


async def test_a_dead_worker_loses_its_jobs_at_once(watched: Watched) -> None:
    """Death is seen by the bell, not by a time-out."""
    one = watched.ask(1)
    await take(watched.pair, 1)
    watched.pair.guest.close()
    async with asyncio.timeout(20):
        with pytest.raises(TextLostError):
            await one
    with pytest.raises(TextLostError):
        await watched.ask(2)


async def test_jobs_are_bounded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound of all or of one tenant a job is refused at once; another tenant's is still taken."""
    monkeypatch.setattr(text_link, "WINDOW", 1)
    monkeypatch.setattr(text_link, "MAX_TENANT_JOBS", 1)
    monkeypatch.setattr(text_link, "MAX_JOBS", 2)
    kept = [watched.ask(1, "a"), watched.ask(2, "a")]
    await asyncio.sleep(0)
    with pytest.raises(TextFullError):
        await watched.ask(3, "a")
    kept.append(watched.ask(4, "b"))
    await asyncio.sleep(0)
    with pytest.raises(TextFullError):
        await watched.ask(5, "c")
    await cancelled(*kept)


async def test_two_tenants_do_not_fill_the_queue_for_a_third(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all places are taken, whoever has most gives its last one up for a tenant with fewer; nobody does for one
    that has as many."""
    monkeypatch.setattr(text_link, "WINDOW", 1)
    monkeypatch.setattr(text_link, "MAX_TENANT_JOBS", 3)
    monkeypatch.setattr(text_link, "MAX_JOBS", 5)
    first = watched.ask(1, "a")
    await asyncio.sleep(0)
    greedy = [watched.ask(number, "a") for number in (2, 3, 4)] + [watched.ask(number, "b") for number in (5, 6)]
    await asyncio.sleep(0)
    late = watched.ask(7, "c")
    await asyncio.sleep(0)
    with pytest.raises(TextFullError):
        await greedy[2]
    with pytest.raises(TextFullError):
        await watched.ask(8, "c")
    order = []
    for _ in range(6):
        (job,) = await take(watched.pair, 1, most=1)
        order.append(job.request)
        watched.pair.guest.send(Encoded(job.request, array("I", [1])))
    assert order == [1, 2, 5, 7, 3, 6]
    await asyncio.gather(first, late, *(one for one in greedy if one is not greedy[2]))


async def test_tenants_take_turns(watched: Watched) -> None:
    """A tenant with many jobs delays another tenant's one job by those in the sandbox and one turn, not by all."""
    many = [watched.ask(number, "many") for number in range(1, 21)]
    await asyncio.sleep(0)
    one = watched.ask(99, "one")
    order: list[int] = []
    while 99 not in order:
        (job,) = await take(watched.pair, 1, most=1)
        assert isinstance(job, Encode)
        order.append(job.request)
        watched.pair.guest.send(Encoded(job.request, array("I", [1])))
    assert len(order) <= text_link.WINDOW + 2
    await one
    await cancelled(*many)


async def test_one_large_text_is_in_the_sandbox_at_a_time(watched: Watched) -> None:
    """Behind a large text no other one waits in the sandbox, so whoever comes next waits for one alone; small ones pass
    meanwhile, and the large ones get their turns."""
    large = b"x" * (text_link.LARGE_JOB_BYTES + 1)
    tasks = [watched.ask(request, "a", large) for request in (1, 2)]
    await asyncio.sleep(0)
    tasks += [watched.ask(3, "b"), watched.ask(4, "c")]
    seen = [job.request for job in await take(watched.pair, 2)]
    assert seen == [1, 3], "the second large one does not wait behind the first"
    for answered, then in ((1, 2), (3, 4)):
        watched.pair.guest.send(Encoded(answered, array("I", [5])))
        assert [job.request for job in await take(watched.pair, 1)] == [then]
    for answered in (2, 4):
        watched.pair.guest.send(Encoded(answered, array("I", [5])))
    await asyncio.gather(*tasks)


async def test_who_leaves_takes_the_job_along(watched: Watched) -> None:
    """Jobs whose callers left never reach the sandbox, and make room for others."""
    left = [watched.ask(number) for number in range(1, 21)]
    await asyncio.sleep(0)
    await cancelled(*left)
    last = watched.ask(50)
    await take(watched.pair, text_link.WINDOW)
    for number in range(1, text_link.WINDOW + 1):
        watched.pair.guest.send(Encoded(number, array("I", [1])))
    (job,) = await take(watched.pair, 1)
    assert isinstance(job, Encode) and job.request == 50
    watched.pair.guest.send(Encoded(50, array("I", [7])))
    assert await last == Encoded(50, array("I", [7]))


async def test_an_answer_larger_than_the_question_allows_ends_the_worker(watched: Watched) -> None:
    """More ids than asked for, or more text than so many tokens can have, is a breach: it would be held in memory."""
    one = watched.ask(1)
    await take(watched.pair, 1)
    watched.pair.guest.send(Encoded(1, array("I", range(11))))
    with pytest.raises(TextLostError):
        await one
    assert watched.ends[0][1] is True


async def test_an_unsendable_job_fails_alone(watched: Watched) -> None:
    """A job outside the protocol's bounds fails its caller; the clock over the worker does not run for it."""
    with pytest.raises(LocalProtocolError):
        await watched.link.ask(Encode(1, SourceKind.TEXT, b"hi", 1 << 31))
    good = watched.ask(2)
    await take(watched.pair, 1)
    watched.pair.guest.send(Encoded(2, array("I", [6])))
    await good
    assert watched.ends == [] and watched.link._clock is None


async def test_a_table_without_end_ends_the_worker(
    text_pair: Pair, counter: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary larger than any published one is refused before it fills the gateway's memory."""
    monkeypatch.setattr(text_link, "MAX_TABLE_BYTES", 5)
    ends: list[bool] = []
    link = TextLink(text_pair.host, replace(TEXT_READY, vocab_size=20_000), 1, lambda _l, _r, fault: ends.append(fault))
    reading = asyncio.ensure_future(link.read_table(counter))
    for _ in range(2):
        (job,) = await take(text_pair, 1)
        assert isinstance(job, ReadVocabulary)
        text_pair.guest.send(Vocabulary(job.request, job.start, (b"x",) * 8_192))
    with pytest.raises(TextLostError):
        await reading
    assert ends == [True]


async def test_the_table_is_read_in_slices_and_checked(watched: Watched, counter: Callable[[], int]) -> None:
    """The announced number of entries arrives, or the worker is ended."""
    reading = asyncio.ensure_future(watched.link.read_table(counter))
    (job,) = await take(watched.pair, 1)
    assert isinstance(job, ReadVocabulary)
    watched.pair.guest.send(Vocabulary(job.request, 0, (b"a", b"b", b"", b"d")))
    await reading
    assert watched.link.table is not None
    assert watched.link.table.entries == (b"a", b"b", b"", b"d")


async def test_a_short_table_ends_the_worker(watched: Watched, counter: Callable[[], int]) -> None:
    """Fewer entries than announced is a breach."""
    reading = asyncio.ensure_future(watched.link.read_table(counter))
    (job,) = await take(watched.pair, 1)
    assert isinstance(job, ReadVocabulary)
    watched.pair.guest.send(Vocabulary(job.request, 0, (b"a",)))
    with pytest.raises(TextLostError):
        await reading
    assert watched.ends[0][1] is True
