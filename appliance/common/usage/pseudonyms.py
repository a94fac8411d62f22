"""Names of end users as the usage book and the audit log have them: pseudonyms under a key of their tenant. Pure.

A name is hashed where it comes in (``name_digest``), and again under its tenant's key before it is written anywhere
(``pseudonym``). The key lies in the usage book alone and is destroyed with what the tenant's end users used, so that
pseudonyms in the log lead to nobody any more. Who has key and name finds the row.
"""

from __future__ import annotations

import hashlib

PERSON = b"athanor-user-nam"
"""Domain of the digest of a name; 16 bytes, BLAKE2b's limit."""

PERSON_KEYED = b"athanor-user-row"
"""Domain of the pseudonym."""

DIGEST_BYTES = 16
"""Bytes of a digest and of a pseudonym: two names never have one."""

KEY_BYTES = 32

OTHERS = "others"
"""Name of the row of all end users beyond the bound; no pseudonym is one."""


def name_digest(name: str) -> str:
    """Return the digest of an end user's name in hex."""
    said = name.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES, person=PERSON).hexdigest()


def pseudonym(key: bytes, digest: str) -> str:
    """Return the pseudonym of an end user, by the digest of its name, under its tenant's key."""
    return hashlib.blake2b(digest.encode(), key=key, digest_size=DIGEST_BYTES, person=PERSON_KEYED).hexdigest()
