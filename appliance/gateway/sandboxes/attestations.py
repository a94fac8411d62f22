"""Attestations as the supervisor makes them: a question, and its answer by the request's id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.common.control import Attest, Attested, Control
from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

MAX_WAITING = 64
"""Questions that wait for their answers; further ones are refused at once. The supervisor keeps as many."""

ANSWER_S = 5.0
"""Longest wait for an answer, whose work takes a tenth of a second after an upgrade of runsc, and less than a
millisecond else."""


class Attestations:
    """Asks the supervisor for attestations."""

    def __init__(self, tell: Callable[[Control], None]) -> None:
        """``tell`` sends to the supervisor."""
        self._tell = tell
        self._waiting: dict[str, asyncio.Future[Attested]] = {}

    async def fetch(self, request: str, tenant: str, model: str, nonce: str, timeout_s: float) -> str:
        """Return the signed text.

        Raises:
            UnavailableError: there is none, or none came in time.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError("too many attestations are being made", retry_after_s=RETRY_AFTER_S)
        answer: asyncio.Future[Attested] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        self._tell(Attest(request, tenant, model, nonce))
        try:
            async with asyncio.timeout(min(ANSWER_S, timeout_s)):
                found = await answer
        except TimeoutError:
            raise UnavailableError("no attestation can be made now", retry_after_s=RETRY_AFTER_S) from None
        finally:
            del self._waiting[request]
        if found.problem:
            raise UnavailableError(f"no attestation can be made: {found.problem}", retry_after_s=RETRY_AFTER_S)
        return found.text

    def take(self, message: Attested) -> None:
        """Take an answer; one to a question that waits no more changes nothing."""
        waiting = self._waiting.get(message.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
