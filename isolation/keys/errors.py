"""What can go wrong with keys and sealed bytes.

``KeysError``
  * ``RootKeyError``: the root key is absent, malformed or open to others.
  * ``KeyringError``: a tenant's key cannot be read or written.
      * ``ShreddedError``: the tenant's key was destroyed; what it sealed is gone for good.
  * ``SealBrokenError``: sealed bytes are not what was sealed under this name.
"""

from __future__ import annotations

from isolation.errors import IsolationError


class KeysError(IsolationError):
    """Base of all errors of this package."""


class RootKeyError(KeysError):
    """The root key cannot be used."""


class KeyringError(KeysError):
    """A tenant's key cannot be read, unwrapped or written."""


class ShreddedError(KeyringError):
    """A key that was destroyed has come back, from a backup or by hand; it is refused."""


class SealBrokenError(KeysError):
    """Sealed bytes were changed, cut, moved or replayed, or belong to a key that is gone."""
