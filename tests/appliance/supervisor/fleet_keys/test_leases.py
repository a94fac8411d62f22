"""Leases of tenants' keys, under a store that does what it likes (``fleet_model``), and each rule by itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from appliance.supervisor.fleet_keys.leases import (
    DRIFT_S,
    FLEET,
    FRESH_S,
    GENERATION_BITS,
    LEASE_S,
    MAX_LIVES,
    MAX_ORDERS,
    MAX_TENANTS,
    RENEW_S,
    KeyAnswer,
    KeyClient,
    KeyQuestion,
    KeyServer,
)
from tests.appliance.supervisor.fleet_keys.fleet_model import Violation, search

SEQUENCES, STEPS = 400, 60


class CountsFromReceipt(KeyClient):
    """A member whose lease begins when the answer comes."""

    def take(self, answer: KeyAnswer, now: float) -> bool:
        """Take the answer as if it was asked for now."""
        self._asked_at = now
        return super().take(answer, now)


class TakesRepeats(KeyClient):
    """A member that looks at no challenge."""

    def take(self, answer: KeyAnswer, now: float) -> bool:
        """Take any answer to any question."""
        if self._question is not None:
            answer = replace(answer, life=self.life, challenge=self._question.challenge)
        return super().take(answer, now)


class KeepsAfterOrder(KeyClient):
    """A member that says that it holds nothing old any more, and still does."""

    def shred(self, account: str) -> bool:
        """Order without erasing, and claim to hold nothing of today."""
        held = self._held.get(account)
        done = super().shred(account)
        if held is not None:
            self._held[account], self._floors[account] = held, held.generation + 1
        return done


class WaitsForNobody(KeyServer):
    """A server that calls a shred complete at once."""

    def settled(self, account: str, now: float) -> int:
        """Return the present generation."""
        return (self.key(account) or (0,))[0]


class ForgetsRestarts(KeyServer):
    """A server that takes its start for the beginning of everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.started -= LEASE_S + DRIFT_S


class WaitsTooShort(KeyServer):
    """A server that counts a lease from nine tenths of it."""

    def settled(self, account: str, now: float) -> int:
        """Look a tenth of a lease ahead."""
        return super().settled(account, now + LEASE_S / 10)


class TakesOneLife(KeyServer):
    """A server for which all processes with a member's keys are one."""

    def answer(self, member: str, question: KeyQuestion, allowed: Collection[str], now: float) -> KeyAnswer | None:
        """Answer under one number of a life."""
        found = super().answer(member, replace(question, life=b""), allowed, now)
        return None if found is None else replace(found, life=question.life)


class NumbersAnew(KeyServer):
    """A server whose generations begin at one after each restart."""

    def __post_init__(self) -> None:
        self._last = 0


def test_a_hostile_store_breaks_no_promise() -> None:
    """In 400 random sequences: what was said to be gone is held by no member, no older generation comes back, nothing
    outlives its lease, each shred is complete when a lease has ended, and no account has another's key. Members do get
    keys in most steps."""
    assert search(SEQUENCES, STEPS, KeyClient, KeyServer) > SEQUENCES * STEPS


@pytest.mark.full
def test_a_hostile_store_breaks_no_promise_in_a_long_search() -> None:
    """The search of a release: 20,000 sequences."""
    assert search(20_000, STEPS, KeyClient, KeyServer)


@pytest.mark.parametrize("client", [CountsFromReceipt, TakesRepeats, KeepsAfterOrder], ids=lambda one: one.__name__)
def test_the_search_finds_a_wrong_member(client: type[KeyClient]) -> None:
    """Positive control: each of these mistakes is found in the sequences of the test above."""
    with pytest.raises(Violation):
        search(SEQUENCES, STEPS, client, KeyServer)


@pytest.mark.parametrize(
    "server", [WaitsForNobody, ForgetsRestarts, WaitsTooShort, TakesOneLife, NumbersAnew], ids=lambda one: one.__name__
)
def test_the_search_finds_a_wrong_server(server: type[KeyServer]) -> None:
    """Positive control: likewise."""
    with pytest.raises(Violation):
        search(SEQUENCES, STEPS, KeyClient, server)


class Pair:
    """A server, one member, and an honest way between them."""

    def __init__(self) -> None:
        self.count = 0
        self.server = KeyServer(1, self.draw, 0.0)
        self.client = self.member()

    def draw(self) -> bytes:
        """Draw a number that no other is."""
        self.count += 1
        return self.count.to_bytes(32, "big")

    def member(self) -> KeyClient:
        """A process of the member."""
        client = KeyClient(self.draw(), self.draw)
        client.want([FLEET, "alpha", "beta"])
        return client

    def turn(self, now: float, allowed: tuple[str, ...] = (FLEET, "alpha")) -> bool:
        """One question and its answer, where one is due."""
        question = self.client.question(now)
        if question is None:
            return False
        answer = self.server.answer("b", question, allowed, now)
        return answer is not None and self.client.take(answer, now)


def test_a_member_gets_what_both_hosts_allow_and_for_a_time() -> None:
    """Keys of the fleet and of a tenant that the server allows; they are the server's, are renewed while it answers,
    and end a lease after the last question, to the second."""
    pair = Pair()
    assert pair.turn(1_000.0)
    for account in (FLEET, "alpha"):
        held = pair.client.key(account, 1_000.0)
        assert held is not None and (held.generation, held.key) == pair.server.key(account)
    assert pair.client.key("beta", 1_000.0) is None
    assert pair.client.key(FLEET, 1_000.0) != pair.client.key("alpha", 1_000.0)
    assert pair.turn(1_001.0), "it says at once what it holds"
    assert not pair.turn(1_000.0 + RENEW_S)
    assert pair.turn(1_001.0 + RENEW_S)
    end = 1_001.0 + RENEW_S + LEASE_S
    assert pair.client.key("alpha", end - 0.001) and pair.client.key("alpha", end) is None
    assert pair.client.key("alpha", end - 0.001) is None, "it was erased"


def test_a_shred_is_complete_when_the_member_has_said_so() -> None:
    """Ordered on the server: the member holds the old key until it asks, the next answer has the new one, and the
    question after that completes it, long before the lease has ended. Nobody waits any more then."""
    pair = Pair()
    pair.turn(1_000.0)
    pair.turn(1_001.0)
    before = pair.client.key("alpha", 1_001.0)
    new = pair.server.shred("alpha")
    assert pair.server.settled("alpha", 1_002.0) < new and pair.server.waiting("alpha", 1_002.0).keys() == {"b"}
    assert pair.client.key("alpha", 1_002.0) == before
    assert pair.turn(1_001.0 + RENEW_S)
    after = pair.client.key("alpha", 1_002.0)
    assert before and after and after.generation == new and after.key != before.key
    assert not pair.client.settled("alpha")
    assert pair.turn(1_002.0 + RENEW_S)
    assert (pair.server.settled("alpha", 1_040.0), pair.server.waiting("alpha", 1_040.0)) == (new, {})
    assert pair.client.settled("alpha")


def test_a_shred_ordered_on_a_member_is_the_servers() -> None:
    """The member has no key from the order on, takes none that was drawn before it, and gets the next generation; the
    order is carried out once, however often its question comes. Too many orders at once are refused."""
    pair = Pair()
    pair.turn(1_000.0)
    late = pair.client.question(1_000.0)
    old = pair.server.key("alpha")
    assert pair.client.shred("alpha") and pair.client.key("alpha", 1_001.0) is None
    assert late is not None and old is not None
    answer = pair.server.answer("b", late, (FLEET, "alpha"), 1_001.0)
    assert answer is not None and answer.keys["alpha"].key == old[1]
    assert pair.client.take(answer, 1_001.0) and pair.client.key("alpha", 1_001.0) is None
    question = pair.client.question(1_002.0)
    assert question is not None
    answers = [pair.server.answer("b", question, (FLEET, "alpha"), 1_003.0) for _ in range(3)]
    assert answers[0] is not None and pair.client.take(answers[0], 1_003.0)
    held = pair.client.key("alpha", 1_003.0)
    assert held is not None and held.generation == old[0] + 1 and pair.server.key("alpha") == (old[0] + 1, held.key)
    assert not pair.client.settled("alpha")
    assert pair.turn(1_004.0) and pair.client.settled("alpha")
    for number in range(MAX_ORDERS):
        assert pair.client.shred(f"t{number}")
    assert not pair.client.shred("one-more") and pair.client.shred("t0")


def test_a_restarted_server_gives_higher_numbers_and_waits() -> None:
    """Generations of the next life are above all of the last one; the server calls nothing settled before the leases
    that it may have given have ended. A server that gives lower numbers, by a record that was put back, is refused."""
    pair = Pair()
    pair.turn(1_000.0)
    first = pair.client.key("alpha", 1_000.0)
    pair.server = KeyServer(2, pair.draw, 1_010.0)
    assert pair.turn(1_001.0 + RENEW_S)
    second = pair.client.key("alpha", 1_031.0)
    assert first and second and second.generation > 2 << GENERATION_BITS > first.generation
    assert pair.server.settled("alpha", 1_010.0 + LEASE_S + DRIFT_S - 0.1) == 0
    assert pair.server.settled("alpha", 1_010.0 + LEASE_S + DRIFT_S) > 0
    pair.server = KeyServer(1, pair.draw, 1_100.0)
    assert not pair.turn(1_100.0) and pair.client.key("alpha", 1_100.0) == second


def test_a_copied_hosts_lease_counts_by_itself() -> None:
    """Two processes have one host's keys, and one says that it holds nothing old: the shred waits for the other's lease
    all the same."""
    pair = Pair()
    twin = pair.member()
    first, pair.client = pair.client, twin
    pair.turn(1_000.0)
    pair.client = first
    pair.turn(1_000.0)
    new = pair.server.shred("alpha")
    for now in (1_031.0, 1_032.0, 1_080.0):
        pair.turn(now)
    assert first.key("alpha", 1_080.0) != twin.key("alpha", 1_080.0) is not None
    assert pair.server.settled("alpha", 1_080.0) < new
    assert pair.server.settled("alpha", 1_000.0 + LEASE_S + DRIFT_S) == new
    assert twin.key("alpha", 1_000.0 + LEASE_S) is None


def test_a_member_whose_permission_ends_loses_the_key_with_the_next_answer() -> None:
    """The server withdraws a tenant: its key is gone there, and with the next answer here. One that this host does not
    ask for any more is erased at once."""
    pair = Pair()
    pair.turn(1_000.0)
    pair.server.withdraw("alpha")
    assert pair.turn(1_001.0, (FLEET,))
    assert pair.client.key("alpha", 1_001.0) is None and pair.client.key(FLEET, 1_001.0)
    assert not pair.server.is_settled("alpha", 1_001.0), "nothing has said that it is gone there"
    assert pair.server.is_settled("alpha", 1_000.0 + LEASE_S + DRIFT_S)
    pair.client.want(["alpha"])
    assert pair.client.key(FLEET, 1_001.0) is None


def test_one_generation_has_one_key() -> None:
    """Of a server that was copied, with another key under the same number, none is used."""
    pair = Pair()
    pair.turn(1_000.0)
    held = pair.client.key("alpha", 1_000.0)
    question = pair.client.question(1_001.0)
    assert held and question
    answer = pair.server.answer("b", question, ("alpha",), 1_001.0)
    assert answer is not None
    twin = replace(answer, keys={"alpha": replace(answer.keys["alpha"], key=bytes(32))})
    assert pair.client.take(twin, 1_001.0) and pair.client.key("alpha", 1_001.0) is None
    for now in (1_001.0 + RENEW_S, 1_001.0 + 2 * RENEW_S):
        assert pair.turn(now)
        assert pair.client.key("alpha", now) is None, "nor by the next answer, whichever of the two it has"
    pair.server.shred("alpha")
    assert pair.turn(1_001.0 + 3 * RENEW_S) and pair.client.key("alpha", 1_001.0 + 3 * RENEW_S)


def test_orders_for_what_the_server_does_not_share_do_not_pile_up() -> None:
    """A member orders shreds of tenants of which the server has no key: the answer to the question that has the order
    ends it, so that later orders find room. None of them is called complete. Control: until then there is no room."""
    pair = Pair()
    pair.turn(1_000.0)
    for number in range(MAX_ORDERS):
        assert pair.client.shred(f"t{number}")
    assert not pair.client.shred("alpha")
    assert pair.turn(1_001.0)
    assert not any(pair.client.settled(f"t{number}") for number in range(MAX_ORDERS))
    assert pair.client.shred("alpha") and pair.turn(1_002.0) and pair.turn(1_003.0) and pair.client.settled("alpha")


def test_an_order_for_a_withdrawn_tenant_is_not_called_complete() -> None:
    """Another member may hold the key that the server has withdrawn, and this one cannot know."""
    pair = Pair()
    pair.turn(1_000.0)
    pair.turn(1_001.0)
    assert pair.client.settled("alpha")
    pair.server.withdraw("alpha")
    assert pair.client.shred("alpha") and pair.turn(1_002.0, (FLEET,))
    assert not pair.client.settled("alpha") and pair.client.key("alpha", 1_002.0) is None


def test_a_shred_is_followed_where_the_member_shares_no_more() -> None:
    """A member that wants an account no more learns all the same that its shred is complete, whether it shared when it
    ordered that or not, and has no key; then it asks for the account no more. While another member may hold the old key
    the shred is not called complete (control)."""
    pair, other = Pair(), KeyClient(b"o" * 32, lambda: b"c" * 32)
    other.want(["alpha"])
    question = other.question(1_000.0)
    assert question is not None
    given = pair.server.answer("c", question, ("alpha",), 1_000.0)
    assert given is not None and other.take(given, 1_000.0)
    pair.turn(1_000.0)
    assert pair.client.shred("alpha")
    pair.client.want([FLEET])
    for now in (1_001.0, 1_002.0, 1_003.0 + RENEW_S):
        assert pair.turn(now) and pair.client.key("alpha", now) is None and not pair.client.settled("alpha")
    late = 1_001.0 + LEASE_S + DRIFT_S
    assert pair.turn(late) and pair.client.settled("alpha"), "the other's lease has ended"
    question = pair.client.question(late + RENEW_S)
    assert question is not None and question.accounts.keys() == {FLEET}
    pair = Pair()
    pair.client.want([FLEET])
    assert pair.turn(1_000.0)
    assert pair.client.shred("alpha") and pair.turn(1_001.0) and pair.client.settled("alpha")
    assert pair.client.shred("alpha") and not pair.client.settled("alpha")


def test_what_is_shown_has_no_key() -> None:
    """Neither an answer nor a server shows a key where it is printed. Control: the number is there."""
    pair = Pair()
    question = pair.client.question(1_000.0)
    assert question is not None
    answer = pair.server.answer("b", question, ("alpha",), 1_000.0)
    assert answer is not None
    given = answer.keys["alpha"]
    shown = f"{answer} {pair.server}"
    assert repr(given.key) not in shown and str(given.generation) in shown


def test_everything_is_bounded() -> None:
    """Accounts of a question and of a server, and lives of a member with leases; a life more gets nothing until one of
    them has ended. A question waits so long and no longer."""
    pair = Pair()
    pair.client.want([f"t{number}" for number in range(MAX_TENANTS + 5)])
    question = pair.client.question(1_000.0)
    assert question is not None and len(question.accounts) == MAX_TENANTS
    assert pair.client.question(1_000.0 + FRESH_S) is None and pair.client.question(1_000.1 + FRESH_S) is not None
    for number in range(MAX_TENANTS):
        assert pair.server.key(f"u{number}")
    assert pair.server.key("one more") is None
    pair = Pair()
    for number in range(MAX_LIVES):
        pair.client = pair.member()
        assert pair.turn(1_000.0 + number)
    pair.client = pair.member()
    assert not pair.turn(1_100.0)
    assert pair.turn(1_100.0 + LEASE_S)
