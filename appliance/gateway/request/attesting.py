"""A request for an attestation: what serves this tenant's requests, signed by the supervisor.

It costs a request of the tenant's rate and a slot while it waits, and no tokens. No sandbox is asked: what runs in one
has no say in what is stated of it.
"""

from __future__ import annotations

import time

from appliance.common.control import Attest, Attested
from appliance.common.errors import DeadlineExceededError
from appliance.gateway.generate_request import AttestRequest
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.sandboxes.questions import Questions
from policy.feature import Feature


class AttestSession:
    """Runs one request for an attestation."""

    def __init__(self, life: Lifecycle, request: AttestRequest, questions: Questions[Attested]) -> None:
        self._life = life
        self._request = request
        self._questions = questions

    async def run(self) -> str:
        """Return the signed text.

        Raises:
            ApplianceError: typed, at any point.
        """
        life, request = self._life, self._request
        await life.admit(0, feature=Feature.ATTESTATION)
        left = life.until - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError("the deadline passed before the attestation was made")
        with life.waiting():
            question = Attest(request.request_id, life.principal.tenant, life.model.name, request.nonce)
            return (await self._questions.ask(question, left)).text
