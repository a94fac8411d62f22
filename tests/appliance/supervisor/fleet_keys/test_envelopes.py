"""Envelopes: they open for one recipient, as one sender's, in one direction, under one list, and answers once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.errors import EnvelopeError, StaleEnvelopeError
from appliance.supervisor.fleet_keys.envelopes import ENVELOPE_BYTES, EnvelopeKind, Envelopes
from appliance.supervisor.fleet_keys.leases import MAX_TENANTS, AccountState, GivenKey, KeyAnswer, KeyQuestion
from appliance.supervisor.fleet_keys.membership import Membership, join
from isolation.keys.hpke import draw_key, wrap
from tests.appliance.supervisor.fleet_keys.fleets import HOSTS, config, joined, sign

LIFE = bytes(range(16))
KEY = b"k" * 32


@pytest.fixture
def fleet(tmp_path: Path) -> list[Membership]:
    """Three hosts, the first of which is the key server."""
    return joined(tmp_path)


def asked(challenge: bytes) -> KeyQuestion:
    """A question about two accounts."""
    return KeyQuestion(LIFE, challenge, 3, {"*": AccountState(), "group/team": AccountState((3 << 32) + 7, 2)})


def answered(challenge: bytes) -> KeyAnswer:
    """Its answer."""
    return KeyAnswer(LIFE, challenge, 3, {"*": GivenKey((3 << 32) + 9, 5, 2, KEY)})


def test_a_question_and_its_answer_come_as_they_were_written(fleet: list[Membership]) -> None:
    """Both ways, all of one length, whether they are about nothing or about as much as fits; neither shows a name or a
    key."""
    server, member, _ = (Envelopes(one) for one in fleet)
    names = [f"group/{number:057d}" + "x" * 6 for number in range(MAX_TENANTS)]
    assert {len(name) for name in names} == {69}
    for accounts in ([], ["alpha"], names):
        challenge = member.draw()
        question = KeyQuestion(LIFE, challenge, 1, {name: AccountState(2**64 - 1, 2**32 - 1) for name in accounts})
        sent = member.write_question(fleet[0].own, question)
        assert server.read_question(fleet[1].own, sent) == question
        answer = KeyAnswer(LIFE, challenge, 1, {name: GivenKey(2**64 - 1, 1, 0, KEY) for name in accounts})
        back = server.write_answer(fleet[1].own, answer)
        assert member.read_answer(fleet[0].own, back) == answer
        assert {len(sent), len(back)} == {ENVELOPE_BYTES}
        assert not any(word in sent + back for word in (b"alpha", KEY, b"group/", b"host-"))


def test_an_envelope_is_one_hosts_to_one_host(fleet: list[Membership], tmp_path: Path) -> None:
    """Taken for another sender's, by another recipient, in the other direction, or under the next list with the same
    keys: nothing opens. Nor does any with a changed byte or another length. Control: in its place it opens."""
    server, member, third = (Envelopes(one) for one in fleet)
    sent = member.write_question(fleet[0].own, asked(member.draw()))
    sign(tmp_path, HOSTS, version=2)
    later = Envelopes(join(config(tmp_path, "host-a")))
    wrong = [
        lambda: server.read_question(fleet[2].own, sent),
        lambda: third.read_question(fleet[1].own, sent),
        lambda: server.read_answer(fleet[1].own, sent),
        lambda: later.read_question(fleet[1].own, sent),
        lambda: server.read_question(fleet[1].own, sent[:-1]),
        lambda: server.read_question(fleet[1].own, sent + b"\0"),
    ]
    wrong += [
        lambda at=at: server.read_question(fleet[1].own, sent[:at] + bytes([sent[at] ^ 4]) + sent[at + 1 :])
        for at in (0, 63, 64, 95, 96, 1_000, ENVELOPE_BYTES - 1)
    ]
    for read in wrong:
        with pytest.raises(EnvelopeError):
            read()
    assert server.read_question(fleet[1].own, sent)


def test_a_member_cannot_pass_on_anothers_question_as_its_own(fleet: list[Membership]) -> None:
    """It signs the wrapped bytes of another member anew: the signature holds, and they do not open, for the sender is
    part of what they were wrapped with."""
    server, member, third = (Envelopes(one) for one in fleet)
    sent = member.write_question(fleet[0].own, asked(member.draw()))
    context = third.to(fleet[0].own, EnvelopeKind.QUESTION)
    stolen = fleet[2].keys.signing.sign(context.framed() + sent[64:]) + sent[64:]
    with pytest.raises(StaleEnvelopeError):
        server.read_question(fleet[2].own, stolen)
    # Control: wrapped by itself, in that context, its own question opens.
    own = third.write_question(fleet[0].own, asked(third.draw()))
    assert server.read_question(fleet[2].own, own)


def test_an_answer_opens_for_its_challenge_alone(fleet: list[Membership]) -> None:
    """After the next question, and after it was forgotten, an answer opens no more: not even for somebody with both
    private keys of the list and all that the store ever had. Another member opens it at no time."""
    server, member, third = (Envelopes(one) for one in fleet)
    back = server.write_answer(fleet[1].own, answered(member.draw()))
    third.draw()
    for read in (
        lambda: third.read_answer(fleet[0].own, back),
        lambda: Envelopes(fleet[1]).read_answer(fleet[0].own, back),
    ):
        with pytest.raises(EnvelopeError):
            read()
    assert member.read_answer(fleet[0].own, back)
    member.forget_challenge()
    with pytest.raises(StaleEnvelopeError):
        member.read_answer(fleet[0].own, back)
    member.draw()
    with pytest.raises(StaleEnvelopeError):
        member.read_answer(fleet[0].own, back)


def test_the_challenge_alone_opens_nothing(fleet: list[Membership]) -> None:
    """Who has the challenge's private key and not the member's (a forged question, if the signing key was stolen) gets
    bytes that are wrapped to the key of the list."""
    server = Envelopes(fleet[0])
    thief = draw_key()
    back = server.write_answer(fleet[1].own, answered(thief.public))
    info = server.to(fleet[1].own, EnvelopeKind.ANSWER).framed() + thief.public
    inner = thief.open(back[64:], info)
    assert KEY not in inner and KEY in fleet[1].keys.hpke.open(inner, info)


def test_a_hostile_members_text_is_refused(fleet: list[Membership]) -> None:
    """A member signs what no release writes: lengths and counts that lie, a name twice, an empty one, one that is not
    ASCII, rows that are cut, another form, and a challenge that is no key. Each is an error of an envelope."""
    server, member = Envelopes(fleet[0]), fleet[1]
    context = Envelopes(member).to(fleet[0].own, EnvelopeKind.QUESTION)
    head = b"\x01" + LIFE + bytes(32) + bytes(8)
    row = b"\x01a" + bytes(12)
    size = ENVELOPE_BYTES - 64 - 48

    def sealed(text: bytes, length: int | None = None) -> bytes:
        """An envelope with a text, whose length may lie."""
        whole = (len(text) + 4 if length is None else length).to_bytes(4, "little") + text
        wrapped = wrap(fleet[0].own.hpke, whole + bytes(size - len(whole)), context.framed())
        return member.keys.signing.sign(context.framed() + wrapped) + wrapped

    def count(number: int) -> bytes:
        return number.to_bytes(2, "little")

    texts = [
        sealed(head + count(1) + row, 2**32 - 1),
        sealed(head + count(1) + row, 3),
        sealed(head + count(2) + row),
        sealed(head + count(0) + row),
        sealed(head + count(2) + row + row),
        sealed(head + count(1) + b"\x00" + bytes(12)),
        sealed(head + count(1) + b"\xffa" + bytes(12)),
        sealed(head + count(1) + b"\x01\xff" + bytes(12)),
        sealed(head + count(1) + row[:-1]),
        sealed(head + count(MAX_TENANTS + 1) + row),
        sealed(b"\x02" + head[1:] + count(1) + row),
    ]
    for one in texts:
        with pytest.raises(EnvelopeError):
            server.read_question(member.own, one)
    assert server.read_question(member.own, sealed(head + count(1) + row)).accounts == {"a": AccountState()}
    with pytest.raises(EnvelopeError, match="challenge"):
        server.write_answer(member.own, answered(bytes(32)))


def test_names_differ_by_hosts_direction_and_list(fleet: list[Membership], tmp_path: Path) -> None:
    """Both ends compute one name; no two pairs, directions or lists share it."""
    server, member, third = (Envelopes(one) for one in fleet)
    name = member.to(fleet[0].own, EnvelopeKind.QUESTION).name
    assert server.of(fleet[1].own, EnvelopeKind.QUESTION).name == name and len(name) == 32
    sign(tmp_path, HOSTS, version=2)
    later = Envelopes(join(config(tmp_path, "host-b")))
    assert replace(member.to(fleet[0].own, EnvelopeKind.QUESTION)).name == name
    others = {
        third.to(fleet[0].own, EnvelopeKind.QUESTION).name,
        server.to(fleet[1].own, EnvelopeKind.ANSWER).name,
        later.to(fleet[0].own, EnvelopeKind.QUESTION).name,
        member.to(fleet[2].own, EnvelopeKind.QUESTION).name,
    }
    assert len(others | {name}) == 5
