"""Errors of keys and of sealed bytes.

``KeysError``
  * ``RootKeyError``: the root key is absent, malformed or accessible to others.
  * ``KeyringError``: a tenant's key cannot be read or written.
      * ``ShreddedError``: the tenant's key was destroyed; what it sealed is permanently unreadable.
  * ``SealBrokenError``: sealed bytes are not what was sealed under this name.
  * ``SigningKeyError`` (in ``signing``): a signing key file cannot be used.
  * ``MemberKeyError`` (in ``member``): the file of a member's keys cannot be used.
  * ``PublicKeyError`` (in ``public_key``): a text is no public key of a kind that is used here.
"""

from __future__ import annotations

from isolation.errors import IsolationError


class KeysError(IsolationError):
    """Base class of all errors of this package."""


class RootKeyError(KeysError):
    """The root key cannot be used."""


class KeyringError(KeysError):
    """A tenant's key cannot be read, unwrapped or written."""


class ShreddedError(KeyringError):
    """A destroyed key has reappeared, from a backup or by hand, and is refused."""


class SealBrokenError(KeysError):
    """Sealed bytes were changed, truncated, moved or replayed, or their key is gone."""
