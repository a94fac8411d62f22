"""Versions and command lines of runsc; most of it needs no runsc."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolation.errors import RuntimeNotFoundError
from isolation.gvisor.bundle import Bundle, Profile
from isolation.gvisor.runsc import MIN_VERSION, RunscCommand, find_runsc, parse_version, sidecars


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("runsc version release-20250407.0\nspec: 1.1.0-rc.1\n", 20250407),
        ("runsc version 0.0~20240729.0\nspec: 1.2.0\n", 20240729),
        ("runsc version release-20260817.0-12-gabcdef\n", 20260817),
    ],
)
def test_release_date_is_read(text, version):
    """gVisor's own releases and a distribution's package both tell a date."""
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "runsc version VERSION_MISSING\n", "other 20250101"])
def test_version_without_a_date_is_refused(text):
    """A build that tells no date cannot be judged."""
    with pytest.raises(ValueError, match="no release date"):
        parse_version(text)


def fake(path: Path, version: str) -> Path:
    """A program that answers --version."""
    path.write_text(f"#!/bin/sh\necho runsc version {version}\n")
    path.chmod(0o755)
    return path


def test_first_usable_candidate_wins(tmp_path):
    """Candidates that are absent or too old are passed over."""
    old, new = fake(tmp_path / "old", "release-20230101.0"), fake(tmp_path / "new", "release-20250101.0")
    found = find_runsc([tmp_path / "absent", old, new])
    assert (found.path, found.version) == (new, 20250101)


def test_error_says_what_is_wrong_and_how_to_get_one(tmp_path):
    """The message names each candidate's fault; the hint names the script."""
    old = fake(tmp_path / "old", "release-20230101.0")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeNotFoundError) as caught:
        find_runsc([old, broken])
    text = str(caught.value)
    assert f"of 20230101, older than {MIN_VERSION}" in text
    assert "ended with status 3" in text
    assert "images/runsc.py --into" in text


def test_a_release_of_2026_needs_its_programs_beside_it(tmp_path, monkeypatch):
    """Copied alone it is refused, with the mend; unpacked whole it is taken, also through a link. As root its folder
    has to be open to the user that the sentry becomes; without root it need not be."""
    home = tmp_path / "opt"
    (home / "gvisor-bin").mkdir(parents=True)
    runsc = fake(home / "runsc", "release-20260928.0")
    (tmp_path / "link").symlink_to(runsc)
    with pytest.raises(RuntimeNotFoundError, match="lacks gvisor-bin/gvisor_sentry beside it; unpack"):
        find_runsc([runsc])
    (home / "gvisor-bin/gvisor_sentry").touch()
    monkeypatch.setattr("os.geteuid", lambda: 1_000)
    assert find_runsc([tmp_path / "link"]).version == 20260928
    assert sidecars(tmp_path / "link") == home / "gvisor-bin"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    home.chmod(0o700)
    with pytest.raises(RuntimeNotFoundError, match="may not enter .*chmod"):
        find_runsc([runsc])


def test_missing_programs_are_an_error_where_runsc_can_be_told_so():
    """From the first release that is known to have the flag; older ones would refuse it."""
    (with_flag, without) = (
        RunscCommand(Path("/r"), Path("/run"), Profile.ROOT, version).flags() for version in (20260928, 20240729)
    )
    assert set(with_flag) - set(without) == {"--sidecar-usage-policy=STRICT"}


@pytest.mark.runsc
def test_real_runsc_is_recent_enough(runsc_path):
    """The runsc of this machine passes the check."""
    assert find_runsc([runsc_path]).version >= MIN_VERSION


def test_command_lines():
    """Walls are in every verb's flags; the profile decides directfs alone."""
    root = RunscCommand(Path("/r/runsc"), Path("/run/a"), Profile.ROOT)
    user = RunscCommand(Path("/r/runsc"), Path("/run/a"), Profile.USERNS)
    bundle = Bundle(Path("/run/b/x"))
    verbs = [root.create("x", bundle), root.start("x"), root.checkpoint("x", Path("/c")), root.delete("x")]
    for argv in verbs:
        assert argv[0] == "/r/runsc"
        assert {"--root=/run/a", "--network=none", "--platform=systrap", "--host-uds=open"} <= set(argv)
        assert "--directfs=false" in argv
    assert verbs[0][-6:] == ["create", "--bundle", "/run/b/x", "--pid-file", "/run/b/x/pid", "x."]
    assert verbs[2][-2:] == ["--image-path=/c", "x."]
    assert verbs[3][-3:] == ["delete", "--force", "x."]
    assert set(user.start("x")) ^ set(root.start("x")) == {"--directfs=true", "--directfs=false"}
