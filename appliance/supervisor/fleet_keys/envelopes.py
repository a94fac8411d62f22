"""What members of a fleet write to each other, as bytes for a store that need not be trusted.

An envelope is ``signature 64`` and wrapped bytes (``isolation.keys.hpke``). The signature is the sender's, over the
*context* and the wrapped bytes; the context is part of HPKE's ``info`` as well. It is the digest of the signed list,
which names fleet, version and all keys, the kind of message, and both hosts. So an envelope opens for one recipient, as
one sender's, in one version of the list, and in one direction; a member that signs the wrapped bytes of another anew
has bytes that do not open.

A question is wrapped to the key of the server that is in the list. An answer is wrapped to that of the member, and once
more to the challenge: a key that the member has drawn for the question and erases with the answer. Who records all that
the store has, and steals private keys of hosts later, opens no answer: a key that was shredded does not come back.

All envelopes are ``ENVELOPE_BYTES`` long, so the store learns which hosts speak and when, and not of how many tenants.
Names of envelopes are hashes of the context: the store learns nothing from them unless it has the list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from appliance.common.errors import AccountNameError, EnvelopeError, StaleEnvelopeError
from appliance.common.members import FleetMember
from appliance.supervisor.fleet_keys.leases import (
    KEY_BYTES,
    MAX_TENANTS,
    AccountState,
    GivenKey,
    KeyAnswer,
    KeyQuestion,
)
from appliance.supervisor.fleet_keys.membership import Membership
from isolation.keys.errors import KeysError
from isolation.keys.hpke import OVERHEAD_BYTES, PUBLIC_BYTES, HpkeKey, draw_key, wrap
from isolation.keys.signing import SIGNATURE_BYTES, verifies

ENVELOPE_BYTES = 64 << 10
"""Length of every envelope: an answer about ``MAX_TENANTS`` accounts takes 62,527 bytes at most."""

LIFE_BYTES = 16

_PLAIN_BYTES = ENVELOPE_BYTES - SIGNATURE_BYTES - 2 * OVERHEAD_BYTES
"""Bytes of the padded text of an answer; a question, which is wrapped once, has ``OVERHEAD_BYTES`` more."""

_HEAD = struct.Struct(f"<IB{LIFE_BYTES}s{PUBLIC_BYTES}sQH")
"""Length of the text, form, the asker's life, challenge, life of the server, number of accounts."""

_ASKED = struct.Struct("<QI")
_GIVEN = struct.Struct(f"<QQI{KEY_BYTES}s")
_FORM = 1
_MAX_NAME = 69
"""Bytes of the longest account: ``group/`` and an id of 63."""

_DOMAIN = b"athanor fleet keys 1\x00"


class EnvelopeKind(IntEnum):
    """Direction of an envelope."""

    QUESTION = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Context:
    """What an envelope is bound to."""

    members: bytes
    """Digest of the signed list."""
    kind: EnvelopeKind
    sender: FleetMember
    recipient: FleetMember

    def framed(self) -> bytes:
        """Encode the context with length prefixes, so that no two give equal bytes."""
        parts = (self.members, bytes([self.kind]), self.sender.line.encode(), self.recipient.line.encode())
        return _DOMAIN + b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    @property
    def name(self) -> bytes:
        """Name under which the store has the envelope."""
        return hashlib.sha256(b"name\x00" + self.framed()).digest()


class Envelopes:
    """Writes and opens the envelopes of one member. Calls come one at a time."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._challenge: HpkeKey | None = None

    def draw(self) -> bytes:
        """Draw the challenge of a new question; what was wrapped to the one before opens no more."""
        self._challenge = draw_key()
        return self._challenge.public

    def forget_challenge(self) -> None:
        """Erase the challenge after its answer was taken."""
        self._challenge = None

    def to(self, peer: FleetMember, kind: EnvelopeKind) -> Context:
        """Return the context of an envelope that this host writes."""
        return Context(self._membership.members.digest, kind, self._membership.own, peer)

    def of(self, peer: FleetMember, kind: EnvelopeKind) -> Context:
        """Return the context of an envelope that a peer writes to this host."""
        return Context(self._membership.members.digest, kind, peer, self._membership.own)

    def write_question(self, server: FleetMember, question: KeyQuestion) -> bytes:
        """Return the envelope of a question to the server."""
        context = self.to(server, EnvelopeKind.QUESTION)
        text = _padded(_question_text(question), _PLAIN_BYTES + OVERHEAD_BYTES)
        return self._signed(context, wrap(server.hpke, text, context.framed()))

    def read_question(self, peer: FleetMember, data: bytes) -> KeyQuestion:
        """Open a question to this host, the server.

        Raises:
            EnvelopeError: it is none that this peer has written to this host under this list.
        """
        context = self.of(peer, EnvelopeKind.QUESTION)
        return _read_question(_opened(self._membership.keys.hpke, _verified(context, data), context.framed()))

    def write_answer(self, peer: FleetMember, answer: KeyAnswer) -> bytes:
        """Return the envelope of an answer.

        Raises:
            EnvelopeError: the challenge is no key to which anything can be wrapped.
        """
        context = self.to(peer, EnvelopeKind.ANSWER)
        info = context.framed() + answer.challenge
        text = _padded(_answer_text(answer), _PLAIN_BYTES)
        try:
            wrapped = wrap(answer.challenge, wrap(peer.hpke, text, info), info)
        except KeysError as error:
            raise EnvelopeError(f"{peer.host} asks with a challenge that is no key") from error
        return self._signed(context, wrapped)

    def read_answer(self, server: FleetMember, data: bytes) -> KeyAnswer:
        """Open the answer to the question that was drawn last.

        Raises:
            EnvelopeError: it is none, or the answer to an earlier question.
        """
        context = self.of(server, EnvelopeKind.ANSWER)
        wrapped = _verified(context, data)
        if self._challenge is None:
            raise StaleEnvelopeError("an answer has come and no question waits for one")
        info = context.framed() + self._challenge.public
        return _read_answer(_opened(self._membership.keys.hpke, _opened(self._challenge, wrapped, info), info))

    def _signed(self, context: Context, wrapped: bytes) -> bytes:
        return self._membership.keys.signing.sign(context.framed() + wrapped) + wrapped


def check_account(name: str) -> None:
    """Check that an envelope can carry an account's name: names of a policy's tenants and sharing groups fit.

    Raises:
        AccountNameError: it is longer, empty or not ASCII.
    """
    if not name.isascii() or not 1 <= len(name) <= _MAX_NAME:
        raise AccountNameError(
            f"{name[:_MAX_NAME]!r} is no name of a tenant or a sharing group: these are ASCII and have 1 to "
            f"{_MAX_NAME} bytes. Keys of a fleet are neither asked for nor given under it"
        )


def _verified(context: Context, data: bytes) -> bytes:
    """Return the wrapped bytes of an envelope that the context's sender has signed."""
    if len(data) != ENVELOPE_BYTES:
        raise EnvelopeError("an envelope has another length than all have")
    signature, wrapped = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    if not verifies(context.sender.signing, signature, context.framed() + wrapped):
        raise EnvelopeError(
            f"not signed by {context.sender.host} for {context.recipient.host} under this list of members: another "
            "host's, changed, or of a host that has another list"
        )
    return wrapped


def _opened(key: HpkeKey, wrapped: bytes, info: bytes) -> bytes:
    try:
        return key.open(wrapped, info)
    except KeysError as error:
        raise StaleEnvelopeError("an envelope does not open: it is of an earlier question") from error


def _padded(text: bytes, size: int) -> bytes:
    whole = (len(text) + 4).to_bytes(4, "little") + text
    assert len(whole) <= size, "accounts are bounded in number and in length"
    return whole + bytes(size - len(whole))


def _question_text(question: KeyQuestion) -> bytes:
    rows = [_word(name) + _ASKED.pack(one.floor, one.orders) for name, one in question.accounts.items()]
    return _head(question.life, question.challenge, question.server, len(rows)) + b"".join(rows)


def _answer_text(answer: KeyAnswer) -> bytes:
    rows = [
        _word(name) + _GIVEN.pack(one.generation, one.settled, one.orders, one.key) for name, one in answer.keys.items()
    ]
    return _head(answer.life, answer.challenge, answer.server, len(rows)) + b"".join(rows)


def _head(life: bytes, challenge: bytes, server: int, rows: int) -> bytes:
    return _HEAD.pack(0, _FORM, life, challenge, server, rows)[4:]


def _read_question(data: bytes) -> KeyQuestion:
    life, challenge, server, rows = _read(data, _ASKED)
    return KeyQuestion(life, challenge, server, {name: AccountState(*values) for name, values in rows})


def _read_answer(data: bytes) -> KeyAnswer:
    life, challenge, server, rows = _read(data, _GIVEN)
    return KeyAnswer(life, challenge, server, {name: GivenKey(*values) for name, values in rows})


def _read(data: bytes, row: struct.Struct) -> tuple[bytes, bytes, int, list[tuple[str, tuple[Any, ...]]]]:
    """Read a text whose sender is known: a member, which may be of another release, or taken over."""
    length, form, life, challenge, server, count = _HEAD.unpack_from(data)
    if form != _FORM or not _HEAD.size <= length <= len(data) or count > MAX_TENANTS:
        raise EnvelopeError("a member writes what no member of this release does")
    return life, challenge, server, list(_rows(data[_HEAD.size : length], row, count))


def _rows(data: bytes, row: struct.Struct, count: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    at, seen = 0, set[str]()
    for _ in range(count):
        size = data[at] if at < len(data) else 0
        end = at + 1 + size
        word = data[at + 1 : end]
        if not 1 <= size <= _MAX_NAME or end + row.size > len(data) or not word.isascii():
            raise EnvelopeError("a member writes what no member of this release does")
        name = word.decode("ascii")
        if name in seen:
            raise EnvelopeError("a member names one account twice")
        seen.add(name)
        yield name, row.unpack_from(data, end)
        at = end + row.size
    if at != len(data):
        raise EnvelopeError("a member writes more than it says")


def _word(name: str) -> bytes:
    data = name.encode("ascii")
    assert 1 <= len(data) <= _MAX_NAME, "the exchange has checked the name where it came in"
    return bytes([len(data)]) + data
