"""``athanor statement``: made by the operator, verified by the tenant and by an auditor."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import KINDS, Entry, entry
from appliance.common.audit.log import open_log
from appliance.common.audit.statement import Head, total
from appliance.operator import statements
from tests.appliance import golden
from tests.appliance.operator.cli.conftest import Run

GOLDEN = Path(__file__).parent / "golden"

BEGIN = 1_790_812_800_000
"""2026-10-01 in milliseconds."""

DAY_MS = 86_400_000


def request(tenant: str, number: int, model: str = "athanor-mini") -> Entry:
    """An entry of a request."""
    fields: dict[str, str | int] = {name: "x" if of is str else 0 for name, of in KINDS["request"].items()}
    numbers = {"input_tokens": 10 + number, "cached_tokens": 3, "output_tokens": 2, "cost": 1_000_000 * number}
    return entry("request", **(fields | numbers | {"tenant": tenant, "request": f"r{number}", "model": model}))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with requests of two tenants over fifty days, in batches as they are written."""
    audit = open_log(tmp_path / "audit")
    for day in range(50):
        batch = [
            request("alpha", day, "big" if day % 2 else "small"),
            request("beta", day),
            entry("gap", where="x", dropped=1),
        ]
        audit.append([(BEGIN + (day - 10) * DAY_MS, one) for one in batch])
    audit.close()
    return tmp_path / "audit"


OCTOBER = ("--since", "2026-10", "--until", "2026-11")


@pytest.fixture
def statement(run: Run, log: Path) -> Path:
    """October's statement of alpha."""
    path = log.parent / "alpha.statement"
    told = run("statement", "create", "--tenant", "alpha", *OCTOBER, "--from", str(log), "--out", str(path))
    assert told.exit_code == 0, told.stderr
    assert "public.key" in told.stderr
    return path


def test_the_tenant_verifies_it_with_the_public_key_alone(run: Run, log: Path, statement: Path) -> None:
    """Only the statement and the key are there; the table has models, sums and time."""
    key = log.parent / "key"
    (log / files.PUBLIC_KEY).rename(key)
    shutil.rmtree(log)
    told = run("statement", "verify", str(statement), "--key", str(key))
    assert told.exit_code == 0, told.stderr
    assert "the signature holds" in told.stdout
    found = json.loads(run("statement", "verify", str(statement), "--key", str(key), "-o", "json").stdout)
    assert (found["ok"], found["tenant"], found["requests"], found["compared"]) == (True, "alpha", 31, False)
    assert found["since"] == "2026-10-01T00:00:00Z"
    assert found["cost"] == "0.775"  # the days 10 to 40
    assert found["models"]["big"]["requests"] + found["models"]["small"]["requests"] == 31
    golden.check(GOLDEN / "statement-verify.txt", without_log(told.stdout))


def without_log(text: str) -> str:
    """The text with a fixed name of the log, which is random."""
    return re.sub(r"athanor\.audit/\S+", "athanor.audit/NAME", text)


def test_an_auditor_compares_it_with_the_log(run: Run, log: Path, statement: Path) -> None:
    """The log that it was made from has exactly what it states, also when more was written since."""
    verify = ("statement", "verify", str(statement), "--key", str(log / files.PUBLIC_KEY), "--log", str(log))
    assert "the log has exactly this" in run(*verify).stdout
    audit = open_log(log)
    audit.append([(BEGIN + DAY_MS, request("alpha", 99))])
    audit.close()
    told = run(*verify)
    assert (told.exit_code, "the log has exactly this" in told.stdout) == (0, True)


def test_a_statement_agrees_with_the_log_after_its_tenant_was_unlinked(run: Run, tmp_path: Path) -> None:
    """A log with pseudonyms, whose tenant is shredded in the middle of a month: an older statement compares as before,
    with the credentials under which requests came. Control: a log in which one request came from another credential
    differs. What is stated anew is under the name that is left, and under the pseudonym."""
    folder = tmp_path / "audit"
    audit = open_log(folder, pseudonyms=True)
    for number in range(6):
        one = request("alpha", number)
        audit.append([(BEGIN + number, Entry("request", one.fields | {"principal": f"key:{number % 2}"}))])
    kept = tmp_path / "kept"
    create = ("statement", "create", "--tenant", "alpha", *OCTOBER, "--from", str(folder), "--out", str(kept))
    assert run(*create).exit_code == 0
    verify = ("statement", "verify", str(kept), "--key", str(folder / files.PUBLIC_KEY), "--log", str(folder))
    assert "the log has exactly this" in run(*verify).stdout
    pseudonym = audit.names.pseudonym("alpha")
    audit.names.forget("alpha")
    assert "the log has exactly this" in run(*verify).stdout
    audit.append([(BEGIN + 7, request("alpha", 7))])
    audit.close()
    assert "the log has exactly this" in run(*verify).stdout
    for name, count in (("alpha", 1), (pseudonym, 6)):
        text = run("statement", "create", "--tenant", name, *OCTOBER, "--from", str(folder)).stdout
        assert json.loads(text.split("\n")[-3])["requests"] == count
    swapped = kept.read_text().replace('"principal":"key:1"', '"principal":"key:0"', 1)
    values = [json.loads(line) for line in swapped.split("\n")[2:-3]]
    assert statements.compare(statements.Statement(head_of(swapped), tuple(values), total(values)), folder)


def head_of(text: str) -> Head:
    """The head of a statement's text."""
    return Head(**json.loads(text.split("\n")[1]))


def test_a_statement_that_leaves_a_request_out_differs(
    run: Run, log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An operator with the key can state what is not so: the signature holds, the comparison finds it."""
    honest = statements._requests

    def dishonest(*given):
        return [one for one in honest(*given) if one["request"] != "r20"]

    monkeypatch.setattr(statements, "_requests", dishonest)
    path = tmp_path / "short"
    run("statement", "create", "--tenant", "alpha", *OCTOBER, "--from", str(log), "--out", str(path))
    monkeypatch.undo()
    plain = run("statement", "verify", str(path), "--key", str(log / files.PUBLIC_KEY))
    assert (plain.exit_code, "the signature holds" in plain.stdout) == (0, True)
    told = run("statement", "verify", str(path), "--key", str(log / files.PUBLIC_KEY), "--log", str(log))
    assert told.exit_code == 1
    assert "the log has a request that is not stated" in told.stdout
    assert "the log says something else" in told.stdout


def test_each_tenant_has_a_file_and_what_is_there_stays(run: Run, log: Path, tmp_path: Path) -> None:
    """All statements of a month are made at once, the same as one by one; a second run makes those that are missing."""
    folder = tmp_path / "statements"
    folder.mkdir()
    create = ("statement", "create", "--all", *OCTOBER, "--from", str(log), "--into", str(folder))
    told = run(*create)
    assert told.exit_code == 0, told.stderr
    files_made = [folder / f"{tenant}-2026-10.statement" for tenant in ("alpha", "beta")]
    assert told.stdout.split() == [str(path) for path in files_made]
    assert "2 statements made" in told.stderr
    one = run("statement", "create", "--tenant", "alpha", *OCTOBER, "--from", str(log))
    assert files_made[0].read_text() == one.stdout
    assert files_made[0].stat().st_mode & 0o777 == 0o640
    files_made[0].write_text("signed and sent")
    files_made[1].unlink()
    told = run(*create)
    assert (told.exit_code, told.stdout.split()) == (0, [str(files_made[1])])
    assert "1 statement made; 1 was there already" in told.stderr
    assert files_made[0].read_text() == "signed and sent"
    assert sorted(folder.iterdir()) == files_made
    key = str(log / files.PUBLIC_KEY)
    assert run("statement", "verify", str(files_made[1]), "--key", key, "--log", str(log)).exit_code == 0


def test_all_of_them_are_made_in_shares(run: Run, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than are held at once take several readings of the log, and give the same; a tenant with more than
    one statement may have is refused by name before anything is written."""
    create = ("statement", "create", "--all", *OCTOBER, "--from", str(log), "--into")
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    for folder, most in ((whole, 1_000), (shared, 40)):
        folder.mkdir()
        monkeypatch.setattr(statements, "MAX_REQUESTS", most)
        assert run(*create, str(folder)).exit_code == 0
    assert [path.read_bytes() for path in sorted(whole.iterdir())] == [
        path.read_bytes() for path in sorted(shared.iterdir())
    ]
    monkeypatch.setattr(statements, "MAX_REQUESTS", 30)
    (few := tmp_path / "few").mkdir()
    told = run(*create, str(few))
    assert (told.exit_code, "alpha has more than 30 requests" in told.stderr) == (1, True)
    assert list(few.iterdir()) == []


def test_whose_statements_has_to_be_said(run: Run, log: Path, tmp_path: Path) -> None:
    """One tenant or all, each with its own place for the text; a folder has to be there."""
    for wrong in (
        (),
        ("--all",),
        ("--all", "--tenant", "alpha", "--into", str(tmp_path)),
        ("--tenant", "alpha", "--into", str(tmp_path)),
        ("--all", "--into", str(tmp_path), "--out", "x"),
    ):
        told = run("statement", "create", *wrong, *OCTOBER, "--from", str(log))
        assert (told.exit_code, "--all --into DIR" in told.stderr) == (2, True), wrong
    told = run("statement", "create", "--all", *OCTOBER, "--from", str(log), "--into", str(tmp_path / "none"))
    assert (told.exit_code, "is no folder" in told.stderr) == (1, True)


@pytest.mark.parametrize(
    ("since", "until", "name"),
    [
        ("2026-10-01", "2026-11-01", "acme-2026-10"),
        ("2026-12-01", "2027-01-01", "acme-2026-12"),
        ("2026-10-01", "2026-12-01", "acme-20261001T000000Z-20261201T000000Z"),
        ("2026-10-05", "2026-11-05", "acme-20261005T000000Z-20261105T000000Z"),
        ("2026-10-01T00:00:01", "2026-11-01", "acme-20261001T000001Z-20261101T000000Z"),
    ],
)
def test_a_file_is_named_by_its_month(since: str, until: str, name: str) -> None:
    """A whole month by year and month, any other time by both of its ends, so that no two times share a name."""
    both = (int(datetime.fromisoformat(one).replace(tzinfo=UTC).timestamp() * 1_000) for one in (since, until))
    assert statements.statement_name("acme", *both) == f"{name}.statement"


def test_a_changed_statement_is_refused(run: Run, log: Path, statement: Path) -> None:
    """One digit of one cost: status 1, and why."""
    statement.write_bytes(statement.read_bytes().replace(b'"cost":15000000', b'"cost":14000000', 1))
    told = run("statement", "verify", str(statement), "--key", str(log / files.PUBLIC_KEY))
    assert (told.exit_code, "changed after it was signed" in told.stderr) == (1, True)


def test_nothing_is_stated_from_a_log_that_is_not_whole(run: Run, log: Path) -> None:
    """A changed entry, and a time whose segments were moved away, are refused with the reason."""
    path = next(one for one in files.segment_paths(log) if b'"cost":15000000' in one.read_bytes())
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b'"cost":15000000', b'"cost":14000000', 1))
    create = ("statement", "create", "--tenant", "alpha", *OCTOBER, "--from", str(log))
    told = run(*create)
    assert (told.exit_code, "is not whole" in told.stderr) == (1, True)
    path.write_bytes(kept)
    assert run(*create).stdout.startswith("athanor.statement/2\n")


def test_a_time_that_was_moved_away_is_not_stated(run: Run, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the oldest segments, their time cannot be stated; later times can."""
    monkeypatch.setattr("appliance.common.audit.log.SEGMENT_BYTES", 1)
    audit = open_log(log)
    for day in range(45, 60):
        audit.append([(BEGIN + day * DAY_MS, request("alpha", day))])
    audit.close()
    for path in files.segment_paths(log):
        if json.loads(files.read_segment(path).lines[0])["t"] < BEGIN + DAY_MS:
            path.unlink()
            path.with_suffix(files.CHECKPOINT_SUFFIX).unlink()
    create = ("statement", "create", "--tenant", "alpha", "--from", str(log))
    told = run(*create, *OCTOBER)
    assert (told.exit_code, "were moved away" in told.stderr) == (1, True)
    told = run(*create, "--since", "2026-11-20", "--until", "2026-12")
    assert (told.exit_code, told.stdout.count('"request":')) == (0, 10)


def test_what_cannot_be_done_is_told(run: Run, log: Path, statement: Path, tmp_path: Path) -> None:
    """A file that is there, another key, a missing one, a time that ends before it begins, a missing statement."""
    create = ("statement", "create", "--tenant", "alpha", "--from", str(log))
    told = run(*create, *OCTOBER, "--out", str(statement))
    assert (told.exit_code, "is there already" in told.stderr) == (1, True)
    other = open_log(tmp_path / "other")
    other.close()
    told = run(*create, "--signing-key", str(tmp_path / "other" / files.SIGNING_KEY))
    assert (told.exit_code, "is not the key that the log" in told.stderr) == (1, True)
    told = run(*create, "--signing-key", str(tmp_path / "none"))
    assert (told.exit_code, "cannot use the signing key" in told.stderr) == (1, True)
    assert run(*create, "--since", "2026-11", "--until", "2026-10").exit_code == 2
    assert run("statement", "verify", str(tmp_path / "none"), "--key", str(log / files.PUBLIC_KEY)).exit_code == 1
    assert run("statement", "verify", str(statement), "--key", str(tmp_path / "none")).exit_code == 1
    told = run("statement", "verify", str(statement), "--key", str(tmp_path / "other" / files.PUBLIC_KEY))
    assert (told.exit_code, "is of the log" in told.stderr) == (1, True)
