"""gVisor's ``runsc`` program: its argv (pure), its version, and how to find it.

The reason for each flag was measured or read in gVisor's source, and stands beside the flag.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import ProcessError, RuntimeNotFoundError
from isolation.gpu.bundle_additions import DRIVER_CAPABILITIES
from isolation.gpu.gpu_drivers import CAPABILITIES_SINCE
from isolation.gvisor.bundle import Bundle, Profile
from isolation.host.process import MINIMAL_ENVIRONMENT, run

MIN_VERSION = 20_240_701
"""Release date of the oldest usable runsc: systrap by default, lisafs, a usable nvproxy."""

COMPARES_MOUNTS_SINCE = 20_240_801
"""Release date from which runsc may refuse a restore with other mounts than at the save: an upper bound on the age of
the last release that was tried (20240729) and restores what both have. Later ones compare the two lists."""

SIDECARS_SINCE = 20_260_831
"""Release date from which runsc is an archive: it starts programs from the folder ``gvisor-bin`` beside it, the sentry
among them (google/gvisor, issue 13718)."""

STRICT_SIDECARS_SINCE = 20_260_914
"""Release date from which ``--sidecar-usage-policy=STRICT`` is known to be there."""

SENTRY = Path("gvisor-bin", "gvisor_sentry")
"""A sandbox's kernel, beside a runsc of such a release."""

_VERSION_TIMEOUT_S = 10.0
_HINT = "run `python images/runsc.py --into .venv/bin`, or install the package runsc (Debian 13 or newer)"


@dataclass(frozen=True, slots=True)
class Runsc:
    """A usable runsc."""

    path: Path
    version: int
    """Release date as a number, 20240729 for 2024-07-29."""


def find_runsc(candidates: Sequence[Path] | None = None) -> Runsc:
    """Return the first candidate that runs and is recent enough.

    Args:
        candidates: paths to try; ``default_candidates()`` when None.

    Raises:
        RuntimeNotFoundError: none is; the message says what is wrong with each existing one.
    """
    problems: list[str] = []
    for path in default_candidates() if candidates is None else candidates:
        if not path.exists():
            continue
        try:
            version = read_version(path)
        except (ProcessError, ValueError) as error:
            problems.append(f"{path}: {error}")
            continue
        if problem := _unusable(path, version):
            problems.append(f"{path} is of {version}{problem}")
        else:
            return Runsc(path.absolute(), version)
    nowhere = "beside the interpreter or on the system's path"
    if candidates is not None:
        nowhere = f"at {', '.join(map(str, candidates))}, which the configuration names"
    found = "; ".join(problems) or f"there is none {nowhere}"
    raise RuntimeNotFoundError(f"no usable runsc: {found}", hint=_HINT)


def _unusable(path: Path, version: int) -> str:
    """Why a runsc that runs cannot be used; empty when it can."""
    if version < MIN_VERSION:
        return f", older than {MIN_VERSION}"
    if version < SIDECARS_SINCE:
        return ""
    if sidecars(path) is None:
        return f" and lacks {SENTRY} beside it; unpack the release's whole archive"
    # As root the sentry is started by uid 65534, by its path: what may not be entered ends in "permission denied".
    closed = [parent for parent in path.resolve().parents if not parent.stat().st_mode & stat.S_IXOTH]
    if closed and os.geteuid() == 0:
        return f" and starts its sentry as another user, who may not enter {closed[-1]}; move it, or chmod o+x"
    return ""


def sidecars(runsc: Path) -> Path | None:
    """Return the folder of the programs that a runsc starts; None where a release has none. runsc looks for it beside
    its own file, with links resolved."""
    sentry = runsc.resolve().parent / SENTRY
    return sentry.parent if sentry.exists() else None


def default_candidates() -> tuple[Path, ...]:
    """Return candidates beside the running interpreter (a virtual environment's bin), then the system directories."""
    system = shutil.which("runsc", path=MINIMAL_ENVIRONMENT["PATH"])
    beside = Path(sys.executable).parent / "runsc"
    return (beside, Path(system)) if system else (beside,)


def read_version(path: Path) -> int:
    """Ask a runsc for its release date.

    Raises:
        ProcessError: it does not run.
        ValueError: its output names no version.
    """
    return parse_version(run([os.fspath(path), "--version"], timeout_s=_VERSION_TIMEOUT_S).stdout)


def parse_version(text: str) -> int:
    """Parse the release date from ``runsc --version``: ``release-20250407.0`` or a package's ``0.0~20240729.0``.

    Raises:
        ValueError: there is none.
    """
    match = re.search(r"^runsc version \S*?(20\d{6})(?!\d)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"runsc tells no release date: {text.strip()[:100]!r}")
    return int(match[1])


def container_id(name: str) -> str:
    """Return runsc's id for a sandbox: its name followed by a dot, which no name contains.

    runsc accepts a unique prefix of an id where no exact match exists. Without a terminator, ``delete --force
    engine-chat`` for a sandbox that never started would end ``engine-chat-large``.
    """
    return f"{name}."


def sandbox_of(container: str) -> str:
    """Return the sandbox name for a runsc id: the inverse of ``container_id``."""
    return container.removesuffix(".")


@dataclass(frozen=True, slots=True)
class RunscCommand:
    """Builds the argv of each verb, for one runsc, one state directory and one profile. Pure."""

    runsc: Path
    root: Path
    """Private directory on a local file system for state and control sockets; its path must be short."""
    profile: Profile
    version: int = 0
    """Release date of that runsc as a number; it decides which GPU flags exist."""

    def flags(self, *, gpu: bool = False) -> list[str]:
        """Return the global flags that precede the verb."""
        return [
            os.fspath(self.runsc),
            f"--root={self.root}",
            # KVM hangs on nested machines; gVisor's own advice for virtual machines is systrap.
            "--platform=systrap",
            # The sandbox gets its own loopback device only.
            "--network=none",
            # The guest may connect to a socket on a mount, never bind one there.
            "--host-uds=open",
            # Off: the sandbox process is uid 65534 with no capability and asks the gofer to open files.
            # Impossible with the single uid of our own user namespace, where the process is unprivileged anyway.
            f"--directfs={'false' if self.profile is Profile.ROOT else 'true'}",
            "--file-access=exclusive",
            # All mounts are constant, so caching is safe: stat 9.0 -> 1.7 us, a fifth off the import of torch.
            "--file-access-mounts=exclusive",
            # The root is read-only; an overlay would hide guest writes to shared memory from the host.
            "--overlay2=none",
            # isolation.host.cgroup sets the limits; it also works where runsc's own code would need real root.
            "--ignore-cgroups",
            # A stuck task ends the sandbox instead of hanging it.
            "--watchdog-action=panic",
            # Never the slow copies inside runsc, nor any that it would fetch: what is missing is an error.
            *(["--sidecar-usage-policy=STRICT"] if self.version >= STRICT_SIDECARS_SINCE else ()),
            *(self._gpu_flags() if gpu else ()),
        ]

    def _gpu_flags(self) -> tuple[str, ...]:
        """Return the flags for a sandbox with a GPU. ``--nvproxy-driver-version`` is absent: runsc detects the version
        itself, and would trust a given one. ``--nvproxy-docker`` is absent: no hook of the container toolkit runs."""
        if self.version < CAPABILITIES_SINCE:
            return ("--nvproxy",)
        return ("--nvproxy", f"--nvproxy-allowed-driver-capabilities={DRIVER_CAPABILITIES}")

    def create(self, name: str, bundle: Bundle) -> list[str]:
        """Create the sandbox without starting its program; it inherits this command's stdio."""
        log = [f"--log={bundle.log_file}", "--log-format=json"]
        where = ["--bundle", os.fspath(bundle.path), "--pid-file", os.fspath(bundle.pid_file)]
        return [*self.flags(gpu=bundle.gpu), *log, "create", *where, container_id(name)]

    def start(self, name: str, *, gpu: bool = False) -> list[str]:
        """Start the program of a created sandbox."""
        return [*self.flags(gpu=gpu), "start", container_id(name)]

    def checkpoint(self, name: str, folder: Path) -> list[str]:
        """Write memory and kernel state of a running sandbox into an existing folder, which ends the sandbox."""
        # Uncompressed: a restore then takes a third of the time, and zero pages are left out in any case.
        form = ["--compression=none", "--exclude-committed-zero-pages"]
        return [*self.flags(), "checkpoint", *form, f"--image-path={folder}", container_id(name)]

    def restore(self, name: str, bundle: Bundle, folder: Path) -> list[str]:
        """Restore a checkpoint into a created sandbox, in place of ``start``."""
        what = [f"--bundle={bundle.path}", f"--image-path={folder}"]
        return [*self.flags(gpu=bundle.gpu), "restore", "--detach", *what, container_id(name)]

    def delete(self, name: str) -> list[str]:
        """Kill the sandbox if it runs, and remove its state."""
        return [*self.flags(), "delete", "--force", container_id(name)]
