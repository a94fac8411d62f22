"""The history of policies: what was in force comes back as it was, and what is no version is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common import policy_history as module
from appliance.common.errors import ConfigError
from appliance.common.policy_history import FOLDER, PolicyHistory, relative
from policy.files import read_sources
from policy.loader import load_policy

TENANT = "version: 1\ntenants: {%s: {credentials: ['key:%s'], models: ['*']}}\n"
PREFIX = "public_prefixes: {p: {model: m, tenants: all, file: %s}}\n"


def policy(folder: Path) -> Path:
    """A policy file with a drop-in, each with a public prefix of the same name and another text."""
    path = folder / "etc" / "policy.yaml"
    for place, file, tenant in (
        (path.parent, path, "a"),
        (path.with_suffix(".d"), path.with_suffix(".d") / "b.yaml", "b"),
    ):
        (place / "public").mkdir(parents=True)
        (place / "public" / "hello.txt").write_text(f"Hello, {tenant}!")
        file.write_text((TENANT % (tenant, tenant)) + (PREFIX.replace("{p:", f"{{{tenant}1:") % "hello.txt"))
    return path


def test_a_version_comes_back_with_all_its_files(tmp_path: Path) -> None:
    """File, drop-in and the texts of public prefixes: loaded again they have the same digest. What is the newest
    already is not kept twice, and what was there before is kept again when it comes back."""
    path, history = policy(tmp_path), PolicyHistory(tmp_path)
    sources = read_sources(path)
    digest = load_policy(sources).digest
    assert history.numbers() == []
    assert history.record(digest, *relative(sources, path), 1_000)
    assert not history.record(digest, *relative(sources, path), 2_000)
    version = history.read(1)
    assert (version.digest, version.since_ms, version.named) == (digest, 1_000, ("policy.yaml", "policy.d/b.yaml"))
    assert set(version.files) == {*version.named, "public/hello.txt", "policy.d/public/hello.txt"}
    assert load_policy(version.sources()).digest == digest
    assert history.record("ab" * 32, {"policy.yaml": TENANT % ("c", "c")}, ("policy.yaml",), 3_000)
    assert history.record(digest, *relative(sources, path), 4_000)
    assert history.numbers() == [3, 2, 1]


def test_a_change_of_words_alone_is_a_version(tmp_path: Path) -> None:
    """A comment changes no digest, and is somebody's text: it is kept."""
    history = PolicyHistory(tmp_path)
    assert history.record("ab" * 32, {"policy.yaml": "version: 1"}, ("policy.yaml",), 1)
    assert history.record("ab" * 32, {"policy.yaml": "version: 1 # why"}, ("policy.yaml",), 2)


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the bound are kept, the newest; numbers go on."""
    monkeypatch.setattr(module, "MAX_VERSIONS", 3)
    history = PolicyHistory(tmp_path)
    for number in range(6):
        history.record(f"{number:064x}", {"policy.yaml": str(number)}, ("policy.yaml",), number)
    assert history.numbers() == [6, 5, 4]


def test_texts_are_bounded_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of a large policy push the oldest out before there are as many as may be, and the newest two stay
    however large they are, so that there is one to go back to. Of one that is larger than what is read back the digest
    is kept, once, in place of a file that nobody can read. Control: small ones are all kept."""
    history = PolicyHistory(tmp_path)

    def keep(number: int, size: int) -> bool:
        return history.record(f"{number:064x}", {"policy.yaml": "x" * size}, ("policy.yaml",), number)

    assert all(keep(number, 10) for number in range(1, 6)) and history.numbers() == [5, 4, 3, 2, 1]
    monkeypatch.setattr(module, "MAX_FOLDER_BYTES", 10_000)
    assert keep(6, 4_000) and keep(7, 4_000) and history.numbers() == [7, 6, 5, 4, 3, 2, 1]
    assert keep(8, 4_000) and history.numbers() == [8, 7]
    assert keep(9, 20_000) and keep(10, 20_000) and history.numbers() == [10, 9]
    monkeypatch.setattr(module, "MAX_BYTES", 30_000)
    assert keep(11, 30_000) and not keep(11, 30_000)
    assert history.numbers() == [11, 10, 9] and history.read(11).unread


@pytest.mark.parametrize(
    "change",
    [
        {"form": 99},
        {"files": {"../../etc/passwd": "x", "policy.yaml": ""}},
        {"files": {"/etc/passwd": "x", "policy.yaml": ""}},
        {"files": {"policy.yaml": 7}},
        {"named": ["absent.yaml"]},
        {"files": None},
    ],
)
def test_what_is_no_version_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Another form, a name outside the folder, a text that is none: refused before anything is written from it.
    Control: the file as it was is read. A damaged newest version does not keep the next from being kept."""
    history = PolicyHistory(tmp_path)
    history.record("ab" * 32, {"policy.yaml": "version: 1"}, ("policy.yaml",), 1)
    assert history.read(1).files == {"policy.yaml": "version: 1"}
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="is no version of a policy"):
        history.read(1)
    with pytest.raises(ConfigError, match="there is no version 9"):
        history.read(9)
    assert history.record("ab" * 32, {"policy.yaml": "version: 1"}, ("policy.yaml",), 2)
    assert history.numbers() == [2, 1]


def test_digests_without_texts_push_no_texts_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many policies are reported whose files are never there, all texts stay, and the newest digests; the same
    one twice is one version. Control: a text pushes the oldest out."""
    monkeypatch.setattr(module, "MAX_VERSIONS", 6)
    monkeypatch.setattr(module, "MAX_UNREAD", 2)
    history = PolicyHistory(tmp_path)
    for number in range(6):
        history.record(f"{number:064x}", {"policy.yaml": str(number)}, ("policy.yaml",), number)
    for number in range(100, 150):
        assert history.record_unread(f"{number:064x}", number, "somebody")
        assert not history.record_unread(f"{number:064x}", number)
    found = [history.read(number) for number in history.numbers()]
    assert [one.since_ms for one in found] == [149, 148, 5, 4, 3, 2, 1, 0]
    assert [one.unread for one in found] == [True, True] + [False] * 6
    history.record("ab" * 32, {"policy.yaml": "x"}, ("policy.yaml",), 200)
    assert [history.read(number).since_ms for number in history.numbers()] == [200, 149, 148, 5, 4, 3, 2, 1]


def test_a_text_that_could_be_read_after_all_takes_its_digests_place(tmp_path: Path) -> None:
    """Under the same number, with the time at which it came into force; also where a crash has left both files."""
    history = PolicyHistory(tmp_path)
    history.record_unread("ab" * 32, 5, "somebody")
    (unread,) = (tmp_path / FOLDER).iterdir()
    left = unread.read_bytes()
    assert history.record("ab" * 32, {"policy.yaml": "x"}, ("policy.yaml",), 9)
    for _ in range(2):
        (number,) = history.numbers()
        one = history.read(number)
        assert (one.number, one.unread, one.since_ms, one.by) == (1, False, 5, "somebody")
        unread.write_bytes(left)


def test_numbers_go_on_behind_a_million(tmp_path: Path) -> None:
    """A gateway that was taken over reports a million digests in a few hours: what comes behind them is seen, kept once
    and removed like any other."""
    history = PolicyHistory(tmp_path)
    history.record_unread("ab" * 32, 1)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.rename(path.with_name(path.name.replace("000001", "999999")))
    for number in range(module.MAX_UNREAD + 5):
        assert history.record_unread(f"{number:064x}", number)
    assert history.numbers()[0] == 1_000_000 + module.MAX_UNREAD + 4
    assert len(list((tmp_path / FOLDER).iterdir())) == module.MAX_UNREAD


@pytest.mark.parametrize("digest", ["", "z" * 64, "ab", "/../../../x", "AB" * 32, "ab" * 32 + "\n"])
def test_what_is_no_digest_has_no_version(tmp_path: Path, digest: str) -> None:
    """A gateway that was taken over reports any text: its file would not be found again, so that nothing would ever
    remove it. Control: the tests above."""
    with pytest.raises(ConfigError, match="digest of no policy"):
        PolicyHistory(tmp_path).record_unread(digest, 1)
    assert not list(tmp_path.iterdir())


def test_a_history_of_a_million_versions_goes_on(tmp_path: Path) -> None:
    """The version behind number 999,999 is the newest, and those before it are still there and go when they are too
    many."""
    history = PolicyHistory(tmp_path)
    history.record("ab" * 32, {"policy.yaml": "a"}, ("policy.yaml",), 1)
    (first,) = (tmp_path / FOLDER).iterdir()
    first.rename(first.with_name(first.name.replace("000001", "999999")))
    for number in range(2):
        assert history.record(f"{number:064x}", {"policy.yaml": str(number)}, ("policy.yaml",), number)
    assert history.numbers() == [1_000_001, 1_000_000, 999_999]
    assert history.read(1_000_001).files == {"policy.yaml": "1"}
