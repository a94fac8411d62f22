"""The soak's own judgements: what is excused and what is not, what is a leak and what is noise; no appliance runs."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import sys
import time
from pathlib import Path

import pytest

from bench.soak import census, controls, memory
from bench.soak.answers import CUT, RIGHT, UNTYPED, WRONG, Answer, compare, of_document, of_error, of_stream
from bench.soak.clients import dechunk, judge
from bench.soak.errors import UnavailableError, UsageError
from bench.soak.faults import memory as faults_memory
from bench.soak.faults.catalogue import FAULTS, KINDS, find, is_gentle, sequence
from bench.soak.faults.descriptors import exhausted
from bench.soak.load import Heard, Phases
from bench.soak.log_watch import LogWatch
from bench.soak.report import Control, Soak, Turn
from bench.soak.room import refuse_covered
from isolation.host.process import spawn


def error(kind: str, code: str) -> bytes:
    """The body of an error."""
    return json.dumps({"error": {"type": kind, "code": code, "message": "m", "param": None}}).encode()


def test_documented_errors_have_their_reason_and_others_none() -> None:
    """Status, type and code must be those of one row of the table of errors; a defect is never a documented error."""
    assert of_error(503, error("service_unavailable_error", "server_is_overloaded")).kind == "unavailable"
    assert of_error(None, error("service_unavailable_error", "server_is_overloaded")).kind == "unavailable"
    assert of_error(500, error("service_unavailable_error", "server_is_overloaded")).kind == UNTYPED
    assert of_error(500, error("server_error", "internal_error")).kind == UNTYPED
    assert of_error(502, b"<html>bad gateway</html>").kind == UNTYPED


def test_a_wrong_answer_is_seen_and_a_cut_one_must_be_a_beginning() -> None:
    """Another text is wrong; so is one that was cut and does not begin as the right one."""
    assert compare(Answer(RIGHT, "abc"), "abc").kind == RIGHT
    assert compare(Answer(RIGHT, "abd"), "abc").kind == WRONG
    assert compare(Answer(CUT, "ab"), "abc").kind == CUT
    assert compare(Answer(CUT, "b"), "abc").kind == WRONG
    assert compare(Answer(RIGHT, "[[0.1001, 2.0]]"), "[[0.1, 2.0]]").kind == RIGHT
    for other in ("[[0.1002, 2.0]]", "[[0.1]]", "[[0.1, 2.0], [0.1, 2.0]]", "[[0.1, 2.0]"):
        assert compare(Answer(RIGHT, other), "[[0.1, 2.0]]").kind == WRONG


def test_a_stream_is_right_only_with_its_end() -> None:
    """Events without [DONE] were cut; an error among them is the answer; half an event is what a cut leaves."""
    event = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
    assert of_stream(event + b"data: [DONE]\n\n") == Answer(RIGHT, "a")
    assert of_stream(event) == Answer(CUT, "a")
    assert of_stream(event + event[:20]) == Answer(CUT, "a")
    failed = b"data: " + error("service_unavailable_error", "server_is_overloaded") + b"\n\n"
    assert of_stream(event + failed).kind == "unavailable"
    assert of_document(b"{}").kind == UNTYPED


def test_an_answer_is_read_as_http_says() -> None:
    """Chunks are put together, an answer that is shorter than it said was cut, and silence was too."""
    assert dechunk(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == (b"abcde", True)
    assert dechunk(b"3\r\nabc\r\n2\r\nd") == (b"abcd", False)
    body = b'{"choices": [{"text": "a", "finish_reason": "stop"}]}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    assert judge(head % len(body) + body) == Answer(RIGHT, "a|stop")
    assert judge(head % (len(body) + 1) + body).kind == CUT
    assert judge(b"").kind == CUT


def test_what_is_excused_follows_from_the_moments_of_a_request() -> None:
    """A request may meet what any phase that it touched allows, and nothing of a phase before or after it."""
    phases = Phases()
    phases.begin(10.0, frozenset({"unavailable"}))
    assert "unavailable" in phases.excused(5.0, 11.0)
    assert "unavailable" not in phases.excused(5.0, 9.0)
    phases.end(20.0)
    assert "unavailable" in phases.excused(19.0, 30.0)
    assert "unavailable" not in phases.excused(21.0, 30.0)
    heard = Heard()
    heard.add("x", Answer("unavailable"), phases.excused(21.0, 30.0))
    heard.add("x", Answer(WRONG), phases.excused(19.0, 30.0) | {WRONG})
    assert len(heard.breaches) == 2
    heard.add("x", Answer("unavailable"), phases.excused(19.0, 30.0))
    assert len(heard.breaches) == 2


def test_a_leak_is_told_from_noise() -> None:
    """The soak's own controls: 200 kB a look in a long run and 1 MiB in a short one are seen, a heap that finds its
    size is not, all under noise of 2 MiB; and so is this process when it takes 1 MiB a look."""
    found = controls.grown()
    assert found.seen, found.said
    found = controls.taken()
    assert found.seen, found.said


def test_rings_and_files_are_no_memory_of_a_process(tmp_path: Path) -> None:
    """Pages of a ring, and of a file that is mapped, count for nothing; those of any other memory file do (control)."""
    size = 16 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    zeros = bytes(size)
    for path, grows in ((None, False), ("athanor-ipc", False), ("other", True)):
        fd = os.memfd_create(path) if path else os.open(tmp_path / "file", os.O_RDWR)
        os.truncate(fd, size)
        with mmap.mmap(fd, size) as pages:
            # What ran in this process before may give memory back at any time, so the looks lie close together.
            before = memory.made_bytes(os.getpid())
            if path:
                pages[:] = zeros
            assert sum(pages[:: mmap.PAGESIZE]) == 0
            assert (memory.made_bytes(os.getpid()) - before > size // 2) is grows
        os.close(fd)
    assert memory.made_bytes(2**22 + 1) == 0


def test_a_new_process_begins_a_new_line_and_outliers_move_nothing() -> None:
    """Lives that begin high or low are no growth, nor is one look in five at a bad moment."""
    draw = random.Random(3)
    samples = [
        memory.Sample("room", (life, 0), life * 400.0 + at, (life % 3) * (50 << 20) + draw.randrange(1 << 18))
        for life, at in itertools.product(range(6), range(0, 400, 40))
    ]
    odd = [
        memory.Sample(one.room, one.life, one.at_s, one.size + (draw.random() < 0.2) * (30 << 20)) for one in samples
    ]
    for looked in (samples, odd):
        (found,) = memory.growth(looked)
        assert not found.leaks
    assert memory.growth(samples[:5]) == []


def test_the_first_minutes_of_a_life_are_no_leak_and_no_proof_of_none() -> None:
    """20 MiB in a life of two minutes says nothing; in one of ten, at the same rate, it is a leak (control)."""

    def life(minutes: int) -> list[memory.Sample]:
        looks = range(0, minutes * 60, 10)
        return [memory.Sample("text", (1, 1), at, (150 << 20) + at * (20 << 20) // 120) for at in looks]

    assert memory.growth(life(2)) == []
    (found,) = memory.growth(life(10))
    assert found.leaks


def test_counts_may_exceed_by_their_slack_and_no_more() -> None:
    """Each kind has its own slack; a kind without one must be as before."""
    before = {"sockets gateway": 5, "mounts": 30}
    assert census.exceeding(before, {"sockets gateway": 8, "mounts": 30}) == []
    assert census.exceeding(before, {"sockets gateway": 9, "mounts": 31}) == [
        "mounts: 31 where 30 were",
        "sockets gateway: 9 where 5 were",
    ]


def test_descriptors_and_threads_are_counted_by_kind() -> None:
    """The soak's own control, in this process: pipes, memory files, events, files and threads are all seen."""
    found = controls.own_process()
    assert found.seen, found.said


def test_the_log_is_read_from_where_it_ended(tmp_path: Path) -> None:
    """Half a line waits for its end, warnings are counted, a traceback is a defect once."""
    path = tmp_path / "log"
    watch = LogWatch(path)
    assert watch.look() == []
    path.write_text('{"level": "warning", "event": "lost"}\n{"level": "error", "exc')
    assert watch.look() == []
    with path.open("a") as file:
        file.write('eption": "Traceback (most recent call last): y"}\n')
    assert len(watch.look()) == 1
    assert watch.look() == []
    assert watch.problems == {"warning: lost": 1}


def test_a_round_has_one_of_each_kind_at_a_time_and_those_that_end_processes_first() -> None:
    """The first faults of a run, as many as there are kinds, are of different kinds, and its gentle ones come last; so
    the shortest run has met everything and then has long lives."""
    for seed in range(5):
        first = list(itertools.islice(sequence(seed), len(KINDS)))
        assert {next(kind for kind in KINDS if fault in kind) for fault in first} == set(KINDS)
        assert [is_gentle(fault) for fault in first] == sorted(is_gentle(fault) for fault in first)


def test_one_seed_is_one_sequence_and_every_fault_is_in_each_round() -> None:
    """The same seed gives the same order; a round has every fault once; names are unique and found."""
    first, again, other = (list(itertools.islice(sequence(seed), 2 * len(FAULTS))) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.name for fault in first[: len(FAULTS)]} == {fault.name for fault in FAULTS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert list(itertools.islice(sequence(1, (find("kill-text"),)), 2)) == [find("kill-text")] * 2
    with pytest.raises(UsageError, match="there is no fault 'kill-cat'"):
        find("kill-cat")


def test_a_run_fails_by_a_breach_or_a_blind_control_and_says_how_to_repeat_it() -> None:
    """One breach is enough, and so is one control that saw nothing; the report has the command."""
    found = Soak(7, 3.0, turns=[Turn(4, "kill-text", ready_s=1.0)], controls=[Control("mounts", True)])
    assert not found.failed
    assert "sound" in found.text()
    found.turns[0].breaches.append("a thing")
    assert found.failed
    assert "python -m bench.soak --fault kill-text --seed 7 --turn 4" in found.text()
    assert json.loads(json.dumps(found.to_dict()))["failed"] is True
    assert Soak(7, 3.0, controls=[Control("mounts", False)]).failed


def test_no_descriptor_is_left_where_none_shall_be() -> None:
    """A process with gaps between its descriptors can open no more than it is left, here the one that the look at its
    own descriptors took; afterwards it can (control)."""
    with open(os.devnull) as one, open(os.devnull) as other:
        gap = one.fileno()
        one.close()
        with exhausted(os.getpid(), 0):
            kept = os.dup(other.fileno())
            assert kept == gap
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(other.fileno())
        more = os.dup(other.fileno())
        os.close(more)
        os.close(kept)


def test_what_its_disks_would_hide_is_not_run() -> None:
    """A checkout under a directory that becomes an empty disk is refused before anything is mounted; others are not."""
    refuse_covered(Path("/srv/athanor"), Path("/temporary/venv"))
    for path in ("/tmp/athanor/bench", "/run/athanor", "/dev/shm/venv"):
        with pytest.raises(UnavailableError, match="run it elsewhere"):
            refuse_covered(Path("/srv/athanor"), Path(path))


def test_who_is_put_among_a_sandbox_wants_more_at_once() -> None:
    """Put into a group of 32 MiB before it has even looked where it is, the program that wants 64 MiB is ended for it;
    put into a wide one (control) it has them."""
    home = faults_memory.memory_home()
    if home is None or os.geteuid() != 0:
        pytest.skip("no group of the memory controller can be made here")
    for limit, ends in ((32 << 20, True), (512 << 20, False)):
        group = home / f"athanor-test-{os.getpid()}-{limit}"
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit))
            with spawn((sys.executable, "-S", "-c", faults_memory.GLUTTON, group.name)) as glutton:
                (group / "cgroup.procs").write_text(str(glutton.pid))
                until, held = time.monotonic() + 20, 0
                while glutton.poll() is None and held < 64 << 20 and time.monotonic() < until:
                    time.sleep(0.02)
                    held = int((group / "memory.usage_in_bytes").read_text())
                assert (glutton.poll() is not None, held >= 64 << 20) == (ends, not ends)
        finally:
            group.rmdir()
