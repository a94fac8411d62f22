"""The doctor on the account: a whole one, one that lags, a damaged one, and one that it may not see."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import entry
from appliance.common.audit.log import open_log
from appliance.common.audit.witnessing import WitnessState, states_file, states_text
from appliance.common.config import ApplianceConfig
from appliance.common.config_places import AuditConfig
from appliance.common.operator_config import OperatorApiConfig
from appliance.common.usage.book import FOLDER, NAME, open_book
from appliance.common.usage.replay import replay
from appliance.operator.doctor.account import MOST_BEHIND, check_account, look_at_account, with_witnesses
from appliance.operator.doctor.facts import KeptAccount
from appliance.operator.doctor.finding import Severity
from appliance.operator.doctor.operator_api import check_operator_api, look_at_operator_api


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An audit folder with thirty entries, all counted."""
    log = open_log(tmp_path)
    log.append([(1_790_812_800_000, entry("refused", outcome="X", reason="absent", count=1))] * 30)
    book, _ = open_book(tmp_path)
    replay(book, tmp_path, log.name)
    book.close()
    log.close()
    return tmp_path


def test_a_whole_account_is_well(folder: Path) -> None:
    """Numbers of log and book agree; entries that came since are told, and are no fault."""
    found = look_at_account(folder)
    assert (found.entries, found.counted, found.problem, found.damaged) == (30, 30, "", ())
    (told,) = check_account(found)
    assert (told.level, told.what) == (Severity.OK, "30 entries in the audit log, all counted in the usage book")
    log = open_log(folder)
    log.append([(1_790_812_800_000, entry("gap", where="x", dropped=1))])
    log.close()
    (told,) = check_account(look_at_account(folder))
    assert (told.level, "1 not yet counted" in told.what) == (Severity.OK, True)


def test_a_book_that_lags_far_is_a_warning() -> None:
    """So many entries are not on their way any more; one fewer may be (control)."""
    account = KeptAccount(folder="/a", entries=MOST_BEHIND + 6, counted=5)
    assert [one.level for one in check_account(account)] == [Severity.WARNING]
    account = KeptAccount(folder="/a", entries=MOST_BEHIND + 5, counted=5)
    assert [one.level for one in check_account(account)] == [Severity.OK]


def test_a_book_that_is_missing_has_counted_nothing(folder: Path) -> None:
    """Without a file nothing is counted, and nothing is made."""
    (folder / FOLDER / NAME).unlink()
    assert look_at_account(folder).counted == 0
    assert not (folder / FOLDER / NAME).exists()


def test_damage_is_told(folder: Path) -> None:
    """A book of noise, a log whose header is none, and what was moved aside before."""
    (folder / "damaged-1").mkdir()
    assert look_at_account(folder).damaged == ("damaged-1",)
    (warned, fine) = check_account(look_at_account(folder))
    assert (warned.level, "damaged-1" in warned.what, fine.level) == (Severity.WARNING, True, Severity.OK)
    for beside in (folder / FOLDER).glob(f"{NAME}-*"):
        beside.unlink()
    (folder / FOLDER / NAME).write_bytes(os.urandom(8_192))
    (broken,) = check_account(look_at_account(folder))
    assert (broken.level, "usage book cannot be read" in broken.what) == (Severity.PROBLEM, True)
    files.segment_paths(folder)[0].write_bytes(b"noise\n")
    (broken,) = check_account(look_at_account(folder))
    assert (broken.level, "audit log is damaged" in broken.what) == (Severity.PROBLEM, True)


def test_a_folder_without_a_log_is_a_note(tmp_path: Path) -> None:
    """Empty, and not there at all: the first start begins it."""
    for place in (tmp_path, tmp_path / "none"):
        (told,) = check_account(look_at_account(place))
        assert (told.level, "no audit log yet" in told.what) == (Severity.NOTE, True)


def test_what_it_may_not_see_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is closed to the user is no fault of the account."""

    def closed(_folder: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(files, "segment_paths", closed)
    (told,) = check_account(look_at_account(folder))
    assert (told.level, "closed to this user" in told.what) == (Severity.NOTE, True)


def test_the_last_cosignatures_are_told(folder: Path) -> None:
    """Two witnesses that cosigned in time: the moment by which both had. One that has cosigned nothing yet is a
    warning, with the timer that asks it."""
    key = "w.example.org/w1+10e47819+BIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c"
    other = "notary.example.org+595d6896+BIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU"
    witnesses = [{"key": one, "folder": "/mnt/x"} for one in (key, other)]
    content = {"directory": str(folder), "tiles": str(folder / "tiles"), "witnesses": witnesses, "witness_age": 720}
    config = AuditConfig.model_validate(content)
    now = int(time.time())
    states = [WitnessState(one.name, 3, now - 60 * number, now) for number, one in enumerate(config.witnesses)]
    states_file(folder / "tiles").write_bytes(states_text(states))
    told = [one.what for one in check_account(with_witnesses(look_at_account(folder), config))]
    at = datetime.fromtimestamp(now - 60, UTC).strftime("%Y-%m-%d %H:%M UTC")
    assert told[0] == f"2 witnesses cosigned the audit log in time, all by {at}"
    states_file(folder / "tiles").write_bytes(states_text(states[:1]))
    first = check_account(with_witnesses(look_at_account(folder), config))[0]
    assert first.level is Severity.WARNING
    assert "athanor-witness.timer" in first.mend


def test_the_operators_api_is_looked_at() -> None:
    """A socket that takes connections, one that nothing listens on, and an absent one; where none is configured nothing
    is said."""
    with tempfile.TemporaryDirectory() as made, socket.socket(socket.AF_UNIX) as listener:
        path = Path(made) / "api.sock"
        config = ApplianceConfig.model_construct(operator_api=OperatorApiConfig(socket=path))
        listener.bind(str(path))
        silent = look_at_operator_api(config)
        listener.listen()
        found = look_at_operator_api(config)
        path.unlink()
        absent = look_at_operator_api(config)
    assert silent is not None and found is not None and absent is not None
    assert [check_operator_api(one).level for one in (found, silent, absent)] == [
        Severity.OK,
        Severity.WARNING,
        Severity.WARNING,
    ]
    assert "connection refused" in check_operator_api(silent).what
    assert look_at_operator_api(ApplianceConfig.model_construct(operator_api=None)) is None
