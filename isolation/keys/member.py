"""Keys of one host as a member of a fleet: X25519 to which keys are wrapped, Ed25519 by which it signs what it says.

Both are in one file of ``MEMBER_FILE_BYTES``, the private key of X25519 first and the seed of Ed25519 after it. Under
systemd the file is a credential of the supervisor, like the root key.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from isolation.host.atomic_file import sync_folder
from isolation.keys.errors import KeyringError, KeysError
from isolation.keys.files import read_private
from isolation.keys.hpke import PRIVATE_BYTES, HpkeKey, hpke_key_of
from isolation.keys.root import EVERYBODY
from isolation.keys.signing import SEED_BYTES, SigningKey, key_of

MEMBER_FILE_BYTES = PRIVATE_BYTES + SEED_BYTES


class MemberKeyError(KeysError):
    """The file of a member's keys cannot be used; the message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """Private keys of one member."""

    hpke: HpkeKey
    signing: SigningKey


def read_member_keys(path: Path) -> MemberKeys:
    """Read a member's keys.

    Raises:
        MemberKeyError: the file is missing, of another length, or accessible to others.
    """
    try:
        data = read_private(path, 2 * MEMBER_FILE_BYTES, EVERYBODY)
    except FileNotFoundError:
        raise MemberKeyError(
            f"there are no member's keys at {path}", hint="make them with: athanor fleet member-key HOST --key FILE"
        ) from None
    except KeyringError as error:
        raise MemberKeyError(str(error)) from None
    except OSError as error:
        raise MemberKeyError(f"cannot read the member's keys {path}: {error.strerror}") from error
    if len(data) != MEMBER_FILE_BYTES:
        raise MemberKeyError(
            f"{path} has {len(data)} bytes instead of the {MEMBER_FILE_BYTES} of a member's keys",
            hint="make them with: athanor fleet member-key HOST --key FILE",
        )
    return MemberKeys(hpke_key_of(data[:PRIVATE_BYTES]), key_of(data[PRIVATE_BYTES:]))


def create_member_keys(path: Path) -> MemberKeys:
    """Draw a member's keys into a file that only its owner may read; a file that is there is left as it is.

    Raises:
        MemberKeyError: there is a file already, or it cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise MemberKeyError(f"there is a file at {path} already; the fleet knows this host by its keys") from None
    except OSError as error:
        raise MemberKeyError(f"cannot make {path}: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(MEMBER_FILE_BYTES))
            file.flush()
            os.fsync(fd)
        sync_folder(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)  # Part of a key, which every later try would refuse.
        raise MemberKeyError(f"cannot write {path}: {error.strerror}") from error
    return read_member_keys(path)
