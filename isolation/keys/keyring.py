"""Keyring: one random key-encryption key (KEK) for each tenant, wrapped under the root key, one small file each.

A KEK is drawn, never derived: what can be derived again cannot be destroyed. Destroying it (``shred``) makes everything
sealed under it unreadable, wherever copies exist (crypto-shredding, NIST SP 800-88 rev. 1, 2.6). The identifier of a
destroyed KEK stays in ``shredded``, so that a wrapped key restored from a backup is refused.

A file is ``magic 8, KEK id 16, nonce 12, AES-256-GCM-SIV(KEK) 48`` (RFC 8452: a nonce drawn twice would cost nothing
but equality), with the tenant's name and the id as associated data: renamed, swapped or changed files do not unwrap.
Sizes are checked before anything is read, and nothing is used before it is authenticated.

All methods may be called from any thread. One process has a keyring open at a time (``flock`` on the folder).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isolation.host.atomic_file import sync_folder, write_whole
from isolation.keys.errors import KeyringError, ShreddedError
from isolation.keys.files import destroy, overwrite, read_private
from isolation.keys.root import ROOT_KEY_BYTES

KEK_BYTES = 32
KEK_ID_BYTES = 16

_MAGIC = b"ATHKEK\x00\x01"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_FILE_BYTES = len(_MAGIC) + KEK_ID_BYTES + _NONCE_BYTES + KEK_BYTES + _TAG_BYTES
KEK_ENDING = ".kek"
_SHREDDED = "shredded"
_TENANT = re.compile(r"(group/)?[a-z0-9][a-z0-9-]{0,62}")
"""A tenant's id as in the policy, or ``group/ID`` for what a sharing group's members send. Both are safe in a file's
name, where a point stands for the slash: no id contains one."""

MAX_SHREDDED_BYTES = 64 << 20
"""Bytes of the list of destroyed ids, 34 each: two million."""


@dataclass(frozen=True, slots=True)
class _Kek:
    """A tenant's key. ``key`` is overwritten on shred or rotation."""

    id: bytes
    key: bytearray

    def __repr__(self) -> str:
        return f"_Kek({self.id.hex()[:8]})"


class Keyring:
    """Keys in one folder, which belongs exclusively to this process while it is open."""

    def __init__(self, folder: Path, root: bytes) -> None:
        """Open a folder, created if absent.

        Raises:
            KeyringError: another process has it open, others may access it, or it cannot be used.
        """
        if len(root) != ROOT_KEY_BYTES:
            raise KeyringError(f"a root key has {ROOT_KEY_BYTES} bytes, not {len(root)}")
        self._folder = folder
        self._cipher = AESGCMSIV(root)
        self._lock = threading.Lock()
        self._keks: dict[str, _Kek] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise KeyringError(f"cannot use the keyring {folder}: {error.strerror}") from error
        try:
            if os.fstat(self._fd).st_mode & 0o077:
                raise KeyringError(f"the keyring {folder} is open to others", hint=f"chmod 0700 '{folder}'")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._destroyed = self._read_destroyed()
        except OSError as error:
            os.close(self._fd)
            raise KeyringError(
                f"another process has the keyring {folder} open", hint="give the command to the running appliance"
            ) from error
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Overwrite the keys in memory and release the folder. Idempotent."""
        with self._lock:
            for kek in self._keks.values():
                _blank(kek)
            self._keks.clear()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def derive(self, tenant: str, salt: bytes, info: bytes, secret: bytes = b"") -> tuple[bytes, bytes]:
        """Derive a 256-bit key for one object (HKDF-SHA256, RFC 5869); return it with the id of its KEK.

        The KEK itself never leaves this module. If the tenant has none, one is drawn and written to disk first.

        Args:
            tenant: whose KEK.
            salt: differs for every object.
            info: what the key is for.
            secret: additional key material beside the KEK, which must also be known.

        Raises:
            KeyringError: its file was changed, belongs to another root key, or cannot be written.
            ShreddedError: its file holds a key that was destroyed.
        """
        _check(tenant)
        with self._lock:
            if self._fd < 0:
                raise KeyringError("the keyring is closed")
            kek = self._keks.get(tenant) or self._read(tenant) or self._draw(tenant)
            self._keks[tenant] = kek
            hkdf = HKDF(algorithm=SHA256(), length=KEK_BYTES, salt=salt, info=info)
            return kek.id, hkdf.derive(bytes(kek.key) + secret)

    def key_id(self, tenant: str) -> bytes | None:
        """Return the id of the tenant's KEK; None when it has none. None is drawn.

        Raises:
            KeyringError: its file was changed, or belongs to another root key.
            ShreddedError: its file holds a key that was destroyed.
        """
        _check(tenant)
        with self._lock:
            if self._fd < 0:
                raise KeyringError("the keyring is closed")
            kek = self._keks.get(tenant) or self._read(tenant)
            if kek is None:
                return None
            self._keks[tenant] = kek
            return kek.id

    def tenants(self) -> list[str]:
        """Return the tenants that have a key, sorted."""
        names = (path.name.removesuffix(KEK_ENDING).replace(".", "/") for path in self._folder.glob(f"*{KEK_ENDING}"))
        return sorted(name for name in names if _TENANT.fullmatch(name))

    def rotate(self, tenant: str) -> None:
        """Give the tenant a new KEK and destroy the old one; what the old one sealed is lost, and KV is recomputed.

        Raises:
            KeyringError: as ``derive`` and ``shred``.
        """
        self.shred(tenant)
        with self._lock:
            self._keks[tenant] = self._draw(tenant)

    def rewrap(self, root: bytes) -> int:
        """Rewrap every tenant's KEK under another root key, which this keyring uses from then on; return their number.

        After a crash, a repeated call on a keyring opened with the old root key resumes: files that the new root key
        already unwraps are left unchanged.

        Raises:
            KeyringError: a file belongs to neither root key; files before it are rewrapped.
        """
        if len(root) != ROOT_KEY_BYTES:
            raise KeyringError(f"a root key has {ROOT_KEY_BYTES} bytes, not {len(root)}")
        with self._lock:
            old, new = self._cipher, AESGCMSIV(root)
            try:
                count = sum(self._move(tenant, old, new) for tenant in self.tenants())
            except BaseException:
                # With the old root key kept, the next attempt resumes; with the new one, the remaining files would not
                # open.
                self._cipher = old
                raise
            self._cipher = new
        return count

    def shred(self, tenant: str) -> bool:
        """Destroy the tenant's key in memory and on disk; False when there was none.

        A file that cannot be unwrapped is destroyed as well.

        Raises:
            KeyringError: the disk write failed; the key in memory is already gone.
        """
        _check(tenant)
        path = self._path(tenant)
        with self._lock:
            kek = self._keks.pop(tenant, None)
            if kek is not None:
                _blank(kek)
            try:
                found = self._id_in(path)
                if found is not None:
                    self._note_destroyed(found)
                return destroy(path) or kek is not None
            except OSError as error:
                raise KeyringError(f"cannot destroy {path}: {error.strerror}") from error

    def _move(self, tenant: str, old: AESGCMSIV, new: AESGCMSIV) -> bool:
        """Wrap one tenant's KEK under another root key; False when it already is."""
        try:
            self._cipher = new
            self._read(tenant)
        except KeyringError:
            self._cipher = old
            kek = self._read(tenant)
            if kek is not None:
                self._cipher = new
                self._write(tenant, kek)
            return kek is not None
        return False

    def _read(self, tenant: str) -> _Kek | None:
        path = self._path(tenant)
        try:
            data = read_private(path, _FILE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KeyringError(f"cannot read {path}: {error.strerror}") from error
        if len(data) != _FILE_BYTES or not data.startswith(_MAGIC):
            raise KeyringError(f"{path} is no wrapped key")
        kek_id = data[len(_MAGIC) :][:KEK_ID_BYTES]
        if kek_id in self._destroyed:
            raise ShreddedError(
                f"{path} holds a key of {tenant} that was destroyed", hint=f"athanor tenant shred {tenant} removes it"
            )
        nonce = data[len(_MAGIC) + KEK_ID_BYTES :][:_NONCE_BYTES]
        try:
            key = self._cipher.decrypt(nonce, data[-KEK_BYTES - _TAG_BYTES :], _bound(tenant, kek_id))
        except InvalidTag:
            raise KeyringError(
                f"{path} was changed, or wrapped under another root key",
                hint=f"put the right root key back, or give the tenant a new key: athanor tenant shred {tenant}",
            ) from None
        return _Kek(kek_id, bytearray(key))

    def _draw(self, tenant: str) -> _Kek:
        kek = _Kek(secrets.token_bytes(KEK_ID_BYTES), bytearray(secrets.token_bytes(KEK_BYTES)))
        self._write(tenant, kek)
        return kek

    def _write(self, tenant: str, kek: _Kek) -> None:
        """Write a wrapped key; the replaced file is overwritten after it has lost its name."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = self._cipher.encrypt(nonce, bytes(kek.key), _bound(tenant, kek.id))
        path = self._path(tenant)
        try:
            with ExitStack() as stack:
                before = None
                if path.exists():
                    before = stack.enter_context(path.open("rb+"))
                write_whole(path, _MAGIC + kek.id + nonce + wrapped)
                if before is not None:
                    overwrite(before.fileno())
        except OSError as error:
            raise KeyringError(f"cannot write {path}: {error.strerror}") from error

    def _id_in(self, path: Path) -> bytes | None:
        """Return the id in a wrapped key's file, if there is one."""
        with suppress(KeyringError, FileNotFoundError):
            data = read_private(path, _FILE_BYTES)
            if len(data) == _FILE_BYTES:
                return data[len(_MAGIC) :][:KEK_ID_BYTES]
        return None

    def _read_destroyed(self) -> set[bytes]:
        try:
            text = read_private(self._folder / _SHREDDED, MAX_SHREDDED_BYTES).decode("ascii", "replace")
        except FileNotFoundError:
            return set()
        known = set()
        for line in text.splitlines():
            if re.fullmatch(rf"[0-9a-f]{{{2 * KEK_ID_BYTES}}}", line):
                known.add(bytes.fromhex(line))
        return known

    def _note_destroyed(self, kek_id: bytes) -> None:
        self._destroyed.add(kek_id)
        path = self._folder / _SHREDDED
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Start on a new line, even after one that a full disk has truncated.
            line = b"\n" + kek_id.hex().encode() + b"\n"
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self._folder)

    def _path(self, tenant: str) -> Path:
        return self._folder / (tenant.replace("/", ".") + KEK_ENDING)


def _check(tenant: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise KeyringError(f"{tenant[:64]!r} is no tenant id")


def _bound(tenant: str, kek_id: bytes) -> bytes:
    name = tenant.encode()
    return b"athanor-kek" + len(name).to_bytes(2, "little") + name + kek_id


def _blank(kek: _Kek) -> None:
    kek.key[:] = bytes(len(kek.key))
