"""Root key: 32 random bytes in a file, under which the tenants' keys are wrapped.

Under systemd the file is a credential (``LoadCredential=root-key:PATH``; systemd.exec(5)), which the service can read
but not change. With a TPM2 the operator encrypts it once (``systemd-creds encrypt --with-key=tpm2``) and names it by
``LoadCredentialEncrypted=``; systemd decrypts it before the service starts, so this code does not change. Without
systemd it is a file of mode 0600.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from isolation.host.atomic_file import sync_folder
from isolation.keys.errors import KeyringError, RootKeyError
from isolation.keys.files import read_private

ROOT_KEY_BYTES = 32
"""Length of the root key (AES-256)."""

EVERYBODY = 0o007
"""Permission bits that a root key must not have. Group bits may be set on a systemd credential, where they represent an
access list; its folder excludes all other users."""


def read_root(path: Path) -> bytes:
    """Read the root key.

    Raises:
        RootKeyError: it is absent, of another length, or accessible to others.
    """
    try:
        key = read_private(path, 2 * ROOT_KEY_BYTES, EVERYBODY)
    except FileNotFoundError:
        raise RootKeyError(f"there is no root key at {path}", hint="make one with: athanor tenant root PATH") from None
    except KeyringError as error:
        raise RootKeyError(str(error)) from None
    except OSError as error:
        raise RootKeyError(f"cannot read the root key {path}: {error.strerror}") from error
    if len(key) != ROOT_KEY_BYTES:
        raise RootKeyError(
            f"the root key {path} has {len(key)} bytes instead of {ROOT_KEY_BYTES} random ones",
            hint="make one with: athanor tenant root PATH",
        )
    return key


def create_root(path: Path) -> None:
    """Create a root key unless the file exists.

    Raises:
        RootKeyError: the file exists already, or cannot be written.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RootKeyError(
            f"there is a file at {path} already; a new root key makes every tenant's key unreadable",
            hint="remove it first if that is what you want",
        ) from None
    except OSError as error:
        raise RootKeyError(f"cannot make {path}: {error.strerror}") from error
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_bytes(ROOT_KEY_BYTES))
        file.flush()
        os.fsync(fd)
    sync_folder(path.parent)
