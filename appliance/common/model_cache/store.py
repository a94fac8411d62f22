"""Cache of models on disk: a folder for each model, named by its digest, whole or not there.

    models/DIGEST/     files as sandboxes get them, the manifest, and a signature where there is one
    notes/DIGEST.json  name, source, pin, last use: what changes
    partial/KEY/       what a pull has so far, seen by pulls alone
    locks/KEY          held by the pull of KEY, by flock(2)
    .lock              held while any of the above is changed

A model is renamed into its place after all of its files were flushed to disk and compared with its manifest. So a
crash at any moment leaves a part below ``partial``, where the next pull goes on, or a whole model. The host hashes
files and never interprets them. A user who may write here decides what is served, up to the digests in athanor.yaml.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from appliance.common.catalog import SIGNATURE
from appliance.common.errors import ModelCacheError, ModelDigestError, ModelSourceError, os_errors_as
from appliance.common.model_cache.eviction import Occupant, choose_evictions
from appliance.common.model_cache.manifest import MANIFEST, MAX_MANIFEST_BYTES, ModelManifest, read_manifest
from appliance.common.model_digests import DigestCache
from isolation.host.atomic_file import sync_folder, write_whole

DIGEST = re.compile(r"[0-9a-f]{64}")

SHORTEST = 6
"""Digits of a digest that are enough to name a model, if no other begins so."""

RESERVE_BYTES = 1 << 30
"""Free bytes that the file system keeps beside a model that is pulled: other services may write there."""

MAX_NOTE_BYTES = 16 << 10
"""Most bytes of a file with notes or a plan."""

FOLDERS = ("models", "notes", "partial", "locks", "trash")

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""Modes of what sandboxes get: their user is no user of this machine."""


@dataclass(frozen=True, slots=True)
class Notes:
    """What is known of a model beside its files."""

    name: str = ""
    source: str = ""
    """Address that it was pulled from, without credentials."""
    pulled: float = 0.0
    """Unix time of the pull."""
    used: float = 0.0
    """Unix time of the last use."""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model of the cache."""

    digest: str
    folder: Path
    manifest: ModelManifest | None
    """None where it cannot be read."""
    notes: Notes
    problem: str = ""

    @property
    def size(self) -> int:
        """Bytes of its files; 0 where they are not known."""
        return 0 if self.manifest is None else self.manifest.size


@dataclass(frozen=True, slots=True)
class PartialModel:
    """What a pull has so far."""

    key: str
    source: str
    size: int
    """Bytes of the whole model, all of which are allocated."""
    used: float
    """Unix time of the last pull of it."""
    running: bool
    """Whether a pull holds it now."""


class ModelCache:
    """One folder of models; several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """Make the folders, if they are not there.

        Raises:
            ModelCacheError: they cannot be made, or belong to another user.
        """
        with _cache_errors(f"cannot use the cache of models {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            if self.folder.stat().st_uid != os.geteuid():
                raise ModelCacheError(
                    f"the cache of models {self.folder} belongs to user id {self.folder.stat().st_uid}, and this is "
                    f"{os.geteuid()}; start athanor-fetch.service, which is that user"
                )
            for name in FOLDERS:
                (self.folder / name).mkdir(exist_ok=True, mode=FOLDER_MODE)

    def model_folder(self, digest: str) -> Path:
        """Folder of a model, there or not."""
        return self.folder / "models" / digest

    def models(self) -> tuple[CachedModel, ...]:
        """All models, by their manifests; other files are not read.

        Raises:
            ModelCacheError: the cache cannot be read.
        """
        return tuple(self._look(name) for name in self._names("models", DIGEST))

    def partials(self) -> tuple[PartialModel, ...]:
        """What broken and running pulls have.

        Raises:
            ModelCacheError: the cache cannot be read.
        """
        return tuple(self._look_partial(key) for key in self._names("partial", DIGEST))

    def find(self, text: str) -> CachedModel:
        """The model with this digest, this beginning of a digest, or this name.

        Raises:
            ModelCacheError: there is none, or there are several.
        """
        found = [
            one
            for one in self.models()
            if one.notes.name == text or (len(text) >= SHORTEST and one.digest.startswith(text))
        ]
        if len(found) == 1:
            return found[0]
        many = f"several models of the cache are called {text}; name one by its digest"
        raise ModelCacheError(
            many if found else f"there is no model {text} in the cache; `athanor model list` shows all"
        )

    def has(self, digest: str) -> bool:
        """Whether this model is there, whole."""
        return (self.model_folder(digest) / MANIFEST).is_file()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock under which the cache changes; others wait, for moments.

        Raises:
            ModelCacheError: the lock cannot be made.
        """
        with _cache_errors(f"cannot change the cache of models {self.folder}"):
            fd = _open_lock(self.folder / ".lock")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def pulling(self, key: str) -> Iterator[Path | None]:
        """Hold the folder of a partial model while the block runs: the folder, or None where another pull holds it."""
        path = self.folder / "locks" / key
        with _cache_errors(f"cannot pull into {self.folder}"):
            fd = _open_lock(path)
        try:
            held = _try_lock(fd) and _names_same(fd, path)
            if not held:
                yield None
                return
            place = self.folder / "partial" / key
            with _cache_errors(f"cannot pull into {self.folder}"):
                place.mkdir(exist_ok=True, mode=0o700)
            yield place
            if not place.exists():
                # Removed while it is held: a pull that opened it meanwhile sees that its lock is no longer this file.
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def make_room(self, key: str, source: str, size: int, limit: int, kept: frozenset[str]) -> tuple[str, ...]:
        """Reserve room for a model whose pull is held, and give the digests of the models that left for it.

        Args:
            key: of the partial model.
            source: its address, without credentials.
            size: bytes of the model.
            limit: most bytes of the cache; 0: the disk's.
            kept: digests of models that stay.

        Raises:
            ModelCacheError: no room can be made.
        """
        with self.changing():
            others = [one for one in self._occupants(kept) if one.key != key]
            plan = {"source": source, "size": size, "used": time.time()}
            disk = os.statvfs(self.folder)
            allocated = _allocated(self.folder / "partial" / key)
            excess = size - allocated - (disk.f_bavail * disk.f_frsize - RESERVE_BYTES)
            if limit:
                excess = max(excess, sum(one.size for one in others) + size - limit)
            chosen = choose_evictions(others, excess)
            if chosen is None:
                raise ModelCacheError(
                    f"the model has {size} bytes, and {max(excess, 0)} too few are free in {self.folder}"
                    f"{f' with its limit of {limit}' if limit else ''}; remove or unpin models (athanor model list), "
                    f"raise model_cache.max_bytes, or free the disk"
                )
            for one in chosen:
                self._discard(one)
            write_whole(self.folder / "partial" / key / "plan.json", json.dumps(plan).encode())
        self.empty_trash()
        return chosen

    def commit(self, key: str, manifest: ModelManifest, notes: Notes, signature: bytes | None = None) -> CachedModel:
        """Put a model whose files below ``partial`` are whole and compared into its place, with its signature.

        Raises:
            ModelCacheError: it cannot be moved.
        """
        draft = self.folder / "partial" / key / "files"
        target = self.model_folder(manifest.digest)
        with _cache_errors(f"cannot put a model into {self.folder}"):
            write_whole(draft / MANIFEST, manifest.text(), FILE_MODE)
            if signature is not None:
                write_whole(draft / SIGNATURE, signature, FILE_MODE)
            _publish(draft)
        with self.changing():
            self._note(manifest.digest, notes)
            if not self.has(manifest.digest):
                draft.rename(target)
                sync_folder(target.parent)
            self._discard(key, ("partial",))
        self.empty_trash()
        return self._look(manifest.digest)

    def sign(self, digest: str, signature: bytes) -> None:
        """Put a signature beside a model that is there, in place of an older one. Whose it is, is not looked at.

        Raises:
            ModelCacheError: it cannot be written.
        """
        with self.changing():
            write_whole(self.model_folder(digest) / SIGNATURE, signature, FILE_MODE)

    def note(self, digest: str, change: Callable[[Notes], Notes]) -> Notes:
        """Change what is noted of a model.

        Raises:
            ModelCacheError: there is no such model, or it cannot be written.
        """
        with self.changing():
            if not self.has(digest):
                raise ModelCacheError(f"there is no model {digest} in the cache; `athanor model list` shows all")
            notes = change(self._notes(digest))
            self._note(digest, notes)
        return notes

    def remove(self, key: str) -> None:
        """Remove a model, or what a broken pull has left: out of sight at once, then file by file.

        Raises:
            ModelCacheError: it cannot be removed, or a pull holds it.
        """
        if any(one.key == key and one.running for one in self.partials()):
            raise ModelCacheError(f"{key[:16]} is being pulled; end that pull first")
        with self.changing():
            self._discard(key)
        self.empty_trash()

    def verify(self, model: CachedModel, on_read: Callable[[int], None] | None = None) -> None:
        """Read all files of a model and compare them with its manifest.

        Raises:
            ModelDigestError: the manifest or a file is not what was pulled, or there is one more.
        """
        mend = f"athanor model remove {model.digest[:16]}, then pull it again"
        if model.manifest is None or model.manifest.digest != model.digest:
            raise ModelDigestError(f"{model.folder}: {model.problem or 'its manifest has another digest'}; {mend}")
        known = {file.name for file in model.manifest.files} | {MANIFEST}
        with os_errors_as(f"cannot read {model.folder}"):
            there = {str(path.relative_to(model.folder)) for path in model.folder.rglob("*") if not _is_folder(path)}
            if there - {SIGNATURE} != known:
                odd = ", ".join(sorted((there - {SIGNATURE}) ^ known)[:3])
                raise ModelDigestError(f"{model.folder} has a file more or less than was pulled: {odd}; {mend}")
            for file in model.manifest.files:
                check_file(model.folder / file.name, file.sha256, on_read, mend)

    def empty_trash(self) -> None:
        """Delete what was removed; what a crash left there as well."""
        for path in (self.folder / "trash").iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def _occupants(self, kept: frozenset[str]) -> Iterator[Occupant]:
        for model in self.models():
            stays = model.notes.pinned or model.digest in kept
            yield Occupant(model.digest, model.size, model.notes.used, kept=stays)
        for part in self.partials():
            yield Occupant(part.key, part.size, part.used, kept=part.running)

    def _discard(self, key: str, kinds: tuple[str, ...] = ("models", "partial")) -> None:
        """Take a model, its part, or both out of sight. The caller holds the lock."""
        for kind in kinds:
            place = self.folder / kind / key
            if place.exists():
                place.rename(self.folder / "trash" / f"{kind}-{key}-{time.time_ns()}")
                sync_folder(place.parent)
        if "models" in kinds:
            (self.folder / "notes" / f"{key}.json").unlink(missing_ok=True)

    def _names(self, kind: str, pattern: re.Pattern[str]) -> list[str]:
        with _cache_errors(f"cannot read {self.folder}"):
            try:
                return sorted(entry.name for entry in os.scandir(self.folder / kind) if pattern.fullmatch(entry.name))
            except FileNotFoundError:
                return []

    def _look(self, digest: str) -> CachedModel:
        folder, notes = self.model_folder(digest), self._notes(digest)
        try:
            manifest = read_manifest(_read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES + 1), str(folder))
        except (OSError, ModelSourceError) as error:
            return CachedModel(digest, folder, None, notes, str(error))
        return CachedModel(digest, folder, manifest, notes)

    def _look_partial(self, key: str) -> PartialModel:
        try:
            plan = json.loads(_read_bounded(self.folder / "partial" / key / "plan.json", MAX_NOTE_BYTES))
            source, size, used = str(plan["source"]), int(plan["size"]), float(plan["used"])
        except (OSError, ValueError, LookupError, TypeError):
            source, size, used = "", 0, 0.0
        return PartialModel(key, source, size, used, running=self._is_held(key))

    def _is_held(self, key: str) -> bool:
        try:
            fd = os.open(self.folder / "locks" / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _notes(self, digest: str) -> Notes:
        """What is noted; nothing where the file is missing or spoilt, which costs a name and a pin."""
        try:
            values = json.loads(_read_bounded(self.folder / "notes" / f"{digest}.json", MAX_NOTE_BYTES))
            return Notes(
                name=str(values["name"]),
                source=str(values["source"]),
                pulled=float(values["pulled"]),
                used=float(values["used"]),
                pinned=bool(values["pinned"]),
            )
        except (OSError, ValueError, LookupError, TypeError):
            return Notes()

    def _note(self, digest: str, notes: Notes) -> None:
        write_whole(self.folder / "notes" / f"{digest}.json", json.dumps(asdict(notes)).encode(), FILE_MODE)


def check_file(path: Path, sha256: str, on_read: Callable[[int], None] | None, mend: str) -> None:
    """Read a file and compare its digest.

    Raises:
        ModelDigestError: it is another.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ModelDigestError(f"{path} is no file; {mend}")
    found = DigestCache(on_read=on_read).hash(path).digest.hex()
    if found != sha256:
        raise ModelDigestError(f"{path} has the digest {found}, and the manifest says {sha256}; {mend}")


def used_now(notes: Notes) -> Notes:
    """Notes of a model that is used now."""
    return replace(notes, used=time.time())


@contextlib.contextmanager
def _cache_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelCacheError(f"{problem}: {(error.strerror or str(error)).lower()}") from error


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _names_same(fd: int, path: Path) -> bool:
    """Whether the path still names the file that was opened: its holder may have removed it in between."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _allocated(folder: Path) -> int:
    """Bytes on disk of what is below a folder."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


def _publish(draft: Path) -> None:
    """Make files and folders readable for all, and flush them to disk."""
    for path in (draft, *draft.rglob("*")):
        path.chmod(FOLDER_MODE if _is_folder(path) else FILE_MODE)
    for path in (*(one for one in draft.rglob("*") if _is_folder(one)), draft):
        sync_folder(path)


def _read_bounded(path: Path, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit)
