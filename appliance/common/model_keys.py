"""Keys of the configuration that must have signed models."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

MAX_MODEL_KEYS = 16
"""Most keys of one list: several signers, each with an old key and a new one."""


def _checked(text: str) -> str:
    """Return a key as one line of base64.

    Raises:
        ValueError: it is none.
    """
    # Configurations without such keys, which is most, do not load the library.
    from isolation.keys.public_key import PublicKeyError, public_key_of

    try:
        return public_key_of(text).line
    except PublicKeyError as error:
        raise ValueError(str(error)) from None


ModelKey = Annotated[str, AfterValidator(_checked)]
"""A public key of someone who signs models, in one line."""
