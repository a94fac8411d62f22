"""The machine's images, each in a folder that has its digest as name; added whole, checked while they are copied.

A user who may write here decides what sandboxes run, up to the pin and to the signatures: the folder is root's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError, os_errors_as, reason_of
from appliance.common.image.signature import check_signed, signers
from appliance.common.lock import exclusive
from appliance.common.signature_lines import MAX_BYTES as MAX_SIGNATURE_BYTES
from isolation.errors import ImageError
from isolation.image.manifest import (
    DIGEST,
    MANIFEST,
    MAX_LIST_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_SBOM_BYTES,
    SBOM,
    SIGNATURES,
    Entry,
    Manifest,
    list_place,
    read_bounded,
    read_list,
    read_manifest,
)
from isolation.image.rootfs import verify_image

MAX_IMAGE_BYTES = 64 << 30
"""Most bytes of the files of one image; a CUDA build has some 6 GB."""

CHUNK_BYTES = 4 << 20

DRAFT = ".draft-"
"""Begins the name of an image that is being copied; what a crash leaves is removed by the next one."""

LOCK = ".lock"
"""File that a command holds while it changes the store."""

SHORTEST = 6
"""Digits of a digest that are enough for a person to name an image, if no other begins so."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One image of the store."""

    path: Path
    digest: str
    manifest: Manifest | None
    """None where it cannot be read."""
    signed_by: tuple[str, ...] = ()
    problem: str = ""


def list_images(store: Path) -> tuple[Stored, ...]:
    """What is in the store, by its manifests; files are not read.

    Raises:
        ConfigError: the store cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(store) if DIGEST.fullmatch(entry.name))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"cannot read {store}: {reason_of(error)}") from error
    return tuple(_look(store / name) for name in names)


def _look(path: Path) -> Stored:
    try:
        manifest, _ = read_manifest(path)
        if manifest.digest != path.name:
            raise ImageError(f"{path} has the digest {manifest.digest}", path)
        return Stored(path, path.name, manifest, signers(path))
    except ImageError as error:
        return Stored(path, path.name, None, problem=str(error))


def find(store: Path, name: str) -> Stored:
    """The image whose digest begins so.

    Raises:
        ConfigError: none does, or several do.
    """
    found = [one for one in list_images(store) if len(name) >= SHORTEST and one.digest.startswith(name)]
    if len(found) == 1:
        return found[0]
    many = f"{len(found)} images in {store} begin with {name}" if found else f"there is no image {name} in {store}"
    raise ConfigError(f"{many}; `athanor image list` shows what is there, and {SHORTEST} digits are the fewest")


def add(store: Path, image: Path, keys: tuple[str, ...] = ()) -> Manifest:
    """Copy an image into the store. Its files are compared with its lists on the way; nothing that is not on a list
    comes along, no link is followed, and it is under its name whole or not at all.

    Args:
        keys: when there are any, one of them must have signed it.

    Raises:
        ImageError: it is no image, it was changed, or it is not signed.
        ConfigError: it cannot be written.
        StartError: another command changes the store.
    """
    manifest, data = read_manifest(image)
    if manifest.size > MAX_IMAGE_BYTES:
        raise ImageError(f"{image} has more than {MAX_IMAGE_BYTES} bytes", image, hint="do not run it")
    if keys:
        check_signed(image, manifest, keys)
    target, draft = store / manifest.digest, store / f"{DRAFT}{manifest.digest}"
    with os_errors_as(f"cannot copy {image} into {store}"):
        store.mkdir(parents=True, exist_ok=True, mode=0o755)
        with exclusive(store / LOCK, f"the store {store}"), _drafts_removed(store):
            draft.mkdir(mode=0o755)
            draft.chmod(0o755)
            _copy(image, draft, manifest, data)
            verify_image(draft)
            if target.exists():
                _replace_signatures(draft, target)
            else:
                os.sync()
                draft.rename(target)
    return manifest


@contextlib.contextmanager
def _drafts_removed(store: Path) -> Iterator[None]:
    """Without what an earlier run left half done; and without what this one leaves."""
    for draft in store.glob(f"{DRAFT}*"):
        _delete(draft)
    try:
        yield
    finally:
        for draft in store.glob(f"{DRAFT}*"):
            with contextlib.suppress(OSError):
                _delete(draft)


def _delete(draft: Path) -> None:
    """Delete an image; of one that a package brought, the link alone."""
    if draft.is_symlink():
        draft.unlink()
    else:
        shutil.rmtree(draft)


def _replace_signatures(draft: Path, target: Path) -> None:
    """The image was there: what is new can only be who signed it."""
    verify_image(target)
    if (draft / SIGNATURES).exists():
        (draft / SIGNATURES).replace(target / SIGNATURES)


def remove(store: Path, digest: str) -> None:
    """Remove an image; out of sight at once, then file by file.

    Raises:
        ConfigError: it cannot be removed.
        StartError: another command changes the store.
    """
    problem = f"cannot remove {store / digest}"
    with os_errors_as(problem), exclusive(store / LOCK, f"the store {store}"), _drafts_removed(store):
        (store / digest).rename(store / f"{DRAFT}{digest}")


def _copy(image: Path, draft: Path, manifest: Manifest, data: bytes) -> None:
    limits = {SBOM: MAX_SBOM_BYTES, SIGNATURES: MAX_SIGNATURE_BYTES}
    limits |= {list_place(image, name).name: MAX_LIST_BYTES for name in manifest.roles}
    assert len(data) <= MAX_MANIFEST_BYTES, "it was read bounded"
    _write(draft / MANIFEST, data)
    for name, limit in limits.items():
        if name != SIGNATURES or (image / name).exists():
            _write(draft / name, read_bounded(image / name, limit))
    left = manifest.size
    for name, role in manifest.roles.items():
        (draft / name).mkdir()
        (draft / name).chmod(0o755)
        for entry in read_list(image, name, role):
            if entry.digest:
                left -= _copy_file(image / name, draft / name, entry, left)
            else:
                (draft / name / entry.path).mkdir()
                (draft / name / entry.path).chmod(entry.mode)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o644)


def _copy_file(source: Path, target: Path, entry: Entry, limit: int) -> int:
    """Copy one file and compare what was read; gives its size."""
    place = source / entry.path
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    digest, size = hashlib.sha256(), 0
    with os.fdopen(fd, "rb") as file, (target / entry.path).open("xb") as copy:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ImageError(f"{place} is no file", place, hint="do not run the image")
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            if size > limit:
                raise ImageError(f"the files of {source} are larger than its manifest says", place)
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != entry.digest:
        raise ImageError(f"{place} is not what the image was built with", place, hint="do not run the image")
    (target / entry.path).chmod(entry.mode)
    return size
