"""The gateway against a text worker that is slow, dead or wrong."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

import pytest

from appliance.gateway import text_link
from appliance.gateway.text_link import TextFullError, TextLink, TextLostError
from isolation.ipc.messages import Encode, Encoded, ReadVocabulary, SourceKind, Vocabulary

from .conftest import TEXT_READY, Pair


class Watched:
    """A link with a record of how it ended."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.ends: list[tuple[str, bool]] = []
        self.link = TextLink(pair.host, TEXT_READY, 1, lambda _link, reason, fault: self.ends.append((reason, fault)))

    def ask(self, request: int) -> asyncio.Task[object]:
        """Send a job."""
        return asyncio.ensure_future(self.link.ask(Encode(request, SourceKind.TEXT, b"hi", 10)))


@pytest.fixture
async def watched(text_pair: Pair) -> Watched:
    """A link to a scripted worker."""
    return Watched(text_pair)


async def take(pair: Pair, count: int) -> list[object]:
    """The next jobs at the worker."""
    got: list[object] = []
    async with asyncio.timeout(5):
        while len(got) < count:
            got += pair.guest.receive()
            await asyncio.sleep(0.005)
    return got


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
    async with asyncio.timeout(2):
        with pytest.raises(TextLostError):
            await one
    with pytest.raises(TextLostError):
        await watched.ask(2)


async def test_jobs_are_bounded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a job is refused at once."""
    monkeypatch.setattr(text_link, "MAX_JOBS", 1)
    first = watched.ask(1)
    await asyncio.sleep(0)
    with pytest.raises(TextFullError):
        await watched.ask(2)
    first.cancel()


async def test_the_table_is_read_in_slices_and_checked(
    watched: Watched, counter: Callable[[], int]
) -> None:
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
