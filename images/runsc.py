"""Install a sufficiently recent runsc: from this machine, from gVisor, or from a newer Debian.

    python images/runsc.py --into .venv/bin
    python images/runsc.py --into /opt/gvisor --release      # gVisor's pinned release and nothing else
    python images/runsc.py --into /opt/gvisor --archive FILE # the pinned release's archive, downloaded elsewhere

Three sources are tried in this order, each announced:

1. an existing runsc: in the target directory, then on PATH;
2. gVisor's own release, pinned by version and SHA-512: an archive of ``runsc`` and the programs that it starts from the
   folder ``gvisor-bin`` beside it (since the summer of 2026; issue 13718 of google/gvisor);
3. Debian's package of a newer release than this machine's, downloaded by apt with the machine's own settings (mirror,
    proxy, keys), pinned by SHA-256. The machine's apt state is unchanged; no root needed.

Needs only the standard library, because it runs before anything is installed. Idempotent.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_VERSION = 20_240_701
"""Release date of the oldest usable runsc; equal to the number in isolation.gvisor.runsc."""

RELEASE = "20260928.0"
RELEASE_URL = "https://storage.googleapis.com/gvisor/releases/release/{release}/{machine}/gvisor.tar.bz2"
RELEASE_SHA512 = {
    "x86_64": (
        "c8d3a9fd4d4c4f5b8ff213caa4517356be128d18659ec4cde37828fe797f61a9"
        "725a602a846c81a8ed19c057a996515d31c081eba343ed4613a89951ba32ed59"
    ),
    "aarch64": (
        "926538a4f20056d44838f230297ecec9192db2562e2523a207295f706b761267"
        "25f2ff7b4e59d747147510c5714057eeec862a0f77d43bf625746592b5f51b00"
    ),
}
SIDECARS = "gvisor-bin"
"""Folder beside runsc with the programs that it starts."""
SENTRY = "gvisor_sentry"
"""The one of them that is every sandbox's kernel."""
SIDECARS_SINCE = 20_260_831
"""Release date from which runsc comes with that folder; equal to the number in isolation.gvisor.runsc."""
CONNECT_TIMEOUT_S = 8
"""Seconds after which an unreachable network is given up."""

DEBIAN_SUITE = "trixie"
DEBIAN_VERSION = "0.0~20240729.0-4+b7"
DEBIAN_SHA256 = {"x86_64": "3c25a5130dfac2f71237d5baad56ac86a255de87a0400f11b36a555156dc325a"}
APT_TIMEOUT_S = 300

_CHUNK_BYTES = 1 << 20
_MAX_BYTES = 512 << 20
"""Largest download in bytes, and largest program in one; an archive of 2026 has some 120 MB."""


class StepError(Exception):
    """One source failed; the next is tried."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"runsc: {text}", flush=True)


def version_of(path: Path) -> int:
    """Return the release date of a runsc.

    Raises:
        StepError: it does not run, reports no date, is too old, or lacks the programs that it starts.
    """
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise StepError(f"{path} does not run ({error})") from error
    match = re.search(r"^runsc version \S*?(20\d{6})(?!\d)", done.stdout, re.MULTILINE)
    if match is None:
        raise StepError(f"{path} tells no release date")
    if int(match[1]) < MIN_VERSION:
        raise StepError(f"{path} is of {match[1]}; {MIN_VERSION} or newer is needed")
    if int(match[1]) >= SIDECARS_SINCE and not (path.resolve().parent / SIDECARS / SENTRY).exists():
        raise StepError(f"{path} lacks {SIDECARS}/{SENTRY} beside it, without which it starts no sandbox")
    return int(match[1])


def install(source: Path, into: Path) -> None:
    """Put a runsc into the target directory atomically, so that a running one is never partly overwritten."""
    into.mkdir(parents=True, exist_ok=True)
    new = into / f".runsc.{os.getpid()}"
    shutil.copyfile(source, new)
    new.chmod(0o755)
    version_of(new)
    os.replace(new, into / "runsc")


def install_folder(source: Path, into: Path, name: str) -> None:
    """Put a release's folder into the target directory, then link its runsc there atomically: a runsc never stands
    beside the programs of another release. Folders of other releases stay, since a running sandbox may use one."""
    into.mkdir(parents=True, exist_ok=True)
    folder = into / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    version_of(folder / "runsc")
    link = into / f".runsc.{os.getpid()}"
    link.symlink_to(Path(name, "runsc"))
    os.replace(link, into / "runsc")


def from_this_machine(into: Path, scratch: Path) -> str:
    """Use an existing runsc: link to the one on PATH, or do nothing."""
    del scratch
    own = into / "runsc"
    if own.exists():
        with contextlib.suppress(StepError):
            return f"{own} is there already (release {version_of(own)})"
    found = shutil.which("runsc")
    if found is None or Path(found).resolve() == own.resolve():
        raise StepError("none on PATH")
    version = version_of(Path(found))
    into.mkdir(parents=True, exist_ok=True)
    own.unlink(missing_ok=True)
    own.symlink_to(Path(found).resolve())
    return f"linked {found} (release {version})"


def from_gvisor(into: Path, scratch: Path) -> str:
    """Download gVisor's pinned release."""
    machine = platform.machine()
    if machine not in RELEASE_SHA512:
        raise StepError(f"no checksum is pinned for {machine}")
    url = RELEASE_URL.format(release=RELEASE, machine=machine)
    say(f"downloading gVisor's release {RELEASE}: {url}")
    archive = scratch / "gvisor.tar.bz2"
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer, archive.open("wb") as file:
            while chunk := answer.read(_CHUNK_BYTES):
                file.write(chunk)
                if file.tell() > _MAX_BYTES:
                    raise StepError(f"{url} gives more than {_MAX_BYTES} bytes")
    except (urllib.error.URLError, OSError) as error:
        raise StepError(f"not reachable ({error})") from error
    return from_archive(archive, into, scratch)


def from_archive(archive: Path, into: Path, scratch: Path) -> str:
    """Install gVisor's pinned release from its archive.

    Raises:
        StepError: it is another file, or a trial sandbox does not run with it here.
    """
    machine = platform.machine()
    if machine not in RELEASE_SHA512:
        raise StepError(f"no checksum is pinned for {machine}")
    if not archive.is_file():
        raise StepError(f"there is no {archive}")
    check_digest(archive, "sha512", RELEASE_SHA512[machine])
    unpack(archive, scratch / "release")
    install_folder(scratch / "release", into, f"gvisor-{RELEASE}")
    try_sandbox(into / "runsc", scratch)
    return f"installed gVisor's release {RELEASE}"


def try_sandbox(runsc: Path, scratch: Path) -> None:
    """Run a trial sandbox, so that a release that cannot run here leaves its place to another.

    Raises:
        StepError: it did not run; the runsc is taken away.
    """
    flags = [f"--root={scratch}", "--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=none"]
    flags += ["--directfs=false"] if os.geteuid() == 0 else ["--rootless"]
    try:
        command([os.fspath(runsc), *flags, "do", "/bin/true"], scratch)
    except StepError as error:
        runsc.unlink()
        raise StepError(f"a trial sandbox did not run here: {error}") from error


def unpack(archive: Path, into: Path) -> None:
    """Unpack runsc and the programs that it starts from a release's archive; nothing else in it is written.

    Raises:
        StepError: the archive cannot be read, or has no runsc.
    """
    (into / SIDECARS).mkdir(parents=True)
    try:
        with tarfile.open(archive, "r:*") as members:
            for member in members:
                place = Path(member.name)
                if not member.isfile() or place.parts not in (("runsc",), (SIDECARS, place.name)):
                    continue
                content = members.extractfile(member)
                assert content is not None, "it is a file"
                with (into / place).open("wb") as file:
                    shutil.copyfileobj(content, file)
                (into / place).chmod(0o755)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise StepError(f"{archive.name} cannot be unpacked ({error})") from error
    if not (into / "runsc").exists():
        raise StepError(f"{archive.name} has no runsc")


def from_debian(into: Path, scratch: Path) -> str:
    """Download the package of a newer Debian with this machine's own apt settings."""
    machine = platform.machine()
    if machine not in DEBIAN_SHA256:
        raise StepError(f"no checksum is pinned for {machine}")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise StepError(f"this machine has no {tool}")
    source = derive_source(read_sources(Path("/etc/apt")), codename(Path("/etc/os-release")), DEBIAN_SUITE)
    apt = private_apt(scratch, source)
    say(f"reading the package list of Debian {DEBIAN_SUITE} with this machine's apt settings")
    command([*apt, "update"], scratch)
    say(f"downloading the package runsc {DEBIAN_VERSION}")
    command([*apt, "download", f"runsc={DEBIAN_VERSION}"], scratch)
    packages = list(scratch.glob("runsc_*.deb"))
    if len(packages) != 1:
        raise StepError("apt-get download left no package")
    check_digest(packages[0], "sha256", DEBIAN_SHA256[machine])
    command(["dpkg-deb", "--extract", os.fspath(packages[0]), os.fspath(scratch / "root")], scratch)
    install(scratch / "root/usr/bin/runsc", into)
    return f"installed Debian's package of {DEBIAN_SUITE} ({DEBIAN_VERSION})"


@dataclass(frozen=True)
class Source:
    """One entry of apt's sources: the fields common to deb822-style and one-line-style files."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    """Keyring file, or a whole key in deb822's indented form; empty for apt's default keys."""


def read_sources(etc: Path) -> list[Source]:
    """Return all entries for binary packages below ``/etc/apt``; sources.list(5)."""
    found: list[Source] = []
    files = sorted((etc / "sources.list.d").glob("*.sources"))
    for path in files:
        found.extend(parse_deb822(path.read_text()))
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*.list"))]:
        if path.exists():
            found.extend(parse_one_line(path.read_text()))
    return found


def parse_deb822(text: str) -> Iterator[Source]:
    """Parse a ``.sources`` file. Pure."""
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields[name] = fields.get(name, "") + "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
            continue
        uris, suites, components = (tuple(fields.get(key, "").split()) for key in ("uris", "suites", "components"))
        yield Source(uris, suites, components, fields.get("signed-by", ""))


def parse_one_line(text: str) -> Iterator[Source]:
    """Parse a ``.list`` file. Pure."""
    pattern = re.compile(r"^\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#\n]*)", re.MULTILINE)
    for options, uri, suite, components in pattern.findall(text):
        key = re.search(r"signed-by=(\S+)", options)
        yield Source((uri,), (suite,), tuple(components.split()), key[1] if key else "")


def codename(os_release: Path) -> str:
    """Return this machine's release name.

    Raises:
        StepError: the machine is no Debian.
    """
    try:
        text = os_release.read_text()
    except OSError as error:
        raise StepError("this machine is no Debian") from error
    if not re.search(r'^ID="?debian"?$', text, re.MULTILINE):
        raise StepError("this machine is no Debian, so its apt settings name no Debian mirror")
    match = re.search(r'^VERSION_CODENAME="?(\w+)"?$', text, re.MULTILINE)
    return match[1] if match else DEBIAN_SUITE


def derive_source(sources: list[Source], own: str, suite: str) -> str:
    """Derive a deb822 stanza for another suite from the machine's own entry for Debian's archive. Pure.

    Raises:
        StepError: there is no such entry.
    """
    for source in sources:
        if "main" in source.components and {own, suite, "stable", "testing", "sid"} & set(source.suites):
            lines = ["Types: deb", f"URIs: {' '.join(source.uris)}", f"Suites: {suite}", "Components: main"]
            if source.signed_by:
                lines.append(f"Signed-By: {source.signed_by}")
            return "\n".join(lines) + "\n"
    raise StepError(f"this machine's apt sources name no archive of Debian {own}")


def private_apt(scratch: Path, source: str, status: Path | None = None) -> list[str]:
    """Build an apt-get command that knows only ``source`` and keeps its state and cache in ``scratch``; it treats the
    packages in the file ``status`` as installed."""
    (scratch / "newer.sources").write_text(source)
    for part in ("state/lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    (scratch / "state/status").touch()
    options = {
        "Dir::State": scratch / "state",
        "Dir::State::status": status or scratch / "state/status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::sourcelist": scratch / "newer.sources",
        "Dir::Etc::sourceparts": "-",
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": CONNECT_TIMEOUT_S,
        "Acquire::https::Timeout": CONNECT_TIMEOUT_S,
        "Acquire::Retries": 2,
        # As root, apt would switch to a user that may not read the private directory.
        "APT::Sandbox::User": "root",
    }
    return ["apt-get", "--quiet=2", *(f"--option={key}={value}" for key, value in options.items())]


def command(argv: list[str], cwd: Path, most_s: float = APT_TIMEOUT_S) -> None:
    """Run a program, for so many seconds at most.

    Raises:
        StepError: it failed; the message ends with its last output.
    """
    try:
        done = subprocess.run(
            argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=most_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{argv[0]} took longer than {most_s:g} s") from error
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())[-500:]
        raise StepError(f"{argv[0]} ended with status {done.returncode}: {words}")


def check_digest(path: Path, algorithm: str, expected: str) -> None:
    """Compare a file with its pinned digest.

    Raises:
        StepError: they differ; the file is not used.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise StepError(f"{path.name} has {algorithm} {found}, expected {expected}: it is not used")


STEPS = {"this machine": from_this_machine, "gVisor's release": from_gvisor, "a newer Debian": from_debian}


def main(arguments: list[str] | None = None) -> int:
    """Try each source; return 0 when one worked."""
    parser = argparse.ArgumentParser(description="Get a runsc that is recent enough.")
    parser.add_argument("--into", type=Path, required=True, help="directory to put runsc into")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--release", action="store_true", help="gVisor's pinned release and no other, as GPUs need it")
    only.add_argument("--archive", type=Path, help="the pinned release's gvisor.tar.bz2, which lies here already")
    options = parser.parse_args(arguments)
    steps = STEPS
    if options.archive is not None:
        steps = {"the archive": lambda into, scratch: from_archive(options.archive.absolute(), into, scratch)}
    elif options.release:
        steps = {"gVisor's release": from_gvisor}
    problems: list[str] = []
    for name, step in steps.items():
        with tempfile.TemporaryDirectory(prefix="runsc-") as scratch:
            try:
                done = step(options.into.absolute(), Path(scratch))
            except StepError as error:
                say(f"not from {name}: {error}")
                problems.append(name)
                continue
        say(done)
        return 0
    say(f"no usable runsc from {', '.join(problems)}")
    say("mend one of the reasons above, or put a runsc of release 20240701 or newer on PATH and run this again;")
    say("gVisor's page https://gvisor.dev/docs/user_guide/install/ tells how to get one")
    return 1


if __name__ == "__main__":
    sys.exit(main())
