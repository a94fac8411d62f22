"""Who killed the engine: pure book-keeping of suspicion, so that one request cannot end service for all.

When an engine dies, every request that was live in it is a suspect. A suspect runs its next time *on probation*: no
other request is in the engine with it until its first token has come out. Should the engine die during somebody's
probation, there is no doubt left and that request is quarantined: it is answered with an error, and the same request
sent anew is refused, until ``FORGET_S`` have passed. A request is known by its fingerprint (tenant, token ids,
sampling as asked), never by an id of the client's.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from isolation.ipc.messages import Submit

MAX_REMEMBERED = 4_096
"""Fingerprints kept; the oldest goes first. 16 bytes each."""

FORGET_S = 3_600.0
"""Seconds after which a suspicion or quarantine lapses: engines get mended."""


@dataclass(slots=True)
class _Record:
    deaths: int
    at: float


class Suspects:
    """Deaths by fingerprint. Time (monotonic seconds) is an argument."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def deaths(self, fingerprint: bytes, now: float) -> int:
        """How many engine deaths this request is blamed for: 0 clean, 1 suspect, 2 or more quarantined."""
        record = self._records.get(fingerprint)
        if record is None:
            return 0
        if now - record.at > FORGET_S:
            del self._records[fingerprint]
            return 0
        return record.deaths

    def engine_died(self, live: list[tuple[bytes, bool]], now: float) -> None:
        """Blame the requests live at a death, given as (fingerprint, on probation). With one on probation only that
        one is blamed; else each becomes a suspect, and one that was the only suspect among them is blamed again."""
        on_probation = [fingerprint for fingerprint, probation in live if probation]
        if on_probation:
            for fingerprint in on_probation:
                self._blame(fingerprint, self.deaths(fingerprint, now) + 1, now)
            return
        known = [fingerprint for fingerprint, _ in live if self.deaths(fingerprint, now)]
        for fingerprint, _ in live:
            again = len(known) == 1 and fingerprint == known[0]
            self._blame(fingerprint, 2 if again else max(1, self.deaths(fingerprint, now)), now)

    def cleared(self, fingerprint: bytes) -> None:
        """The request ended well: whatever killed the engine, it was not this."""
        self._records.pop(fingerprint, None)

    def _blame(self, fingerprint: bytes, deaths: int, now: float) -> None:
        self._records[fingerprint] = _Record(deaths, now)
        self._records.move_to_end(fingerprint)
        while len(self._records) > MAX_REMEMBERED:
            self._records.popitem(last=False)


def fingerprint(tenant: str, model: str, submit: Submit) -> bytes:
    """16 bytes that name what is being asked, length-framed; the drawn seed is left out, so a retry matches."""
    digest = hashlib.blake2b(digest_size=16, person=b"athanor-suspect")
    sampling = submit.sampling
    numbers = (
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
        sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty,
        submit.max_tokens, submit.stop_ids, submit.ignore_eos, submit.logprobs,
    )
    for part in (tenant.encode(), model.encode(), submit.token_ids.tobytes(), repr(numbers).encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
