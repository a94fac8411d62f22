"""The gateway's feed of the audit log: bounded, counted, in messages that fit, and what calls become in it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from appliance.common import control
from appliance.common.audit.entry import Entry, from_wire
from appliance.common.control import Audited
from appliance.common.errors import FeatureNotAllowedError, RateLimitedError, UnauthenticatedError
from appliance.gateway.generate_request import Principal
from appliance.gateway.request import audit_feed
from appliance.gateway.request.audit_feed import (
    FLUSH_S,
    MAX_COUNTED,
    MAX_PENDING,
    MESSAGES_A_TURN,
    AuditFeed,
    NoAuditFeed,
)
from appliance.gateway.request.audited_calls import AuditedCalls, Call, Charge
from policy.decision import Decision, Effect, Reason

WHO = Principal("alpha", "key:k1")
CALL = Call("req_1", "m", "chat")
CHARGE = Charge(input=7, cached=2, output=3, cost=950, reserved=False)
YES = Decision(effect=Effect.ALLOW, reason=Reason.ALLOWED, rule="tenants.alpha", message="", policy_digest="ab" * 32)


class Peer:
    """A supervisor that takes so many messages."""

    def __init__(self, room: int = 1_000) -> None:
        self.room = room
        self.taken: list[Audited] = []

    def send(self, message: Audited) -> bool:
        """Take it, if there is room."""
        if not self.room:
            return False
        self.room -= 1
        self.taken.append(message)
        assert len(control.encode(message)) <= control.MAX_DATAGRAM_BYTES
        return True

    @property
    def entries(self) -> list[Entry]:
        """All that came."""
        return [from_wire(text) for message in self.taken for text in message.entries]


def test_calls_become_entries() -> None:
    """An allowed request is an entry with its rule and outcome; denials and refusals are counted."""
    peer = Peer()
    feed = AuditFeed(peer.send)
    calls = AuditedCalls(feed, {"m"})
    calls.served(WHO, CALL, YES, CHARGE, None, 1_250)
    limited = RateLimitedError("slow down")
    limited.rule = "tenants.alpha.limits.tokens"
    calls.served(WHO, CALL, YES, CHARGE, limited)
    withheld = FeatureNotAllowedError("no files").by_rule("tenants.alpha.features.batches", "ef" * 32)
    for name in ("m", "m", "unknown-1", "unknown-2"):
        calls.denied(WHO, Call("req_2", name, "chat"), "cd" * 32, limited)
    for _ in range(5):
        calls.refused(None, UnauthenticatedError("no"))
    calls.refused(WHO, withheld)
    calls.integrity("m", 3, 2)
    feed.flush()
    kinds = [(one.kind, one.fields.get("count"), one.fields.get("model")) for one in peer.entries]
    assert kinds == [
        ("request", None, "m"),
        ("integrity", 2, "m"),
        ("denied", 1, "m"),
        ("denied", 2, "m"),
        ("denied", 2, ""),
        ("refused", 5, None),
        ("denied", 1, ""),
    ]
    assert peer.entries[0].fields["outcome"] == "OK"
    charged = ("input_tokens", "cached_tokens", "output_tokens", "cost", "queued_ms", "downgraded")
    assert [peer.entries[0].fields[name] for name in charged] == [7, 2, 3, 950, 1_250, ""]
    assert peer.entries[2].fields["rule"] == limited.rule
    assert peer.entries[2].fields["policy"] == YES.policy_digest
    assert peer.entries[5].fields["outcome"] == "UNAUTHENTICATED"
    before = peer.entries[6].fields
    assert (before["rule"], before["policy"]) == ("tenants.alpha.features.batches", "ef" * 32)
    feed.flush()
    assert len(peer.taken) == 1


def test_a_denial_that_reserved_a_cost_is_an_entry() -> None:
    """The entry of a request releases its reservation of spend, so there is one however the request ends."""
    peer = Peer()
    feed = AuditFeed(peer.send)
    denied = RateLimitedError("slow down")
    denied.rule = "tenants.alpha.limits.tokens"
    AuditedCalls(feed, {"m"}).served(WHO, CALL, YES, replace(CHARGE, reserved=True), denied)
    feed.flush()
    assert [(one.kind, one.fields["outcome"]) for one in peer.entries] == [("request", "RATE_LIMITED")]


def test_without_a_feed_nothing_is_made() -> None:
    """A gateway without an audit log makes no entries and refuses nobody."""
    calls = AuditedCalls(NoAuditFeed(), set())
    calls.served(WHO, CALL, YES, CHARGE, None)
    calls.denied(WHO, CALL, "", None)
    calls.refused(None, UnauthenticatedError("no"))
    calls.integrity("m", 1, 1)
    assert not calls.refuses


def test_a_supervisor_that_is_away_costs_a_bounded_list_and_a_gap() -> None:
    """Nothing is sent twice or out of order; what had no place is counted and told with the first message."""
    peer = Peer(0)
    feed = AuditFeed(peer.send)
    calls = AuditedCalls(feed, {"m"})
    for number in range(MAX_PENDING + 7):
        calls.served(WHO, Call(f"req_{number}", "m", "chat"), YES, CHARGE, None)
    feed.flush()
    assert peer.taken == []
    peer.room = 3
    feed.flush()
    assert [message.dropped for message in peer.taken] == [7, 0, 0]
    peer.room = 1_000
    while len(peer.entries) < MAX_PENDING:
        before = len(peer.taken)
        feed.flush()
        assert 0 < len(peer.taken) - before <= MESSAGES_A_TURN
    assert [one.fields["request"] for one in peer.entries] == [f"req_{number}" for number in range(MAX_PENDING)]


async def test_a_feed_with_nothing_to_hand_on_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without entries it wakes up for nothing; the first one, or a count, is handed on after one sleep, and while the
    supervisor takes none it goes on trying (control)."""
    sleeps: list[float] = []
    plain = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        sleeps.append(delay_s)
        await plain(0.001)

    monkeypatch.setattr(audit_feed, "asyncio", SimpleNamespace(sleep=sleep, Event=asyncio.Event))
    peer = Peer()
    feed = AuditFeed(peer.send)
    running = asyncio.create_task(feed.run())
    add = partial(feed.add, "integrity", model="m", generation=1, count=1)
    for number, make in enumerate((add, partial(feed.count, "refused", outcome="X", reason="y")), start=1):
        await plain(0.05)
        assert len(sleeps) == number - 1
        make()
        while len(peer.entries) < number:
            await plain(0.001)
        await plain(0.05)
        assert sleeps == [FLUSH_S] * number
    peer.room = 0
    add()
    while len(sleeps) < 6:
        await plain(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_flood_of_denials_pushes_no_request_out() -> None:
    """A million denials of a thousand kinds are a bounded number of entries, and a request's entry is among them."""
    peer = Peer()
    feed = AuditFeed(peer.send)
    calls = AuditedCalls(feed, {"m"})
    calls.served(WHO, CALL, YES, CHARGE, None)
    error = RateLimitedError("slow down")
    for number in range(20_000):
        calls.denied(Principal("mallory", f"key:{number % 5_000}"), CALL, "", error)
    feed.flush()
    assert peer.entries[0].kind == "request"
    assert len(peer.entries) == 1 + MAX_COUNTED
    assert sum(message.dropped for message in peer.taken) == 20_000 - sum(
        int(one.fields["count"]) for one in peer.entries[1:]
    )


def test_texts_from_outside_are_made_harmless() -> None:
    """A credential with quotes, line breaks and another script is one printable text, and messages still fit."""
    peer = Peer()
    feed = AuditFeed(peer.send)
    hostile = Principal("alpha", '"\\\n\x1b[31m\u202e' * 60)
    for _ in range(500):
        AuditedCalls(feed, {"m"}).served(hostile, CALL, YES, CHARGE, None)
    for _ in range(2):  # Of such entries a turn takes a few less.
        feed.flush()
    assert len(peer.entries) == 500
    text = str(peer.entries[0].fields["principal"])
    assert text.isprintable()
    assert text.isascii()
    assert len(text) == 256
