"""The fences of a support archive: each is shown to hold, by something that would have got through."""

from __future__ import annotations

import base64
import tarfile
from pathlib import Path

import pytest

from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError
from appliance.operator import bundle, demo
from appliance.operator.bundle import Member, MemberCollector

NOW = 1_795_300_000.0
KEY = "ath_alpha-1_" + "0123456789abcdef" * 4


def read(path: Path) -> dict[str, str]:
    """Name to text of an archive's members."""
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def test_credentials_are_blotted_in_every_member(tmp_path: Path) -> None:
    """A key in a log line or a comment is gone, its name stays, and what is no key stays as it is."""
    into = MemberCollector()
    into.add("journal.log", lambda: f"event key {KEY} used\nAuthorization: Bearer abc.def\nplain words\n")
    done = bundle.write_bundle(tmp_path / "a.tar.gz", into, (), NOW)
    text = read(done.path)["journal.log"]
    assert KEY not in text
    assert "ath_alpha-1_[redacted]" in text
    assert "abc.def" not in text
    assert "plain words" in text


def test_a_member_with_a_secret_of_this_appliance_is_left_out(tmp_path: Path) -> None:
    """The pepper in any form, or a key's digest, keeps a whole member out, and that is told; the others stay."""
    demo.claim(tmp_path)
    demo.prepare_keys(tmp_path)
    demo.prepare_policy(tmp_path)
    demo.write_config(tmp_path, demo.DemoOptions(), demo.choose_models(()))
    config = load_config(tmp_path / "athanor.yaml")
    pepper = (tmp_path / "pepper").read_bytes()
    digest = (tmp_path / "credentials.json").read_text().split('"hmac_sha256": "')[1][:64]
    secrets = bundle.secrets_of(config, tmp_path / "pepper")
    into = MemberCollector()
    bundle.add_configuration(into, tmp_path / "athanor.yaml", config)
    for name, text in (("hex", pepper.hex()), ("base64", base64.b64encode(pepper).decode()), ("digest", digest)):
        into.add(name, lambda text=text: f"by accident: {text}\n")  # type: ignore[misc]
    done = bundle.write_bundle(tmp_path / "a.tar.gz", into, secrets, NOW)
    members = read(done.path)
    assert set(members) == {"athanor.yaml", "policy/policy.yaml", "left-out.txt"}
    assert members["left-out.txt"].count("it holds a secret of this appliance") == 3
    assert len(done.left_out) == 3
    without = bundle.write_bundle(tmp_path / "b.tar.gz", into, (), NOW)
    assert "hex" in read(without.path), "the fence is what kept it out"


def test_a_private_key_is_known_by_each_of_its_lines(tmp_path: Path) -> None:
    """Half of a PEM file pasted into a comment is a secret too."""
    from appliance.common.listen_config import ListenConfig, TlsConfig
    from tests.appliance.gateway.front.pki import Pki

    files = Pki.create(tmp_path).files
    demo.claim(tmp_path / "state")
    demo.prepare_keys(tmp_path / "state")
    config = load_config(demo.write_config(tmp_path / "state", demo.DemoOptions(), demo.choose_models(())))
    tls = TlsConfig(certificate=files.certificate, key=files.key)
    config = config.model_copy(update={"listen": ListenConfig(tls=tls)})
    line = files.key.read_text().splitlines()[1]
    secrets = bundle.secrets_of(config, None)
    member = Member("x", f"# {line}\n")
    assert [clean for _, clean in bundle.without_secrets([member], secrets)] == [False]
    assert [clean for _, clean in bundle.without_secrets([Member("x", "# fine\n")], secrets)] == [True]


def test_the_archive_is_for_its_owner(tmp_path: Path) -> None:
    """Mode 0600, whatever the umask; names below one folder; nothing half written."""
    done = bundle.write_bundle(tmp_path / "a.tar.gz", MemberCollector(), (), NOW)
    assert done.path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(done.path) as archive:
        assert archive.getnames() == ["a/left-out.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def test_a_source_that_fails_leaves_a_sentence(tmp_path: Path) -> None:
    """No journal, no file: the rest is packed, and the reason is inside."""
    into = MemberCollector()

    def fails() -> str:
        raise ConfigError("there is no journal on this machine")

    into.add("journal.log", fails)
    into.add("gone", (tmp_path / "gone").read_text)
    text = read(bundle.write_bundle(tmp_path / "a.tar.gz", into, (), NOW).path)["left-out.txt"]
    assert "there is no journal" in text
    assert "gone: " in text


def test_a_member_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of what is too long is kept."""
    monkeypatch.setattr(bundle, "MAX_MEMBER_BYTES", 1_000)
    into = MemberCollector()
    into.add("long", lambda: "x" * bundle.MAX_MEMBER_BYTES + "the end")
    assert len(into.members[0].text) == bundle.MAX_MEMBER_BYTES
    assert into.members[0].text.endswith("the end")
