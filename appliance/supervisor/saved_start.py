"""A start from a checkpoint: its image, its file of weights, and how long it may take."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from isolation.errors import CheckpointError
from isolation.gvisor.checkpoint import Checkpoint, Stamp
from isolation.gvisor.spec import Mount, SandboxSpec
from isolation.host.locked_file import LockedFile
from isolation.ipc.weights_names import FILE_NAME, TARGET

log = structlog.get_logger()

PATIENCE_S = 15.0
PATIENCE_FACTOR = 3.0
"""A restored sandbox may take this long and this many times what a cold start took; then it starts cold."""


MOST_BLAMES = 3
"""Times that the base is made again for one sandbox that dies: one that always dies is not helped by more."""


MOST_BROKEN = 256
"""Most broken models that are remembered: four times the models that one appliance serves."""


class CheckpointReader:
    """Reads checkpoints and compares their digests in threads, once for each state of their files since the machine's
    start."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(2, "checkpoint")
        self._sound: dict[str, Stamp] = {}
        """Files of checkpoints that were read and found whole in this life; at most as many as were used."""

    def begin(self, checkpoint: Checkpoint) -> Future[Stamp]:
        """Begin to read a checkpoint; the result is the state of its files that was found whole.

        Raises, by the result:
            CheckpointError: it is damaged or missing.
        """
        return self._readers.submit(self._verify, checkpoint)

    def note(self, checkpoint: Checkpoint, stamp: Stamp) -> None:
        """Note that its files were whole in this state, taken before."""
        self._sound[checkpoint.key] = stamp
        checkpoint.note_whole(stamp)

    def _verify(self, checkpoint: Checkpoint) -> Stamp:
        stamp = checkpoint.stamp()
        if stamp is None:
            raise CheckpointError(f"checkpoint {checkpoint.key[:12]} is gone")
        if self._sound.get(checkpoint.key) != stamp:
            if checkpoint.known_whole(stamp):
                self._sound[checkpoint.key] = stamp
            else:
                checkpoint.verify()
                self.note(checkpoint, stamp)
        return stamp


class BaseTrust:
    """Which sandboxes became ready from the base that all begin with, and which failed with it. A base that served
    another sandbox is not at fault: one that fails with it then begins without, and costs the others nothing. Called in
    threads without a lock: what two of them note at the same time costs at most one checkpoint that is made again."""

    def __init__(self) -> None:
        self._ready: dict[str, set[str]] = {}
        """Names of sandboxes that became ready, by the base's name."""
        self._avoids: dict[str, set[str]] = {}
        """Names of those that begin without it."""
        self._blames: Counter[str] = Counter()
        """How often the base was blamed for the deaths of each sandbox."""

    def note_ready(self, key: str, name: str) -> None:
        """Note that a sandbox began with this base."""
        self._ready.setdefault(key, set()).add(name)

    def is_at_fault(self, key: str, name: str) -> bool:
        """Return whether the base may be why this sandbox failed with it: no other became ready from it. Where one did,
        this sandbox begins without it from now on."""
        if self._ready.get(key, set()) - {name}:
            self._avoids.setdefault(key, set()).add(name)
            return False
        return True

    def is_blamed(self, key: str, name: str) -> bool:
        """Return whether a sandbox that dies again and again has the base dropped: ``MOST_BLAMES`` times at most."""
        if not self.is_at_fault(key, name):
            return False
        self._blames[name] += 1
        return self._blames[name] <= MOST_BLAMES

    def is_avoided(self, key: str, name: str) -> bool:
        """Return whether a sandbox begins without this base."""
        return name in self._avoids.get(key, ())

    def avoiders(self, key: str) -> set[str]:
        """Return the names of the sandboxes that begin without this base."""
        return set(self._avoids.get(key, ()))

    def forget(self, key: str) -> None:
        """Forget a base that is dropped."""
        self._ready.pop(key, None)
        self._avoids.pop(key, None)

    def leave(self, name: str) -> None:
        """Forget a sandbox that has left: another of its name may have other files. What it has shown of a base
        stays."""
        self._blames.pop(name, None)
        for names in list(self._avoids.values()):
            names.discard(name)


class BrokenModels:
    """Models whose sandboxes failed with the base and cold, one right after the other, so that neither start is at
    fault. The next try is spent on the cold start alone, and one that works ends the suspicion. A model is known by the
    digest of its files: mended files are another model. Called in threads without a lock, as ``BaseTrust``."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], None] = {}
        """Digest or name, and role; the oldest go first."""

    def note(self, digest: str, role: str) -> None:
        """Note that both starts failed."""
        self._known[digest, role] = None
        while len(self._known) > MOST_BROKEN:
            with suppress(KeyError, StopIteration, RuntimeError):  # Another thread has noted or removed one.
                del self._known[next(iter(self._known))]

    def forget(self, digest: str, role: str) -> None:
        """Note that it starts."""
        self._known.pop((digest, role), None)

    def knows(self, digest: str, role: str) -> bool:
        """Return whether it failed both ways, and has not started since."""
        return (digest, role) in self._known


@dataclass(frozen=True, slots=True)
class SavedStart:
    """A checkpoint that is being verified while a sandbox is restored from it."""

    checkpoint: Checkpoint
    verdict: Future[Stamp]
    """State of the files that were found whole."""
    with_model: bool = False
    """Whether the model was loaded before it was saved."""

    @property
    def folder(self) -> Path:
        """Folder of its files."""
        return self.checkpoint.folder

    @property
    def patience_s(self) -> float:
        """Seconds after which the start is given up."""
        return PATIENCE_S + PATIENCE_FACTOR * self.checkpoint.cold_s

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the specification of a copy: with the file of weights where the checkpoint has one."""
        return spec if self.weights is None else with_weights(spec, self.folder)

    @property
    def weights(self) -> Path | None:
        """File of weights that copies have mapped; None where their weights are in the image."""
        names = {name for name, _, _ in self.checkpoint.files}
        return self.folder / FILE_NAME if FILE_NAME in names else None

    def lock_weights(self) -> LockedFile | None:
        """Keep the file of weights in memory; None where there is none, or where it cannot be locked: the kernel may
        then drop its pages, which are read from the disk again."""
        try:
            if self.weights is None or not self.weights.stat().st_size:
                return None
            return LockedFile(self.weights)
        except OSError as error:
            log.warning("mapped weights may leave memory, and count as available", problem=str(error))
            return None

    def verified(self) -> None:
        """Wait for the result of the verification, and see that the files are still those that were verified: a
        sandbox has the file of weights mounted before it waits for its turn, and its image is opened behind that. What
        was dropped and made anew meanwhile has its weights at other places.

        Raises:
            CheckpointError: it is damaged, or was replaced since.
        """
        if self.verdict.result() != self.checkpoint.stamp():
            raise CheckpointError(f"checkpoint {self.checkpoint.key[:12]} was replaced while a sandbox was restored")

    def damage(self) -> CheckpointError | None:
        """Wait for the result of the verification; what it has found, or None. That it was replaced is no damage."""
        try:
            self.verdict.result()
        except CheckpointError as error:
            return error
        return None


def with_weights(spec: SandboxSpec, folder: Path) -> SandboxSpec:
    """Return a specification with a checkpoint's file of weights mounted in it."""
    return replace(spec, mounts=(*spec.mounts, Mount(folder / FILE_NAME, TARGET)))
