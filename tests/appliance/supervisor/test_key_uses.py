"""Last uses of keys in the supervisor: merged, bounded, written now and then, and of a hostile gateway's word."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.common.control import KeysUsed
from appliance.common.errors import ConfigError, ControlError
from appliance.common.key_uses import NAME, read_uses, write_uses
from appliance.supervisor import key_uses
from appliance.supervisor.key_uses import AHEAD_S, MAX_KEYS_TOLD, KeyUseKeeper

NOW = 1_800_000_000


def uses_in(folder: Path) -> KeyUseKeeper:
    """A store at a fixed time."""
    found = KeyUseKeeper(folder, lambda: float(NOW))
    found.load()
    return found


def test_uses_survive_a_restart(tmp_path: Path) -> None:
    """The latest time of each secret; an earlier one, and one beyond the clock, change nothing."""
    first = uses_in(tmp_path)
    first.take(KeysUsed({"acme-1@5": NOW - 10, "acme-2@5": NOW - 20}))
    first.take(KeysUsed({"acme-1@5": NOW - 30, "acme-2@5": NOW + AHEAD_S + 1}))
    first.close()
    assert read_uses(tmp_path) == {"acme-1@5": NOW - 10, "acme-2@5": NOW - 20}
    second = uses_in(tmp_path)
    second.take(KeysUsed({"acme-2@5": NOW}))
    second.close()
    assert read_uses(tmp_path) == {"acme-1@5": NOW - 10, "acme-2@5": NOW}


def test_nothing_new_is_not_written(tmp_path: Path) -> None:
    """However often a use is told, the file is written for a change alone."""
    uses = uses_in(tmp_path)
    uses.close()
    assert not (tmp_path / NAME).exists() and read_uses(tmp_path) == {}
    uses.take(KeysUsed({"acme-1@5": NOW}))
    uses.close()
    (tmp_path / NAME).unlink()
    uses._changed = False
    uses.take(KeysUsed({"acme-1@5": NOW}))
    uses.close()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "used", [{"../x@1": 1}, {"acme-1": 1}, {"acme-1@x": 1}, {f"k{number}@1": 1 for number in range(MAX_KEYS_TOLD + 1)}]
)
def test_a_hostile_message_is_refused(tmp_path: Path, used: dict[str, int]) -> None:
    """Names of no secret, and more than a gateway tells at once, break the protocol; nothing of them is kept."""
    uses = uses_in(tmp_path)
    with pytest.raises(ControlError):
        uses.take(KeysUsed(used))
    uses.close()
    assert read_uses(tmp_path) == {}


def test_no_gateway_fills_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, those that were used the longest ago are forgotten."""
    monkeypatch.setattr(key_uses, "MAX_USES", 3)
    uses = uses_in(tmp_path)
    for number in range(10):
        uses.take(KeysUsed({f"k{number % 5}@1": NOW - 10 + number}))
    uses.close()
    assert set(read_uses(tmp_path)) == {"k2@1", "k3@1", "k4@1"}


@pytest.mark.parametrize("text", ["", "[]", '{"used": []}', '{"used": {"acme-1@1": "x"}}', '{"used": {"x": 1}}'])
def test_a_damaged_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    """It is a typed error to a reader, and no reason for a supervisor not to start. Control: a whole one is read."""
    write_uses(tmp_path, {"acme-1@1": 7})
    assert read_uses(tmp_path) == {"acme-1@1": 7}
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigError):
        read_uses(tmp_path)
    uses = uses_in(tmp_path)
    uses.take(KeysUsed({"acme-2@1": NOW}))
    uses.close()
    assert read_uses(tmp_path) == {"acme-2@1": NOW}
