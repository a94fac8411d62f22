"""``athanor audit show`` and ``export``: entries by kind, tenant, model and time; once each, also after a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import KINDS, Entry, entry, to_line
from appliance.common.audit.log import open_log
from appliance.operator.audit_entries import in_order
from tests.appliance.operator.cli.conftest import Run

BEGIN = 1_790_812_800_000
"""2026-10-01 in milliseconds."""

HOUR_MS = 3_600_000


def one_entry(kind: str, **given: str | int) -> Entry:
    """An entry with its other fields filled in."""
    fields: dict[str, str | int] = {name: "x" if of is str else 1 for name, of in KINDS[kind].items()}
    return entry(kind, **(fields | given))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of forty entries in ten segments, one an hour: requests and denials of two tenants."""
    monkeypatch.setattr("appliance.common.audit.log.SEGMENT_BYTES", 1)
    audit = open_log(tmp_path / "audit")
    for hour in range(10):
        names = {"tenant": ("alpha", "beta")[hour % 2], "model": ("small", "big")[hour % 3 == 0]}
        batch = [one_entry("request", **names), one_entry("denied", **names), one_entry("refused"), one_entry("gap")]
        audit.append([(BEGIN + hour * HOUR_MS, one) for one in batch])
    audit.close()
    assert len(files.segment_paths(tmp_path / "audit")) == 10
    return tmp_path / "audit"


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ((), range(20, 40)),
        (("--last", "3"), range(37, 40)),
        (("--kind", "gap", "--kind", "refused", "--last", "4"), (34, 35, 38, 39)),
        (("--tenant", "beta", "--last", "2"), (36, 37)),
        (("--tenant", "alpha", "--tenant", "beta", "--last", "3"), (33, 36, 37)),
        (("--model", "big", "--kind", "request"), (0, 12, 24, 36)),
        (("--since", "2026-10-01T08"), range(32, 40)),
        (("--since", "2026-10-01T02", "--until", "2026-10-01T03"), range(8, 12)),
        (("--until", "2026-10-01T01:00:00Z", "--kind", "request"), (0,)),
        (("--since", "2026-10-01", "--last", "2", "--tenant", "alpha"), (32, 33)),
        (("--tenant", "gamma"), ()),
    ],
)
def test_entries_are_chosen(run: Run, log: Path, options: tuple[str, ...], numbers: range) -> None:
    """The newest, by each choice alone and by several together."""
    told = run("audit", "show", "--from", str(log), "-o", "json", *options)
    assert told.exit_code == 0, told.stderr
    assert [one["n"] for one in json.loads(told.stdout)] == list(numbers)


def exported(run: Run, log: Path, *options: str) -> list[dict]:
    """Exported lines."""
    told = run("audit", "export", "--from", str(log), *options)
    assert told.exit_code == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_a_log_that_was_never_written_has_no_entries(tmp_path: Path) -> None:
    """A folder without a segment, as a new appliance's until its first entry, is no error."""
    assert list(in_order(tmp_path)) == []


def test_all_entries_are_exported_in_order(run: Run, log: Path) -> None:
    """Events of the schema, or the entries as they are in the log, chosen as ``show`` chooses."""
    events = exported(run, log)
    assert [event["metadata"]["sequence"] for event in events] == list(range(40))
    assert {event["class_uid"] for event in events} == {0, 3002, 6003}
    entries = exported(run, log, "--form", "entries", "--tenant", "beta", "--since", "2026-10-01T09")
    assert [(one["n"], one["kind"], one["tenant"]) for one in entries] == [
        (36, "request", "beta"),
        (37, "denied", "beta"),
    ]
    assert entries[0]["log"] == events[0]["metadata"]["log_name"]


def test_each_call_goes_on_where_the_last_one_ended(run: Run, log: Path, tmp_path: Path) -> None:
    """With a position each entry comes once, also those that a filter leaves out; what is written meanwhile comes
    next."""
    resume = ("--resume", str(tmp_path / "position"), "--form", "entries")
    assert [one["n"] for one in exported(run, log, *resume, "--tenant", "beta")][:2] == [4, 5]
    assert exported(run, log, *resume) == []
    audit = open_log(log)
    audit.append([(BEGIN, one_entry("gap")), (BEGIN, one_entry("refused"))])
    audit.close()
    assert [one["n"] for one in exported(run, log, *resume)] == [40, 41]
    assert exported(run, log, *resume) == []


def test_a_crash_repeats_lines_and_loses_none(run: Run, log: Path, tmp_path: Path) -> None:
    """A position that was not written has the lines come again, the same as before."""
    position = tmp_path / "position"
    first = exported(run, log, "--resume", str(position))
    position.unlink()
    assert exported(run, log, "--resume", str(position)) == first


def test_another_log_is_exported_from_its_begin(run: Run, log: Path, tmp_path: Path) -> None:
    """After damage a log begins anew under another name: its first entries are not passed over."""
    position = tmp_path / "position"
    exported(run, log, "--resume", str(position))
    other = open_log(tmp_path / "other")
    other.append([(BEGIN, one_entry("gap"))])
    other.close()
    assert len(exported(run, tmp_path / "other", "--resume", str(position))) == 1


def test_what_cannot_be_exported_is_told(run: Run, log: Path, tmp_path: Path) -> None:
    """A position that is none, a folder that is not there, a damaged segment, a kind and a time that are none."""
    (tmp_path / "position").write_text("12\n")
    told = run("audit", "export", "--from", str(log), "--resume", str(tmp_path / "position"))
    assert (told.exit_code, "is no position" in told.stderr) == (1, True)
    assert run("audit", "export", "--from", str(tmp_path / "none")).exit_code == 1
    assert run("audit", "export", "--from", str(log), "--kind", "prompt").exit_code == 2
    assert run("audit", "show", "--from", str(log), "--since", "2026-10-02", "--until", "2026-10-01").exit_code == 2
    path = files.segment_paths(log)[3]
    path.write_bytes(path.read_bytes().replace(b'"kind":"gap"', b'"kind":"nap"'))
    told = run("audit", "export", "--from", str(log))
    assert (told.exit_code, "athanor audit verify tells more" in told.stderr) == (1, True)


def test_a_reader_names_its_own_position(run: Run, log: Path, tmp_path: Path) -> None:
    """Behind an entry, by log and number; from the begin where it is of another log. No file is written."""
    (first, *_) = exported(run, log, "--form", "entries")
    behind = exported(run, log, "--form", "entries", "--after", f"{first['log']}:36")
    assert [one["n"] for one in behind] == [37, 38, 39]
    assert exported(run, log, "--after", f"{first['log']}:39") == []
    assert len(exported(run, log, "--after", "athanor.audit/0000000000000000:39")) == 40
    for wrong in ("39", "log:", "log:-1", "log:01", ":3"):
        assert run("audit", "export", "--from", str(log), "--after", wrong).exit_code == 2
    both = ("--after", "log:1", "--resume", str(tmp_path / "position"))
    assert run("audit", "export", "--from", str(log), *both).exit_code == 2
    assert not (tmp_path / "position").exists()


def test_what_may_be_taken_back_is_not_exported(run: Run, log: Path, tmp_path: Path) -> None:
    """An entry whose batch is on its way, which no checkpoint covers yet: a full disk takes it back, and its number
    goes to another, which a reader that had the first would never get. Once its batch is covered it comes. Controls: it
    is in the file, and a copy of the log without checkpoints is exported as a whole."""
    resume = ("--resume", str(tmp_path / "position"), "--form", "entries")
    exported(run, log, *resume)
    newest = files.segment_paths(log)[-1]
    whole = newest.read_bytes()
    with newest.open("ab") as file:
        file.write(to_line(one_entry("gap"), 40, BEGIN) + b"\n")
    assert [one.number for one in in_order(log, 40)] == [40], "the control: it is in the file"
    assert exported(run, log, *resume) == []
    newest.write_bytes(whole)
    audit = open_log(log)
    audit.append([(BEGIN, one_entry("refused"))])
    audit.close()
    assert [(one["n"], one["kind"]) for one in exported(run, log, *resume)] == [(40, "refused")]
    for path in log.glob("*.checkpoints"):
        path.unlink()
    assert len(exported(run, log)) == 41


def test_a_log_that_is_shorter_than_the_position_is_no_log_without_news(run: Run, log: Path, tmp_path: Path) -> None:
    """A log that was cut, or put back from an older copy: the export is refused, since entries that it writes from now
    on have numbers that the reader has already. Control: a position at its very end is one without news."""
    position = tmp_path / "position"
    (first, *_) = exported(run, log, "--resume", str(position), "--form", "entries")
    assert exported(run, log, "--resume", str(position)) == [], "the control"
    files.segment_paths(log)[-1].unlink()
    for options in (("--resume", str(position)), ("--after", f"{first['log']}:39")):
        told = run("audit", "export", "--from", str(log), *options)
        assert (told.exit_code, told.stdout) == (1, "")
        assert "has 36 entries, and not the 40 before the position" in told.stderr
    assert exported(run, log, "--after", f"{first['log']}:35") == [], "the control"


def test_entries_that_were_moved_away_are_told(run: Run, log: Path) -> None:
    """Segments between the position and what is left, and one in between: the export goes on, and says on standard
    error which entries a reader misses. Control: a reader that has them is told nothing."""
    (first, *_) = exported(run, log, "--form", "entries")
    for number in (0, 1, 5):
        files.segment_paths(log)[0 if number < 2 else 3].unlink()
    told = run("audit", "export", "--from", str(log), "--after", f"{first['log']}:5")
    assert len(told.stdout.splitlines()) == 28
    assert "entries 6 to 7 are not in this folder" in told.stderr
    assert "entries 20 to 23 are not in this folder" in told.stderr
    assert (
        "not in this folder" not in run("audit", "export", "--from", str(log), "--after", f"{first['log']}:23").stderr
    )
    assert "entries 0" not in run("audit", "export", "--from", str(log)).stderr


def test_segments_of_two_logs_are_not_exported_under_one_name(run: Run, log: Path, tmp_path: Path) -> None:
    """A log that is begun anew while it is read, as after damage: what is left of the other is no part of it. And a
    position of another log is told, so that a wrong word does not look like a begin."""
    other = open_log(tmp_path / "other")
    other.append([(BEGIN, one_entry("gap"))] * 3)
    other.close()
    (alien,) = files.segment_paths(tmp_path / "other")
    (log / alien.name).write_bytes(alien.read_bytes())
    told = run("audit", "export", "--from", str(log))
    assert (told.exit_code, "is of the log" in told.stderr) == (1, True)
    told = run("audit", "export", "--from", str(tmp_path / "other"), "--after", "athanor.audit/0000000000000000:2")
    assert len(told.stdout.splitlines()) == 3
    assert "the position is of the log athanor.audit/0000000000000000" in told.stderr


def test_half_a_line_is_not_glued_to_the_next(log: Path, tmp_path: Path) -> None:
    """A call was killed, or the disk was full, in the middle of a line: the next one begins a line of its own, so that
    the entry of which half is there can be read. Controls: it adds nothing behind a whole line, nor to an empty
    file."""
    lines, position = tmp_path / "lines", tmp_path / "position"
    line = [sys.executable, "-m", "appliance.operator.cli", "audit", "export", "--from", str(log), "--form", "entries"]

    def export() -> list[str]:
        with lines.open("ab") as file:
            subprocess.run([*line, "--resume", str(position)], stdout=file, check=True)
        return lines.read_text().splitlines()

    whole = export()
    assert len(whole) == 40
    position.unlink()
    lines.write_text("".join(f"{one}\n" for one in whole[:3]) + whole[3][:20])
    assert export() == [*whole[:3], whole[3][:20], *whole]
    assert export() == [*whole[:3], whole[3][:20], *whole]
