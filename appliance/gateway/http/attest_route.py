"""``/v1/attestations``: JSON -> ``AttestRequest``, and the signed text -> the answer's object; pure."""

from __future__ import annotations

from typing import Any

from appliance.gateway.front.attest_builder import build_attest
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import AttestRequest
from appliance.gateway.http.fields import needed
from appliance.gateway.http.openai import document_of

_SERVED = frozenset({"model", "nonce"})


def parse_attest(body: bytes, stamp: Stamp) -> tuple[AttestRequest, tuple[str, ...]]:
    """The request in the body of ``/v1/attestations``, and the names of fields that had a value and no effect.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    request = build_attest(needed(document, "model", str), needed(document, "nonce", str), stamp)
    return request, tuple(name for name, value in document.items() if value is not None and name not in _SERVED)


def attested(request_id: str, model: str, text: str) -> dict[str, Any]:
    """The answer of ``/v1/attestations``."""
    return {"object": "attestation", "id": request_id, "model": model, "attestation": text}
