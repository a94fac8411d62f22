"""Debian's packages in folders of their own, without root: programs through which tests look at an appliance.

They are packages of this machine's own release, by apt with the machine's own settings; nothing of apt's state changes.
Where the machine has the program itself, a link to it takes the package's place. What a program needs and the machine
lacks lies beside it, in a folder below ``share`` of the environment.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from images.runsc import StepError, codename, command, derive_source, private_apt, read_sources
from requirements.placing import move, place, point

CROSS = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static")
"""Packages that compile for aarch64 and run what was compiled."""

GO = (
    "golang-go",
    "golang-google-grpc-dev",
    "golang-google-protobuf-dev",
    # grpc-go takes either; generated code of today needs the newer.
    "golang-github-golang-protobuf-1-5-dev",
    "protoc-gen-go",
    "protoc-gen-go-grpc",
)
"""Packages that compile a Go program which speaks gRPC, without a module proxy."""

INSTALLED = Path("/var/lib/dpkg/status")
"""What this machine has."""

RUN_CHROMIUM = """\
#!/bin/sh
# Chromium with what this machine lacked for it; fonts of its own only where the machine has none.
root={root}
libraries=$(echo "$root"/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio"
[ -d /etc/fonts ] || export FONTCONFIG_PATH="$root/etc/fonts" XDG_DATA_HOME="$root/usr/share"
exec "$root/usr/lib/chromium/chromium" "$@"
"""

STORES = ("valkey-server", "redis-server")
"""Programs that keep values for a fleet, with the names of their packages; Debian has the first from 13 on."""

PROXIES = {"nginx": "usr/sbin/nginx", "haproxy": "usr/sbin/haproxy"}
"""Proxies of the documents, with their programs within Debian's packages of these names."""

RUN_UNPACKED = """\
#!/bin/sh
# The program with the libraries that this machine lacked for it.
root={root}
export LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*-linux-gnu)"
exec "$root/{program}" "$@"
"""


def prometheus(into: Path, scratch: Path) -> None:
    """Debian's Prometheus.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    apt = debian(scratch)
    command([*apt, "download", "prometheus"], scratch)
    extract(scratch.glob("prometheus_*.deb"), scratch / "root")
    for program in ("promtool", "prometheus"):
        place(scratch / "root/usr/bin" / program, into / program)


def chromium(into: Path, scratch: Path) -> None:
    """The machine's own Chromium, or Debian's in a folder with the libraries that this machine has not.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    if own := shutil.which("chromium"):
        point(into / "chromium", Path(own))
        return
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", "chromium"], scratch)
    folder = into.parent / "share/chromium"
    new = folder.with_name(f".chromium.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    (scratch / "chromium").write_text(RUN_CHROMIUM.format(root=shlex.quote(os.fspath(folder.absolute()))))
    place(scratch / "chromium", into / "chromium")


def store(into: Path, scratch: Path) -> None:
    """The machine's own Valkey or Redis, or Debian's.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached or has neither.
    """
    unpack(into, scratch, {name: f"usr/bin/{name}" for name in STORES}, into / "fleet-store")


def proxy(name: str, into: Path, scratch: Path) -> None:
    """The machine's own proxy, or Debian's.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    unpack(into, scratch, {name: PROXIES[name]}, into / name)


def unpack(into: Path, scratch: Path, programs: Mapping[str, str], target: Path) -> None:
    """The first program that the machine has, or that of the first package that Debian has, in a folder with the
    libraries that this machine has not.

    Args:
        programs: path within the package, by the name of package and program.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached or has no such package.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"
    if found := next((found for name in programs if (found := shutil.which(name, path=path))), None):
        point(target, Path(found))
        return
    get = [*debian(scratch), "--no-install-recommends", "--yes", "--download-only", "install"]
    *others, last = programs
    for package in others:
        with suppress(StepError):
            command([*get, package], scratch)
            break
    else:
        package = last
        command([*get, package], scratch)
    program = programs[package]
    folder = into.parent / "share" / target.name
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        if not (new / program).exists():
            raise StepError(f"the package {package} of this release has no {program}")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    run = RUN_UNPACKED.format(root=shlex.quote(os.fspath(folder.absolute())), program=program)
    (scratch / "run").write_text(run)
    place(scratch / "run", target)


def emulator(folder: Path, scratch: Path) -> None:
    """Debian's cross compiler for aarch64 and the emulator of that processor; nothing where the machine is one.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    if platform.machine() == "aarch64" or (folder / "usr/bin/qemu-aarch64-static").exists():
        return
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", *CROSS], scratch)
    new = folder.with_name(f".emulator.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        for other in (new / "usr/bin").glob("qemu-*-static"):
            if other.name != "qemu-aarch64-static":
                other.unlink()
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def go_packages(folder: Path, scratch: Path) -> None:
    """Debian's Go, grpc-go and the generators of its code.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", *GO], scratch)
    extract((scratch / "cache/archives").glob("*.deb"), scratch / "root")
    move(scratch / "root", folder)


def debian(scratch: Path) -> list[str]:
    """An apt-get for this machine's own release that changes nothing here; packages go below ``scratch``.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    (scratch / "cache/archives/partial").mkdir(parents=True)
    return [*apt_with_lists(), f"--option=Dir::Cache::archives={scratch / 'cache/archives'}"]


KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders until the end of the program."""


@cache
def apt_with_lists() -> list[str]:
    """An apt-get that has read what Debian's archive holds, once for all that is got from there.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise StepError(f"this machine has no {tool}")
    own = codename(Path("/etc/os-release"))
    KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(KEPT[-1].name)
    apt = private_apt(folder, derive_source(read_sources(Path("/etc/apt")), own, own), INSTALLED)
    # All state is in the folder; the machine's own lock needs root, and nothing is installed.
    apt.append("--option=Debug::NoLocking=true")
    command([*apt, "update"], folder)
    return apt


def extract(packages: Iterable[Path], into: Path) -> None:
    """The files of these packages; nothing of theirs is run."""
    into.mkdir(parents=True)
    for package in packages:
        command(["dpkg-deb", "--extract", os.fspath(package), os.fspath(into.absolute())], into)
