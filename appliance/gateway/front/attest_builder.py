"""The request for an attestation that both front ends build: every field is checked here, and nowhere else."""

from __future__ import annotations

from appliance.common.audit.attestation import MAX_NONCE, MIN_NONCE, NONCE
from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import Stamp, check_model
from appliance.gateway.generate_request import AttestRequest


def build_attest(model: str, nonce: str, stamp: Stamp) -> AttestRequest:
    """Return the request.

    Raises:
        InvalidRequestError: no model could have this name, or the nonce is none.
    """
    check_model(model)
    if NONCE.fullmatch(nonce) is None:
        raise InvalidRequestError(
            f"nonce must be {MIN_NONCE} to {MAX_NONCE} digits of 0-9 and a-f, drawn at random for this call",
            param="nonce",
        )
    return AttestRequest(request_id=stamp.request_id, model=model, nonce=nonce, deadline=stamp.deadline)
