"""The script that gets a runsc: what it derives from a machine, and that it gives up clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import runsc
from isolation.gvisor.runsc import MIN_VERSION

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
    """The script and the appliance ask for the same release."""
    assert runsc.MIN_VERSION == MIN_VERSION


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
