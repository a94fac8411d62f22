"""Requests suspected of ending engines: pure book-keeping, so that one request cannot end service for all.

When an engine dies, every request that was in it is a suspect. Only a death that a request met alone is certain
proof; a request that was alone in the engine at its second death is quarantined: it is answered with an error, and the
same request sent anew is refused, until ``FORGET_S`` have passed. So a suspect runs its next time *on probation*: the
engine is kept empty around it until its first token has come out. Where the engine is too busy for that, it runs
beside the others once more; after a second death in company it runs alone or not at all. A death in company is never
proof: an attacker could end the engine beside a neighbour on purpose, to have the neighbour quarantined.

A request is known by its fingerprint (tenant, token ids, sampling as asked), never by an id of the client's.
Fingerprints are kept for an hour, also for tenants with ``retention: none``, so they are hashes under a key of this
process alone: a stolen one cannot be used to test prompts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from isolation.ipc.engine import Submit
from isolation.ipc.sampling import values_of

MAX_REMEMBERED = 4_096
"""Most fingerprints kept, 16 bytes each; the oldest goes first."""

FORGET_S = 3_600.0
"""Seconds after which a suspicion or quarantine lapses: engines get mended."""


_KEY = secrets.token_bytes(32)
"""Hash key of this process: fingerprints mean nothing after its end."""


class Standing(Enum):
    """Suspicion against a request."""

    CLEAN = auto()
    SUSPECT = auto()
    """In the engine at one death: to be run alone, if that is possible."""
    ALONE_ONLY = auto()
    """In company at more than one death: to be run alone or not at all."""
    QUARANTINED = auto()
    """Alone in the engine at its second death or a later one."""


@dataclass(slots=True)
class _Record:
    deaths: int
    certain: bool
    at: float


class Suspects:
    """Deaths by fingerprint. Time (monotonic seconds) is an argument."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def standing(self, fingerprint: bytes, now: float) -> Standing:
        """Return how this request is to be treated."""
        record = self._record(fingerprint, now)
        if record is None:
            return Standing.CLEAN
        if record.certain:
            return Standing.QUARANTINED
        return Standing.SUSPECT if record.deaths == 1 else Standing.ALONE_ONLY

    def engine_died(self, inside: Iterable[bytes], now: float) -> None:
        """Blame the requests that were in an engine at its death; one that was alone and suspected before is
        certain."""
        marks = set(inside)
        for mark in marks:
            record = self._record(mark, now)
            deaths = 1 if record is None else record.deaths + 1
            certain = record is not None and (record.certain or len(marks) == 1)
            self._records[mark] = _Record(deaths, certain, now)
            self._records.move_to_end(mark)
        while len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)

    def counts(self, now: float) -> tuple[int, int]:
        """Return how many requests are remembered, and how many of them are in quarantine."""
        there = [record for record in self._records.values() if now - record.at <= FORGET_S]
        return len(there), sum(record.certain for record in there)

    def cleared(self, fingerprint: bytes) -> None:
        """Forget a request that ended well: it did not end the engine."""
        self._records.pop(fingerprint, None)

    def _record(self, fingerprint: bytes, now: float) -> _Record | None:
        record = self._records.get(fingerprint)
        if record is not None and now - record.at > FORGET_S:
            del self._records[fingerprint]
            return None
        return record


def fingerprint(tenant: str, model: str, submit: Submit) -> bytes:
    """Return 16 bytes that name what is asked, length-framed; the drawn seed is left out, so a retry matches."""
    digest = hashlib.blake2b(digest_size=16, key=_KEY, person=b"athanor-suspect")
    numbers = (
        *values_of(replace(submit.sampling, seed=0)),
        submit.max_tokens,
        submit.stop_ids,
        submit.ignore_eos,
        submit.logprobs,
        submit.choices,
        submit.deterministic,
        submit.prompt_logprobs,
        submit.logit_bias,
        submit.adapter,
    )
    for part in (tenant.encode(), model.encode(), submit.token_ids.tobytes(), repr(numbers).encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
