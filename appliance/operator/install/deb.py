"""A Debian package of the same files that ``athanor install`` writes; needs ``dpkg-deb``.

Everything lies in ``/usr/lib/athanor``, a virtual environment over the system's Python: our packages, what they need,
``runsc``, the embedded model. Two builds from the same files give the same bytes (``SOURCE_DATE_EPOCH``, fixed modes
and owners, hash-checked bytecode).
"""

from __future__ import annotations

import compileall
import hashlib
import os
import py_compile
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import typer

import appliance
from appliance.common.catalog import embedded_model
from appliance.common.errors import ConfigError
from appliance.common.image.check import check_fits
from appliance.common.image.signature import signers
from appliance.common.image.store import LOCK, add
from appliance.common.version import VERSION
from appliance.operator.install import share
from appliance.operator.install.closure import package_files, requirement_closure
from appliance.operator.install.packaged_image import KEYS, PLACE
from appliance.operator.install.rendering import PACKAGE_PLACE, SHIPPED_COMMAND, render
from appliance.operator.install.sources import document_folder, read_sources, source_folder
from isolation.errors import ImageError, ProcessError, RuntimeNotFoundError
from isolation.gvisor.runsc import find_runsc, sidecars
from isolation.host.process import MINIMAL_ENVIRONMENT, run

HOME = "usr/lib/athanor"
"""The virtual environment, below the root."""

OUR_PACKAGES = ("appliance", "engine", "isolation", "policy")

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

COMMAND = f"""\
#!/{HOME}/bin/python3 -I
import sys

from appliance.operator.cli.app import main

sys.exit(main())
"""

SHARED_BYTES = 1 << 20
"""Bytes from which on a file of the image that is in the package twice is stored once: torch is most of both."""

BUILD_S = 1800.0
"""Longest that packing may take: a gigabyte of libraries at a few megabytes a second."""

SERVED = ("appliance.operator.cli.app", "appliance.gateway.process", "appliance.supervisor.service", "uvloop")
"""What the services import; the sandboxes' packages are checked when a sandbox is made."""

TRIAL_S = 120.0
"""Longest that the imports may take."""

EPOCH_S = 1_767_225_600
"""Time of every file, 2026-01-01, so that a package's bytes do not depend on when it was built."""


class PackingProgress(Protocol):
    """Told how far the package is."""

    def stage(self, doing: str) -> None:
        """Another part begins."""

    def reach(self, done: float, total: float) -> None:
        """So many bytes of this part are done."""


@dataclass(frozen=True, slots=True)
class BuiltPackage:
    """A package."""

    path: Path
    size: int


def build(
    folder: Path,
    app: typer.Typer,
    progress: PackingProgress,
    *,
    slim: bool,
    extras: tuple[str, ...] = (),
    image: Path | None = None,
) -> BuiltPackage:
    """Build ``athanor_VERSION_ARCH.deb`` in ``folder``.

    Args:
        folder: where it goes; made when missing.
        app: the command line, whose manual pages and completions are part of it.
        progress: told how far it is.
        slim: leave out the packages that ours need; they must be installed beside it.
        extras: extras of athanor whose packages are part of it too.
        image: signed image of the sandboxes that it brings; None: none.

    Raises:
        ImageError: the image is not whole, or nobody has signed it.
        ConfigError: no dpkg-deb, something to pack is missing, or it cannot be written.
    """
    packer = find_packer()
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        raise ConfigError(f"packages for {os.uname().machine} are not known; only {', '.join(ARCHITECTURES)} are")
    name = f"athanor_{VERSION}_{architecture}{'_slim' if slim else ''}.deb"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".athanor-deb-", dir=folder) as scratch:
            root = Path(scratch) / "root"
            fill(root, app, progress, slim=slim, extras=extras)
            if image is not None:
                progress.stage("copying the image")
                add_image(root, image)
            write_control(root, architecture, slim=slim)
            normalise(root)
            progress.stage("packing")
            argv = [packer, "--root-owner-group", "-Zzstd", "-z3", "--build", str(root)]
            environment = {**MINIMAL_ENVIRONMENT, "SOURCE_DATE_EPOCH": str(EPOCH_S)}
            run([*argv, str(Path(scratch) / name)], timeout_s=BUILD_S, env=environment)
            (Path(scratch) / name).replace(folder / name)
    except ProcessError as error:
        raise ConfigError(f"dpkg-deb failed: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot build in {folder}: {error.strerror or error}") from error
    return BuiltPackage(folder / name, (folder / name).stat().st_size)


def find_packer() -> str:
    """Return the path of dpkg-deb.

    Raises:
        ConfigError: there is none.
    """
    packer = shutil.which("dpkg-deb", path=MINIMAL_ENVIRONMENT["PATH"])
    if packer is None:
        raise ConfigError("there is no dpkg-deb on this machine; build on Debian or Ubuntu")
    return packer


def fill(root: Path, app: typer.Typer, progress: PackingProgress, *, slim: bool, extras: tuple[str, ...] = ()) -> None:
    """Lay out what the package installs.

    Raises:
        ConfigError: something is missing here.
        OSError: it cannot be copied.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home, site = root / HOME, root / HOME / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    for name in (version, "python3"):
        (home / "bin" / name).symlink_to(f"/usr/bin/{version}")
    settings = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version[6:]}\n"
    (home / "pyvenv.cfg").write_text(settings)
    progress.stage("copying athanor")
    source = Path(appliance.__path__[0]).parent
    for name in OUR_PACKAGES:
        shutil.copytree(source / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    if not slim:
        _copy_requirements(site, progress, extras)
        progress.stage("trying it")
        check_whole(site)
    progress.stage("compiling Python modules")
    compileall.compile_dir(
        site,
        quiet=2,
        workers=1,
        stripdir=str(root),
        prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    _copy_runsc(home / "bin")
    shutil.copytree(embedded_model(), home / "share/athanor/models" / embedded_model().name)
    shutil.copytree(source_folder(), home / "share/athanor/systemd")
    for file in render(read_sources(source_folder()), SHIPPED_COMMAND, PACKAGE_PLACE):
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        (root / file.path).write_text(file.content)
    share.apply_share(root, share.find_share_changes(root, share.PACKAGE_SHARE, read_documents(app)))
    command = root / "usr/bin/athanor"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)


def add_image(root: Path, image: Path) -> None:
    """Put an image of the sandboxes into a package, with the keys that have signed it. Large files that the package
    has already are there once, under two names.

    Raises:
        ImageError: it is not whole, of another release or processor, or nobody has signed it.
        OSError: it cannot be copied.
    """
    store = root / PLACE.relative_to("/")
    store.mkdir(parents=True)
    manifest = add(store, image)
    (store / LOCK).unlink(missing_ok=True)
    check_fits(store / manifest.digest, manifest)
    keys = signers(store / manifest.digest)
    if not keys:
        raise ImageError(f"nobody has signed the image {image}", image, hint="athanor image sign DIR --key FILE")
    (store / KEYS).write_text("".join(f"{key}\n" for key in keys))
    _share_files(root / HOME / "lib", store / manifest.digest)


def _share_files(packed: Path, image: Path) -> None:
    """Replace large files of the package by further names of equal files of an image, with the modes that those have
    there."""
    known = {_key(path): path for path in image.rglob("*") if _is_large(path)}
    for path in packed.rglob("*"):
        same = known.get(_key(path)) if _is_large(path) else None
        if same is not None:
            path.unlink()
            path.hardlink_to(same)


def _is_large(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.stat().st_size >= SHARED_BYTES


def _key(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").digest()


def read_documents(app: typer.Typer) -> share.Files:
    """What the package brings to read."""
    return share.share_files(document_folder(), app, share.PACKAGE_SHARE)


def _copy_runsc(into: Path) -> None:
    """Copy this installation's runsc, with the programs that its release starts."""
    try:
        runsc = find_runsc().path
    except RuntimeNotFoundError as error:
        raise ConfigError(str(error)) from error
    shutil.copyfile(runsc, into / "runsc")
    (into / "runsc").chmod(0o755)
    if (folder := sidecars(runsc)) is not None:
        shutil.copytree(folder, into / folder.name)


def _copy_requirements(site: Path, progress: PackingProgress, extras: tuple[str, ...]) -> None:
    files = [pair for dist in requirement_closure("athanor", extras) for pair in package_files(dist)]
    sizes = [source.stat().st_size for source, _ in files]
    total, done = sum(sizes), 0
    progress.stage("copying what it needs")
    for (source, below), size in zip(files, sizes, strict=True):
        target = site / below
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        done += size
        progress.reach(done, total)


def check_whole(site: Path) -> None:
    """Import what both services run from the copied packages alone: an editable installation's record of its
    requirements may be older than its sources.

    Raises:
        ConfigError: a package is missing.
    """
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {', '.join(SERVED)}"
    try:
        run([sys.executable, "-I", "-S", "-c", code, str(site)], timeout_s=TRIAL_S)
    except ProcessError as error:
        raise ConfigError(
            f"the package would not run: {str(error).strip().splitlines()[-1]}; what this Python knows of athanor's "
            "requirements may be older than its sources: run `make setup`"
        ) from error


def write_control(root: Path, architecture: str, *, slim: bool) -> None:
    """The package's description and what is done when it comes and goes."""
    major, minor = sys.version_info[:2]
    control = root / "DEBIAN"
    control.mkdir()
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink()) >> 10
    needs = f"python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1}), systemd, libc6"
    about = " The Python packages that it needs are left out.\n" if slim else ""
    (control / "control").write_text(
        f"Package: athanor\nVersion: {VERSION}\nArchitecture: {architecture}\nMaintainer: Athanor\n"
        f"Installed-Size: {size}\nDepends: {needs}\nSection: net\nPriority: optional\n"
        "Description: sandboxed multi-tenant LLM serving appliance\n"
        f" Serves language models to tenants who do not trust each other, inside gVisor.\n{about}"
    )
    for name, text in SCRIPTS.items():
        (control / name).write_text(text)
        (control / name).chmod(0o755)


def normalise(root: Path) -> None:
    """One mode for files that are alike, one time for all: bytes that depend on content alone."""
    images = root / PLACE.relative_to("/")
    for path in (root, *root.rglob("*")):
        # Modes of an image's files are part of it, under whatever name.
        ours = images in list(path.parents)[1:] or (path.is_file() and path.stat().st_nlink > 1)
        if not path.is_symlink() and not ours:
            runs = path.is_dir() or (path.parent.name in ("DEBIAN", "bin") and path.name != "control")
            path.chmod(0o755 if runs else 0o644)
        os.utime(path, (EPOCH_S, EPOCH_S), follow_symlinks=False)


SCRIPTS = {
    "postinst": """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    systemd-sysusers athanor.conf
    /usr/bin/athanor install --systemd
    if [ -d /run/systemd/system ] && [ -n "$2" ]; then
        systemctl try-restart athanor-supervisor.service athanor-gateway.service athanor-fetch.service \\
            athanor-operator.service athanor-carrier.service
    fi
fi
""",
    "prerm": """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now athanor-statements.timer athanor-witness.timer athanor.target \\
        athanor-gateway.service athanor-supervisor.service athanor-fetch.service athanor-operator.service \\
        athanor-carrier.socket athanor-carrier.service
fi
""",
    "postrm": """\
#!/bin/sh
set -e
if [ "$1" = purge ]; then
    rm -rf /etc/athanor /var/lib/athanor /var/lib/athanor-supervisor /var/lib/athanor-fetch
    for user in athanor-gateway athanor-supervisor athanor-fetch athanor-carrier; do
        if getent passwd "$user" >/dev/null; then userdel "$user"; fi
    done
    if getent group athanor >/dev/null; then groupdel athanor; fi
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
""",
}
"""Debian policy manual, chapter 6; an upgrade restarts what runs."""
