"""Metering: reservations are confirmed once they are on disk, questions are answered with everything that was reported,
and a book that takes nothing loses nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, entry, to_wire
from appliance.common.audit.log import open_log
from appliance.common.control import (
    MAX_DATAGRAM_BYTES,
    MAX_RESERVATIONS,
    Audited,
    Control,
    ControlError,
    ReserveSpend,
    SpendQuery,
    SpendReserved,
    Spent,
    encode,
)
from appliance.common.usage.book import FOLDER, NAME, Released, SpentNow, UsageBook
from appliance.common.usage.periods import MOST, period_of
from appliance.common.usage.pseudonyms import name_digest
from appliance.gateway.request.spend import Spends
from appliance.supervisor import metering as module
from appliance.supervisor.audit import Recorder
from appliance.supervisor.metering import MAX_ASKED, open_metering
from tests.appliance.common.audit.entries import filled

NOON = datetime(2026, 3, 15, 12, tzinfo=UTC).timestamp()


def request(number: int, cost: int) -> Entry:
    """The entry of a request of alpha."""
    sums = {"input_tokens": 1, "output_tokens": 1, "cost": cost}
    return filled("request", request=f"req_{number}", tenant="alpha", **sums)


class House:
    """A recorder with metering over a real log and a real book."""

    def __init__(self, folder: Path, boot: str = "") -> None:
        self.folder = folder
        self.sent: list[Control] = []
        self.audit = open_log(folder)
        self.metering = open_metering(folder, self.audit.name, self.audit.size, self.publish, boot)
        self.metering._clock = lambda: NOON
        self.recorder = Recorder(self.audit, lambda _: None, clock_ms=lambda: int(NOON * 1000), metering=self.metering)
        self.metering.written = self.recorder.flush
        self.task = asyncio.create_task(self.metering.run())

    def publish(self, message: Control, _fds: tuple[int, ...]) -> bool:
        """Take what the gateway is told."""
        self.sent.append(message)
        return True

    async def until(self, count: int) -> list[Control]:
        """What was sent, once it is so much."""
        async with asyncio.timeout(20):
            while len(self.sent) < count:
                await asyncio.sleep(0.005)
        return self.sent

    async def close(self) -> None:
        """Stop, as the supervisor does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.recorder.close()
        self.metering.close()

    def reserved(self) -> list[tuple[str, int]]:
        """Reservations on disk, as another process sees them."""
        with sqlite3.connect(self.folder / FOLDER / NAME) as connection:
            return connection.execute("SELECT request, cost FROM reserved ORDER BY request").fetchall()


async def test_reservations_are_on_disk_before_they_are_confirmed(tmp_path: Path, monkeypatch) -> None:
    """When a confirmation is sent another process can read the reservation; those that come together are one write."""
    house = House(tmp_path)
    writes, seen = [], []
    reserve, publish = UsageBook.reserve, house.publish

    def counted(book: UsageBook, now: float, group: list[module.Reserved]) -> None:
        writes.append(len(group))
        reserve(book, now, group)

    def looking(message: Control, fds: tuple[int, ...]) -> bool:
        seen.append([name for name, _ in house.reserved()])
        return publish(message, fds)

    monkeypatch.setattr(UsageBook, "reserve", counted)
    house.metering._publish = looking
    for number in range(100):
        house.metering.take(ReserveSpend({"alpha": {f"req_{number:03d}": number}}))
    await house.until(1)
    assert house.sent == [SpendReserved([f"req_{number:03d}" for number in range(100)])]
    assert (writes, len(seen[0])) == ([100], 100)
    await house.close()


async def test_an_answer_has_everything_that_was_reported(tmp_path: Path) -> None:
    """A question that comes right behind entries and reservations is answered with both; a new supervisor, which finds
    a reservation without its entry, counts it on."""
    house = House(tmp_path)
    for number, cost in ((1, 500), (2, 900)):
        house.metering.take(ReserveSpend({"alpha": {f"req_{number}": cost}}))
    house.recorder.take(Audited([to_wire(request(1, 300))], 0))
    house.metering.take(SpendQuery(["alpha", "beta"]))
    period = period_of(NOON)
    answer = Spent(period.day, period.month, ["alpha", "beta"], {"alpha": [300, 300, 900, 0]})
    assert (await house.until(2))[1] == answer
    await house.close()
    again = House(tmp_path)
    again.metering.take(SpendQuery(["alpha", "beta"]))
    assert await again.until(1) == [answer]
    assert again.reserved() == [("req_2", 900)]
    await again.close()


async def test_a_boot_of_the_machine_makes_reservations_releasable(tmp_path: Path) -> None:
    """A reservation that a supervisor finds after another boot is told in the log and counts until it is released; the
    gateway is then told so, and holds it no more. Control: a supervisor that starts again under the same boot finds
    none, and none where the kernel tells no boot."""
    for boot, found in (("one", 0), ("one", 0), ("", 0), ("two", 1)):
        with capture_logs() as lines:
            house = House(tmp_path, boot)
        assert sum("earlier boot" in line["event"] for line in lines) == found
        if boot == "one":
            house.metering.take(ReserveSpend({"alpha": {"req_1": 900}}))
            await house.until(1)
        if boot != "two":
            await house.close()
    spends = Spends(lambda: NOON)
    house.metering.take(SpendQuery(["alpha"]))
    told = (await house.until(1))[-1]
    assert isinstance(told, Spent)
    spends.take(told)
    assert (spends.of("alpha").day, spends.held()) == (900, ["alpha"])
    assert house.metering.release("alpha") == Released(1, 900)
    house.metering.take(SpendQuery(["alpha"]))
    told = (await house.until(2))[-1]
    assert isinstance(told, Spent)
    spends.lower(told)
    assert (spends.of("alpha").day, spends.of("alpha").month, spends.held()) == (0, 0, [])
    await house.close()


async def test_what_is_reserved_never_counts_as_of_an_earlier_boot_than_its_own(tmp_path: Path) -> None:
    """A book that does not take the boot's id at the start takes it before it takes a reservation, and takes none where
    it cannot: else the next start under the same boot would let the operator release what may still run. Control: what
    was reserved before that boot is releasable."""
    house = House(tmp_path, "one")
    house.metering.take(ReserveSpend({"alpha": {"req_1": 900}}))
    await house.until(1)
    await house.close()
    house = House(tmp_path)
    connection = house.metering._book._connection
    connection.execute("PRAGMA query_only = ON")
    house.metering.begin_boot("two")
    connection.execute("PRAGMA query_only = OFF")
    connection.execute("CREATE TRIGGER full BEFORE INSERT ON boot BEGIN SELECT RAISE(ABORT, 'no room'); END")
    house.metering.take(ReserveSpend({"alpha": {"req_2": 50}}))
    house.metering.take(SpendQuery(["alpha"]))
    (answer,) = await house.until(1)
    assert isinstance(answer, Spent), "nothing is confirmed while the id of the boot is not taken"
    assert house.reserved() == [("req_1", 900)]
    connection.execute("DROP TRIGGER full")
    house.metering.take(ReserveSpend({"alpha": {"req_2": 50}}))
    await house.until(2)
    await house.close()
    house = House(tmp_path, "two")
    assert house.metering.release("alpha") == Released(1, 900)
    assert house.reserved() == [("req_2", 50)]
    await house.close()


async def test_a_book_that_takes_nothing_loses_nothing(tmp_path: Path) -> None:
    """While the book cannot be written entries go to the log, no reservation is confirmed, and nothing fails; later
    everything is counted once."""
    house = House(tmp_path)
    book = house.metering._book
    book._connection.execute("PRAGMA query_only = ON")
    house.recorder.take(Audited([to_wire(request(1, 300))], 0))
    await house.recorder.flush()
    house.metering.take(ReserveSpend({"alpha": {"req_2": 5}}))
    house.metering.take(SpendQuery(["alpha"]))
    (answer,) = await house.until(1)
    assert isinstance(answer, Spent)
    assert answer.spent == {}
    book._connection.execute("PRAGMA query_only = OFF")
    house.recorder.take(Audited([to_wire(request(3, 30))], 0))
    await house.recorder.flush()
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(330, 330, 0)}
    await house.close()


@pytest.mark.parametrize(
    "message",
    [
        ReserveSpend({"alpha": {"r": -1}}),
        ReserveSpend({"alpha": {"r": MOST}}),
        ReserveSpend({"alpha": {"r" * 65: 1}}),
        ReserveSpend({"alpha": {f"r{number}": 1 for number in range(MAX_RESERVATIONS + 1)}}),
        SpendQuery(["t"] * (MAX_ASKED + 1)),
    ],
)
async def test_a_hostile_gateway_is_dropped(tmp_path: Path, message) -> None:
    """A reservation or a question that no gateway sends breaks the protocol."""
    house = House(tmp_path)
    with pytest.raises(ControlError):
        house.metering.take(message)
    await house.close()


async def test_a_burst_and_a_stall_cost_no_attachment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more reservations and questions than can wait: the rest is left out, what is confirmed fits datagrams, a
    repeated question is asked once, what waited longer than a request does is not written, and a gateway that leaves
    takes along what it waited for."""
    house = House(tmp_path)
    house.task.cancel()
    await asyncio.gather(house.task, return_exceptions=True)
    for number in range(module.MAX_WAITING + 500):
        house.metering.take(ReserveSpend({"alpha": {f"req_{number:024d}": 1}}))
    for number in range(3 * module.MAX_QUESTIONS):
        house.metering.take(SpendQuery([f"t{number % (2 * module.MAX_QUESTIONS)}"]))
    task = asyncio.create_task(house.metering.run())
    sent = await house.until(9 + module.MAX_QUESTIONS)
    confirmed = [one for one in sent if isinstance(one, SpendReserved)]
    assert sum(len(one.requests) for one in confirmed) == module.MAX_WAITING
    assert all(len(encode(one)) < MAX_DATAGRAM_BYTES for one in confirmed)
    assert sum(isinstance(one, Spent) for one in sent) == module.MAX_QUESTIONS
    monkeypatch.setattr(module, "SPEND_CONFIRM_S", -1.0)
    house.metering.take(ReserveSpend({"alpha": {"req_late": 1}}))
    house.metering.take(SpendQuery(["done"]))
    await house.until(10 + module.MAX_QUESTIONS)
    assert "req_late" not in dict(house.reserved())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    house.metering.take(ReserveSpend({"alpha": {"req_gone": 1}}))
    house.metering.gateway_left()
    assert (house.metering._waiting, house.metering._asked) == ([], [])
    await house.close()


async def test_a_book_that_cannot_be_read_has_nothing_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every access to the book fails: entries are in the log once, a question gets no answer, and nothing ends; when it
    works again each request is counted once."""
    house = House(tmp_path)
    book = house.metering._book
    broken = sqlite3.connect(":memory:")
    broken.close()
    monkeypatch.setattr(book, "_connection", broken)
    house.recorder.take(Audited([to_wire(request(1, 300))], 0))
    await house.recorder.flush()
    house.metering.take(SpendQuery(["alpha"]))
    house.metering.take(ReserveSpend({"alpha": {"req_9": 1}}))
    await asyncio.sleep(0.05)
    assert (house.sent, house.task.done()) == ([], False)
    monkeypatch.undo()
    house.recorder.take(Audited([to_wire(request(2, 30))], 0))
    await house.recorder.flush()
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(330, 330, 0)}
    await house.close()
    segments = files.segment_paths(tmp_path)
    text = b"".join(line for path in segments for line in files.read_segment(path).lines)
    assert (text.count(b"req_1"), text.count(b"req_2")) == (1, 1)


async def test_a_book_that_is_ahead_of_its_log_goes_back(tmp_path: Path) -> None:
    """A log that was restored from an older copy: what comes after it is counted."""
    house = House(tmp_path)
    house.metering._book.apply(house.audit.name, 1_000, [])
    await house.close()
    again = House(tmp_path)
    again.recorder.take(Audited([to_wire(request(1, 300))], 0))
    await again.recorder.flush()
    assert again.metering._book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(300, 300, 0)}
    await again.close()


async def test_end_users_are_pseudonyms_in_log_and_book(tmp_path: Path) -> None:
    """What the gateway tells of an end user is written nowhere: log and book have one pseudonym, under a key of the
    tenant; after a shred the book has no row, and the next request has another pseudonym."""
    house = House(tmp_path)
    digest = name_digest("ann@example.org")
    one = Entry("request", request(1, 5).fields | {"end_user": digest})
    house.recorder.take(Audited([to_wire(one)], 0))
    await house.recorder.flush()
    connection = sqlite3.connect(tmp_path / FOLDER / NAME)
    query = "SELECT tenant, user, cost FROM used_by_user"
    ((tenant, user, cost),) = connection.execute(query).fetchall()
    assert (tenant, cost) == ("alpha", 5)
    written = b"".join(path.read_bytes() for path in files.segment_paths(tmp_path))
    assert user.encode() in written
    assert digest.encode() not in written
    order = entry("order", what="shred", tenant="alpha", user=0, outcome="OK", count=1)
    house.recorder.record(order)
    await house.recorder.flush()
    assert connection.execute(query).fetchall() == []
    house.recorder.take(Audited([to_wire(one)], 0))
    await house.recorder.flush()
    assert connection.execute(query).fetchall()[0][1] not in (user, digest)
    connection.close()
    await house.close()
