"""Asks an appliance's HTTP API for an attestation, as a tenant. Standard library only. Blocks."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

ANSWER_S = 15.0
"""Patience for an answer in seconds; the appliance's own is five."""

MAX_ANSWER_BYTES = 128 << 10
"""Most bytes of an answer that are read: a whole attestation with every character escaped. Most have some two
thousand."""


class AttestRefusedError(Exception):
    """There is no attestation; the message gives the reason."""


def fetch_attestation(url: str, api_key: str, model: str, nonce: str, ca: Path | None = None) -> str:
    """Return the signed text. ``url`` is the API's address without a path; ``ca`` has the certificates that are trusted
    in place of the system's.

    Raises:
        AttestRefusedError: the appliance cannot be reached, or refuses.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise AttestRefusedError(f"{url!r} is no address: write http://HOST:PORT or https://HOST:PORT")
    request = urllib.request.Request(  # noqa: S310 - the scheme is checked above
        f"{url.rstrip('/')}/v1/attestations",
        json.dumps({"model": model, "nonce": nonce}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    try:
        trust = ssl.create_default_context(cafile=ca)
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trust))
        with opener.open(request, timeout=ANSWER_S) as answer:
            found = json.loads(answer.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        raise AttestRefusedError(f"the appliance answers {error.code}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        raise AttestRefusedError(f"cannot ask {url}: {error}") from error
    text = found.get("attestation") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise AttestRefusedError(f"what {url} sent is no attestation")
    return text


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(MAX_ANSWER_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "no reason given"
