"""Keys of the configuration that must have signed models: their form. Pure.

Programs that read the configuration and verify nothing do not load a library for it: whether a key is a point of its
curve is seen where it is used (``isolation.keys.public_key``).
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from pydantic import AfterValidator

MAX_MODEL_KEYS = 16
"""Most keys of one list: several signers, each with an old key and a new one."""

_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"

_KINDS = {
    bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004"): 64,
    bytes.fromhex("3076301006072a8648ce3d020106052b8104002203620004"): 96,
    bytes.fromhex("30819b301006072a8648ce3d020106052b810400230381860004"): 132,
    bytes.fromhex("302a300506032b6570032100"): 32,
}
"""What a key begins with in DER (RFC 5480, RFC 8410), and the bytes that follow: P-256, P-384, P-521, Ed25519."""


def _checked(text: str) -> str:
    """Return a key as one line of base64.

    Raises:
        ValueError: it has the form of none.
    """
    bare = "".join(text.replace(_BEGIN, "").replace(_END, "").split())
    try:
        data = base64.b64decode(bare, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not any(data.startswith(begin) and len(data) == len(begin) + rest for begin, rest in _KINDS.items()):
        raise ValueError(
            "not a public key: a PEM text (BEGIN PUBLIC KEY), or its base64 in one line, of ECDSA over P-256, P-384 or "
            "P-521, or of Ed25519"
        )
    return base64.b64encode(data).decode()


ModelKey = Annotated[str, AfterValidator(_checked)]
"""A public key of someone who signs models, in one line."""
