"""The recorder: nothing waits for the disk, nothing is lost without a gap entry, the gateway hears of trouble."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.entry import Entry, entry, from_line, to_wire
from appliance.common.audit.log import AuditLog, AuditWriteError, open_log
from appliance.common.audit.names import PSEUDONYM, shown_by
from appliance.common.control import Audited, AuditState, Control, ControlError, SandboxDown, SandboxUp
from appliance.common.errors import AuditNamesError
from appliance.supervisor import audit as module
from appliance.supervisor.audit import MAX_ENTRIES, Recorder, watching
from appliance.supervisor.operator_socket import OperatorSocket
from isolation.ipc.messages import WeightForm


def refused(count: int = 1) -> Entry:
    """An entry."""
    return entry("refused", outcome="UNAUTHENTICATED", reason="absent", count=count)


def found(directory: Path) -> list[Entry]:
    """All entries of a log."""
    return [from_line(line)[2] for path in files.segment_paths(directory) for line in files.read_segment(path).lines]


class FullDisk:
    """In front of a log: takes nothing while it is full."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self.full = False
        self.opening = audit.opening

    def append(self, batch: list[tuple[int, Entry]]) -> None:
        """Pass on, or fail as a full disk does."""
        if self.full:
            raise AuditWriteError("the audit log cannot be written: No space left on device")
        self._audit.append(batch)

    def close(self) -> None:
        """Pass on."""
        self._audit.close()

    def checkpoint(self) -> str:
        """Pass on."""
        return self._audit.checkpoint()


async def test_entries_are_written_together_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst is one batch with one checkpoint; what comes later is written too, and what waits at the end."""
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    recorder = Recorder(open_log(tmp_path), lambda _: None)
    task = asyncio.create_task(recorder.run())
    for number in range(500):
        recorder.record(refused(number))
    async with asyncio.timeout(20):
        while len(found(tmp_path)) < 502:
            await asyncio.sleep(0.01)
        (path,) = files.segment_paths(tmp_path)
        while not files.read_segment(path).checkpoints:  # written right behind the entries
            await asyncio.sleep(0.01)
    assert len(files.read_segment(path).checkpoints) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    recorder.record(refused(999))
    await recorder.close()
    assert [one.kind for one in found(tmp_path)[:2]] == ["log", "keys"]
    assert found(tmp_path)[-1] == refused(999)


async def test_a_stop_in_the_middle_of_a_write_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is on its way when the supervisor stops goes on in its thread: the last one comes after it, and
    every entry is there once."""
    monkeypatch.setattr(module, "FLUSH_S", 0.0)
    audit = open_log(tmp_path)
    begun, may_go_on, together, most = threading.Event(), threading.Event(), 0, 0
    append = audit.append

    def slow(batch: list[tuple[int, Entry]]) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        begun.set()
        assert may_go_on.wait(10)
        append(batch)
        together -= 1

    monkeypatch.setattr(audit, "append", slow)
    recorder = Recorder(audit, lambda _: None)
    recorder.record(refused(1))
    task = asyncio.create_task(recorder.run())
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    recorder.record(refused(2))
    asyncio.get_running_loop().call_later(0.1, may_go_on.set)
    await recorder.close()
    assert most == 1
    assert [one.fields["count"] for one in found(tmp_path) if one.kind == "refused"] == [1, 2]


async def test_a_full_disk_is_told_and_the_gap_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is full entries wait, those beyond the bound are counted, and the gateway is told once; when there
    is room again all that waited is written, with the gap, and the gateway hears that too."""
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    disk, told = FullDisk(open_log(tmp_path)), []
    recorder = Recorder(disk, told.append, refuses=True)
    await recorder.flush()
    disk.full = True
    for number in range(25):
        recorder.record(refused(number))
        await recorder.flush()
    problem = "the audit log cannot be written: No space left on device"
    assert told == [AuditState(problem, 1, "")]
    recorder.greet()
    assert told == [AuditState(problem, 1, "")] * 2
    disk.full = False
    await recorder.flush()
    assert told[-1] == AuditState("", 0, "")
    await recorder.close()
    assert found(tmp_path)[2:] == [*map(refused, range(10)), entry("gap", where="supervisor", dropped=15)]


async def test_the_gateways_reports_are_judged(tmp_path: Path) -> None:
    """Good entries are taken, with the gap that the gateway tells; one that it may not say refuses the message."""
    recorder = Recorder(open_log(tmp_path), lambda _: None)
    recorder.take(Audited([to_wire(refused(3))], 2))
    for bad in (
        Audited([to_wire(refused()), to_wire(entry("gap", where="x", dropped=1))], 0),
        Audited(["{}"], 0),
        Audited([], -1),
        Audited([to_wire(refused())] * (MAX_ENTRIES + 1), 0),
    ):
        with pytest.raises(ControlError):
            recorder.take(bad)
    await recorder.close()
    assert found(tmp_path)[2:] == [entry("gap", where="gateway", dropped=2), refused(3)]


async def test_without_a_log_nothing_is_kept() -> None:
    """A configuration without a folder: entries go nowhere, nothing fails."""
    recorder = Recorder(None, lambda _: None)
    recorder.record(refused())
    await recorder.flush()
    await recorder.close()
    assert recorder.problem == ""


def test_sandboxes_are_recorded_once_and_without_their_words() -> None:
    """A sandbox that is offered again came up once; a death says its cause, but no last words; other messages pass, and
    the gateway is told the digest of the model's files."""
    sent: list[Control] = []
    records: list[Entry] = []

    def publish(message: Control, _fds: tuple[int, ...]) -> bool:
        sent.append(message)
        return False

    watched = watching(publish, records.append, {"m": "ab" * 32}, {"m": "ef" * 32}, "cd" * 32)
    up = SandboxUp("m", "engine", 1, 77, 0, "", {"weights": WeightForm.FP8})
    cause = "the process ended with status 1; its last words: the prompt was CANARY"
    down = SandboxDown("m", "engine", 1, 1, "failed", cause, 0.5)
    messages = [up, up, down, SandboxUp("m", "engine", 2, 78, 1, "", {}), AuditState("", 0, "")]
    assert [watched(message, ()) for message in messages] == [False] * 5
    digest = "ab" * 32
    assert sent == [replace(one, model_digest=digest) if isinstance(one, SandboxUp) else one for one in messages]
    assert [(one.fields["state"], one.fields["generation"]) for one in records] == [("up", 1), ("down", 1), ("up", 2)]
    assert records[1].fields["cause"] == "the process ended with status 1"
    assert records[0].fields["model_digest"] == "ab" * 32
    assert records[0].fields["model_signer"] == "ef" * 32
    assert records[0].fields["image"] == "cd" * 32
    assert [one.fields["weights"] for one in records] == ["fp8", "", ""]


def test_a_tenants_own_sandboxes_are_recorded_as_its_own() -> None:
    """Of the same model, role and generation: each counts for itself, a refusal too, with the tenant's name."""
    records: list[Entry] = []
    watched = watching(lambda _message, _fds: True, records.append, {"m": "ab" * 32}, {}, "")
    for tenant in ("", "a", "b", "a"):
        watched(SandboxUp("m", "text", 3, 77, 0, "", {}, tenant), ())
    watched(SandboxDown("m", "text", 0, 0, "refused", "not granted", 0.0, "c"), ())
    told = [(one.fields["state"], one.fields["tenant"]) for one in records]
    assert told == [("up", ""), ("up", "a"), ("up", "b"), ("refused", "c")]


async def test_a_shred_unlinks_what_was_recorded_before(tmp_path: Path) -> None:
    """What waits is written under the old key before that is destroyed; the operator's order is in the log under the
    pseudonym, and works where nothing of tenants is sealed. Control: a tenant that the log does not name is refused."""
    recorder = Recorder(open_log(tmp_path / "audit", pseudonyms=True), lambda _: None)
    socket = OperatorSocket(tmp_path / "s", None, lambda *_: True, recorder.record, unlink=recorder.unlink)
    await socket.open()

    async def say(tenant: str) -> dict[str, object]:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        writer.write(json.dumps({"do": "shred", "tenant": tenant}).encode() + b"\n")
        answer = json.loads(await reader.readline())
        writer.close()
        return dict(answer)

    recorder.record(entry("file", event="created", tenant="alpha", principal="key:a", file="f", bytes=1))
    answer = await say("alpha")
    assert answer == {"ok": True, "tenant": "alpha", "objects": 0, "had_key": False, "unlinked": True}
    assert (await say("omega"))["ok"] is False
    await socket.close()
    await recorder.close()
    shown = [shown_by(tmp_path / "audit")(one) for one in found(tmp_path / "audit")]
    told = [(one.kind, str(one.fields["tenant"])) for one in shown if "tenant" in one.fields]
    assert [kind for kind, _ in told] == ["file", "order", "order"]
    assert told[0][1] == told[1][1] and PSEUDONYM.fullmatch(told[0][1])
    assert told[2][1] == "omega"
    assert b"alpha" not in b"".join(path.read_bytes() for path in (tmp_path / "audit").glob("*.log"))


async def test_what_cannot_be_written_keeps_its_pseudonym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry from before a shred never comes into the log under the pseudonym of after: while the disk takes none the
    shred is refused and the key stays, and so with entries that had no place to wait. With room it goes through
    (control)."""
    audit = open_log(tmp_path, pseudonyms=True)
    recorder = Recorder(audit, lambda _: None)
    one = entry("file", event="created", tenant="alpha", principal="key:a", file="f", bytes=1)
    recorder.record(one)
    await recorder.flush()
    pseudonym = audit.names.pseudonym("alpha")

    def full(_batch: object) -> int:
        raise AuditWriteError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(audit, "append", full)
        patched.setattr(module, "MAX_PENDING", 1)
        for _ in range(2):
            recorder.record(one)
        with pytest.raises(AuditNamesError, match="No space left"):
            await recorder.unlink("alpha")
    assert audit.names.pseudonym("alpha") == pseudonym
    assert await recorder.unlink("alpha") == pseudonym
    assert audit.names.pseudonym("alpha") == ""
    await recorder.close()
    assert [one.fields["tenant"] for one in found(tmp_path) if one.kind == "file"] == [pseudonym] * 2


async def test_what_is_wrong_with_witnesses_is_told_once(tmp_path: Path) -> None:
    """The gateway hears of a witness that is late, once, and again when it has come; a gateway that attaches too."""
    told: list[AuditState] = []
    recorder = Recorder(open_log(tmp_path), told.append)
    for problem in ("late", "late", ""):
        recorder.note_witnesses(problem)
        recorder.greet()
    assert told == [AuditState("", 0, "late")] * 3 + [AuditState("", 0, "")]
    await recorder.close()
