"""The script that gets a runsc: what it derives from a machine, and that it gives up clearly."""

from __future__ import annotations

import hashlib
import io
import platform
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from images import runsc
from isolation.gvisor.runsc import MIN_VERSION, SENTRY, SIDECARS_SINCE

DEB822 = """\
# the machine's own
Types: deb deb-src
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian.gpg

Types: deb
Enabled: no
URIs: http://off.test/debian
Suites: bookworm
Components: main

Types: deb
URIs: https://other.test/repo
Suites: nodistro
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
"""

ONE_LINE = """\
# deb http://old.test/debian buster main
deb [arch=amd64 signed-by=/k.gpg] http://mirror.test/debian bookworm main non-free # comment
deb-src http://mirror.test/debian bookworm main
"""


def fake(path: Path, version: str) -> Path:
    """A program that answers --version."""
    path.write_text(f"#!/bin/sh\necho runsc version {version}\n")
    path.chmod(0o755)
    return path


def archive(path: Path, runsc_text: str, **others: bytes) -> Path:
    """A release's archive: runsc, the programs beside it, and what else a caller names."""
    programs = {
        "runsc": runsc_text.encode(),
        "containerd-shim-runsc-v1": b"shim",
        "gvisor-bin/gvisor_sentry": b"sentry",
    }
    with tarfile.open(path, "w:bz2") as file:
        for name, content in {**programs, **others}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder behind a real HTTP server that the script takes for gVisor's bucket; nothing is on PATH."""
    folder = tmp_path / "bucket"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(runsc, "RELEASE_URL", f"http://127.0.0.1:{server.server_port}/{{release}}.tar.bz2")
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        monkeypatch.setattr(runsc, "STEPS", {"gVisor's release": runsc.from_gvisor})
        yield folder
        server.shutdown()


def publish(bucket: Path, monkeypatch: pytest.MonkeyPatch, runsc_text: str, **others: bytes) -> None:
    """Put an archive into the bucket and its digest into the script."""
    content = archive(bucket / f"{runsc.RELEASE}.tar.bz2", runsc_text, **others).read_bytes()
    monkeypatch.setattr(runsc, "RELEASE_SHA512", {platform.machine(): hashlib.sha512(content).hexdigest()})


GOOD = f"#!/bin/sh\necho runsc version release-{runsc.RELEASE}\n"


def test_a_release_is_installed_with_the_programs_beside_it(bucket, tmp_path, monkeypatch, capsys):
    """runsc is a link into a folder of its release, so that it never stands beside another's programs; nothing else of
    the archive is written, links and paths that lead outside least of all. Run again, the script keeps it."""
    publish(bucket, monkeypatch, GOOD, **{"../outside": b"x", "gvisor-bin/../../outside": b"x"})
    into = tmp_path / "into"
    assert runsc.main(["--into", str(into)]) == 0, capsys.readouterr().out
    assert (into / "runsc").readlink() == Path(f"gvisor-{runsc.RELEASE}/runsc")
    found = sorted(str(path.relative_to(into)) for path in into.rglob("*") if path.is_file())
    assert found == [f"gvisor-{runsc.RELEASE}/gvisor-bin/gvisor_sentry", f"gvisor-{runsc.RELEASE}/runsc", "runsc"]
    assert (into / "runsc").resolve().parent.joinpath(SENTRY).stat().st_mode & 0o777 == 0o755
    assert not list(tmp_path.rglob("outside"))
    monkeypatch.setattr(runsc, "STEPS", {"this machine": runsc.from_this_machine})
    assert runsc.main(["--into", str(into)]) == 0
    assert "is there already" in capsys.readouterr().out


def test_the_archive_of_the_pinned_release_is_installed_without_network(bucket, tmp_path, monkeypatch, capsys):
    """With --archive the file that lies here is checked and installed; another file is refused by its digest."""
    publish(bucket, monkeypatch, GOOD)
    file = bucket / f"{runsc.RELEASE}.tar.bz2"
    monkeypatch.setattr(runsc, "RELEASE_URL", "http://127.0.0.1:1/{release}")
    assert runsc.main(["--into", str(tmp_path / "bin"), "--archive", str(file)]) == 0
    assert runsc.version_of(tmp_path / "bin/runsc") == int(runsc.RELEASE.partition(".")[0])
    other = tmp_path / "other.tar.bz2"
    other.write_bytes(file.read_bytes() + b"x")
    assert runsc.main(["--into", str(tmp_path / "else"), "--archive", str(other)]) == 1
    assert "it is not used" in capsys.readouterr().out
    assert runsc.main(["--into", str(tmp_path / "else"), "--archive", str(tmp_path / "none")]) == 1
    assert "there is no" in capsys.readouterr().out


def test_only_the_release_is_taken_where_it_is_asked_for(bucket, tmp_path, monkeypatch):
    """With --release a good runsc of another date on the path is not taken."""
    publish(bucket, monkeypatch, GOOD)
    older = tmp_path / "path/runsc"
    older.parent.mkdir()
    older.write_text("#!/bin/sh\necho runsc version release-20240729.0\n")
    older.chmod(0o755)
    monkeypatch.setenv("PATH", f"{older.parent}:/usr/bin:/bin")
    assert runsc.main(["--into", str(tmp_path / "bin"), "--release"]) == 0
    assert runsc.version_of(tmp_path / "bin/runsc") == int(runsc.RELEASE.partition(".")[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f'{GOOD}[ "$1" = --version ] || {{ echo no seccomp here >&2; exit 1; }}\n',
            "a trial sandbox did not run here",
        ),
        ("#!/bin/sh\nexit 3\n", "does not run"),
    ],
)
def test_a_release_that_cannot_run_here_leaves_its_place_to_another(text, said, bucket, tmp_path, monkeypatch, capsys):
    """The trial, not the download, decides; nothing is left that the next step would take for installed."""
    publish(bucket, monkeypatch, text)
    assert runsc.main(["--into", str(tmp_path / "into")]) == 1
    assert said in capsys.readouterr().out
    assert not (tmp_path / "into/runsc").exists()


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_broken_archive_is_said(content, tmp_path):
    """Also one with the right digest."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(runsc.StepError, match="cannot be unpacked"):
        runsc.unpack(tmp_path / "a", tmp_path / "out")


def test_a_runsc_without_its_programs_is_not_linked(tmp_path, monkeypatch, capsys):
    """A runsc of 2026 that was copied alone starts nothing; one of before needs nothing beside it."""
    (tmp_path / "bin").mkdir()
    fake(tmp_path / "bin/runsc", f"release-{runsc.RELEASE}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(runsc, "STEPS", {"this machine": runsc.from_this_machine})
    assert runsc.main(["--into", str(tmp_path / "into")]) == 1
    assert "lacks gvisor-bin/gvisor_sentry beside it" in capsys.readouterr().out
    (tmp_path / "bin/gvisor-bin").mkdir()
    (tmp_path / "bin/gvisor-bin/gvisor_sentry").touch()
    assert runsc.main(["--into", str(tmp_path / "into")]) == 0


def test_deb822_entries():
    """Disabled and source-only entries are left out; a key of several lines stays whole."""
    first, other = runsc.parse_deb822(DEB822)
    assert first == runsc.Source(
        ("http://mirror.test/debian",),
        ("bookworm", "bookworm-updates"),
        ("main", "contrib"),
        "/usr/share/keyrings/debian.gpg",
    )
    assert other.suites == ("nodistro",)
    assert other.signed_by.splitlines()[1:] == [" -----BEGIN PGP PUBLIC KEY BLOCK-----", " .", " abc"]


def test_one_line_entries():
    """Options in brackets and comments are understood."""
    (entry,) = runsc.parse_one_line(ONE_LINE)
    assert entry == runsc.Source(("http://mirror.test/debian",), ("bookworm",), ("main", "non-free"), "/k.gpg")


@pytest.mark.parametrize("entries", [runsc.parse_deb822(DEB822), runsc.parse_one_line(ONE_LINE)])
def test_source_for_a_newer_release_uses_the_machines_mirror(entries):
    """Mirror and key are the machine's own; only the suite differs."""
    lines = runsc.derive_source(list(entries), "bookworm", "trixie").splitlines()
    assert lines[:4] == ["Types: deb", "URIs: http://mirror.test/debian", "Suites: trixie", "Components: main"]
    assert lines[4].startswith("Signed-By: /")


def test_no_archive_is_said():
    """A machine whose sources name no Debian archive is told so."""
    with pytest.raises(runsc.StepError, match="no archive of Debian"):
        runsc.derive_source([runsc.Source(("u",), ("nodistro",), ("main",))], "bookworm", "trixie")


def test_other_distributions_are_said(tmp_path):
    """Their apt settings cannot serve."""
    (tmp_path / "os-release").write_text('ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME="noble"\n')
    with pytest.raises(runsc.StepError, match="no Debian"):
        runsc.codename(tmp_path / "os-release")
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    assert runsc.codename(tmp_path / "os-release") == "bookworm"


def test_a_good_one_in_place_is_kept(tmp_path, capsys):
    """Run again, the script does nothing."""
    fake(tmp_path / "runsc", "release-20250101.0")
    before = (tmp_path / "runsc").stat()
    assert runsc.main(["--into", str(tmp_path)]) == 0
    after = (tmp_path / "runsc").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert "is there already (release 20250101)" in capsys.readouterr().out


def test_an_old_one_in_place_is_replaced_by_the_one_on_path(tmp_path, monkeypatch, capsys):
    """One on PATH that is recent enough is linked."""
    for name in ("bin", "into"):
        (tmp_path / name).mkdir()
    good = fake(tmp_path / "bin/runsc", "release-20250202.0")
    fake(tmp_path / "into/runsc", "release-20200101.0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    assert runsc.main(["--into", str(tmp_path / "into")]) == 0
    assert (tmp_path / "into/runsc").resolve() == good
    assert "linked" in capsys.readouterr().out


def test_when_all_fails_each_reason_and_the_mend_are_said(tmp_path, monkeypatch, capsys):
    """Without a way out, the script ends with 1 and has said why for each way."""
    monkeypatch.setattr(runsc, "RELEASE_URL", "http://127.0.0.1:1/{release}/{machine}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runsc.main(["--into", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "not from this machine: none on PATH" in out
    assert "not from gVisor's release: not reachable" in out or "no checksum is pinned" in out
    assert "this machine has no apt-get" in out or "no checksum is pinned" in out
    assert "put a runsc of release 20240701 or newer on PATH" in out


def test_wrong_digest_is_not_used(tmp_path):
    """A file with another checksum is refused, with both named."""
    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(runsc.StepError, match="expected 00: it is not used"):
        runsc.check_digest(tmp_path / "f", "sha256", "00")


def test_numbers_agree_with_the_appliance():
    """The script and the appliance ask for the same release and the same programs beside it."""
    assert (runsc.MIN_VERSION, runsc.SIDECARS_SINCE) == (MIN_VERSION, SIDECARS_SINCE)
    assert Path(runsc.SIDECARS, runsc.SENTRY) == SENTRY


@pytest.mark.full
def test_real_download(tmp_path):
    """From whatever this machine can reach, a usable runsc comes."""
    runsc_path = tmp_path / "into"
    try:
        assert runsc.from_gvisor(runsc_path, tmp_path)
    except runsc.StepError:
        (tmp_path / "scratch").mkdir()
        try:
            runsc.from_debian(runsc_path, tmp_path / "scratch")
        except runsc.StepError as error:
            pytest.skip(f"nothing can be reached from here: {error}")
    assert runsc.version_of(runsc_path / "runsc") >= MIN_VERSION
