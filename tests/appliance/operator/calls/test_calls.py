"""Collected system calls: the reporting filter, and the real programs of sandboxes, free and enforced."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.operator.calls.call_list import CallList, Condition, ListedCall, decode, encode
from appliance.operator.calls.call_names import NAMES, name_of
from appliance.operator.calls.describing import request
from appliance.operator.calls.observed import NOTIFY, reporting
from appliance.operator.calls.report import lines
from appliance.operator.calls.session import Mode, Trial, TrialOutcome, run
from appliance.operator.calls.widening import widened
from engine.config import EngineConfig, TextConfig
from engine.sandbox.allowed_calls import Bells, Call, engine_calls
from engine.sandbox.filter import ALLOW, ERRNO, MACHINES, TRAP, compile_filter
from engine.text.allowed_calls import forker_calls, grammar_calls, keeper_calls, worker_calls
from tests.engine.sandbox.test_lockdown import run as run_filter
from tests.engine.support import model_config, save_model

LISTS = {
    "engine": engine_calls(Bells(5, 6), threads=8, generates_code=True),
    "worker": worker_calls(Bells(5, 6), Bells(8, 9), 10),
    "keeper": keeper_calls(7),
    "forker": forker_calls(4),
    "grammar": grammar_calls(),
}

ENGINE_SLIPS = """
import atexit, os, sys, threading
import engine.__main__ as program

atexit.register(os.listdir, "/")

serve, go = program.serve, threading.Event()

def slip():
    os.getuid() if go.wait() else None

def slipping(*arguments):
    os.getppid()
    os.path.exists("/nowhere/to/be/found")
    go.set()
    other.join()
    serve(*arguments)

other = threading.Thread(target=slip)
other.start()
program.serve = slipping
from appliance.operator.calls import observed
sys.exit(observed.main(sys.argv[1:]))
"""
"""The engine's program with three calls beyond its list after lock-down, one by a thread that was there before; and
with one more that a library would make at the end of the process, as torch's compiler does."""

GPU_SLIPS = """
import os, sys
from dataclasses import replace
from types import SimpleNamespace
import engine.__main__ as program
from engine.sandbox.allowed_calls_gpu import Descriptors

node, other = os.memfd_create("node"), os.memfd_create("other")
lock, serve = program._lock_down, program.serve

def with_gpu(engine, *rest):
    capabilities = replace(engine.runner.capabilities, gpu=True)
    lock(SimpleNamespace(runner=SimpleNamespace(capabilities=capabilities)), *rest)

def slipping(*arguments):
    os.isatty(node)
    os.isatty(other)
    os.isatty(other)
    serve(*arguments)

program._lock_down, program.serve = with_gpu, slipping
program.find_descriptors = lambda links, ours: Descriptors((node,), ())
from appliance.operator.calls import observed
sys.exit(observed.main(sys.argv[1:]))
"""
"""The engine's program under a GPU's list, with a file for the driver's node: one ioctl on that, two on another."""

TEXT_SLIPS = """
import os, sys
import engine.text.__main__ as program
import engine.text.grammar_process as grammars

run_child, serve = grammars.run_child, program.serve

def child(*arguments):
    os.getppid()
    return run_child(*arguments)

def slipping(*arguments):
    os.getuid()
    serve(*arguments)

grammars.run_child, program.serve = child, slipping
from appliance.operator.calls import observed
sys.exit(observed.main(sys.argv[1:]))
"""
"""The text worker's program with one call beyond the worker's list, and one beyond that of each grammar's process."""


@pytest.fixture
def engine_config(tmp_path: Path) -> EngineConfig:
    """A tiny engine on two threads."""
    save_model(tmp_path, model_config(max_positions=128))
    return EngineConfig(
        model_dir=str(tmp_path), model_digest="00", kv_bytes=4 << 20, threads=2, max_num_seqs=8, max_context=128
    )


@pytest.fixture
def text_config(root: Path) -> TextConfig:
    """The text worker of the embedded model."""
    model = root / "images" / "mini" / "athanor-mini"
    if not (model / "tokenizer.json").is_file():
        pytest.skip("the embedded model is not built")
    return TextConfig(model_dir=str(model))


def outside(outcome: TrialOutcome) -> dict[str, set[str]]:
    """Names of the calls outside of each list."""
    return {program: {one["name"] for one in rows} for program, rows in outcome.outside.items()}


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("name", LISTS)
def test_a_report_stands_where_an_end_stood(name: str, machine: str) -> None:
    """For every number and some arguments: what the list ends is reported, what it allows or answers stays so; and with
    everything, each call is a report."""
    calls, arch = LISTS[name], MACHINES[machine].audit_arch
    judging, telling = compile_filter(calls, machine), reporting(calls, machine, everything=False)
    for number in range(460):
        for arguments in ((), (5, 1), (6, 0x5421), (2,)):
            ends, says = (run_filter(one, number, *arguments, arch=arch) for one in (judging, telling))
            assert says == (NOTIFY if ends == TRAP else ends)
            assert says in (NOTIFY, ALLOW) or says & 0xFFFF_0000 == ERRNO
            assert run_filter(reporting(calls, machine, everything=True), number, *arguments, arch=arch) == NOTIFY


def test_lists_travel_and_judge_as_the_filter_does() -> None:
    """A list is the same after JSON, and its entries look at the low word under the mask alone."""
    entry = ListedCall("mmap", 9, (Condition(2, (0,), 4), Condition(3, (0x22,), 0x23)), None)
    lists = [CallList("engine", (entry, ListedCall("clone3", 435, (), 38)))]
    assert decode(encode(lists)) == lists
    assert entry.allows((0, 4096, 3, 0x4022, 0, 0))
    assert entry.allows((0, 4096, 1 << 34, 0x22, 0, 0))
    assert not entry.allows((0, 4096, 7, 0x22, 0, 0))
    assert not entry.allows((0, 4096, 3, 0x01, 0, 0))


@pytest.mark.parametrize("machine", list(MACHINES))
def test_names_are_those_of_the_lists(machine: str) -> None:
    """Every entry of every list has its number in the table; a number beyond it is told as such."""
    for call in (call for calls in LISTS.values() for call in calls):
        number = call.x86_64 if machine == "x86_64" else call.aarch64
        assert number is None or name_of(machine, number) == call.name
    assert name_of(machine, 9_999) == "call 9999"
    assert len(NAMES[machine]) > 300


def test_a_widened_list_has_what_was_found_and_no_more() -> None:
    """A new call comes without conditions, a listed one loses its own, all others stay as they are."""
    calls = LISTS["worker"]
    wider = widened(calls, [{"name": "getppid", "number": 110}, {"name": "write", "number": 1}])
    assert {call.name for call in wider} - {call.name for call in calls} == {"getppid"}
    changed = {call.name for call, before in zip(wider, calls, strict=False) if call != before}
    assert changed == {"write"}
    assert next(call for call in wider if call.name == "write").arguments == ()
    assert widened(calls, ()) == calls


def test_commands_of_the_driver_have_names() -> None:
    """Those of NVIDIA's nodes are told by name, others by number."""
    assert request(0xC020_462A) == "0xc020462a (control)"
    assert request(0x5421) == "0x5421"


@pytest.mark.full
def test_an_engine_is_within_its_list_and_what_is_not_is_told(engine_config: EngineConfig) -> None:
    """Under load the real engine makes no call beyond its list but those that were put in, which are told with their
    threads and paths, and it goes on; what libraries do at the end of a process is not done; listed calls are counted
    and unused entries named."""
    trial = Trial(config=engine_config, mode=Mode.COLLECT, seconds=0.5, observed=("-c", ENGINE_SLIPS))
    outcome = run(trial)
    assert outcome.lived, lines(outcome, trial.mode)
    (program,) = outcome.programs
    found = {(one["name"], one["arguments"]): one["count"] for one in program["outside"]}
    assert found == {("getppid", ""): 1, ("getuid", ""): 1, ("stat", "/nowhere/to/be/found"): 1} or found == {
        ("getppid", ""): 1,
        ("getuid", ""): 1,
        ("newfstatat", "/nowhere/to/be/found"): 1,
    }
    assert all(any("python" in name for name in one["near"]) for one in program["outside"])
    assert program["used"]["futex"] > 10
    assert "tgkill" in program["unused"]
    assert outcome.tokens > 0


@pytest.mark.parametrize("added", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_same_call_ends_an_engine_under_its_list(engine_config: EngineConfig, added: bool) -> None:
    """Control: enforced, the call that was only told is the end, by SIGSYS; and with it allowed beside the list the
    same program lives."""
    rows = [{"name": name, "number": number} for number, name in NAMES[os.uname().machine].items() if name in SLIPS]
    trial = Trial(config=engine_config, mode=Mode.ENFORCE, seconds=1.0, observed=("-c", ENGINE_SLIPS))
    outcome = run(replace(trial, added={"engine": rows}) if added else trial)
    assert outcome.lived == added, lines(outcome, trial.mode)
    assert added or (outcome.killed and outcome.status == -signal.SIGSYS)


@pytest.mark.full
def test_a_gpu_engine_is_told_by_the_files_of_its_driver(engine_config: EngineConfig) -> None:
    """The device backend under the GPU's list: an ioctl on the driver's node is on it, the same on another file is told
    with that file's name."""
    config = replace(engine_config, backend="device", max_num_seqs=4)
    trial = Trial(config=config, mode=Mode.COLLECT, seconds=1.0, observed=("-c", GPU_SLIPS))
    outcome = run(trial)
    assert outcome.lived, lines(outcome, trial.mode)
    (program,) = outcome.programs
    assert program["used"]["ioctl"] == 1
    (found,) = program["outside"]
    assert (found["name"], found["count"]) == ("ioctl", 2)
    assert found["arguments"].startswith("/memfd:other (deleted), 0x5401")


SLIPS = ("getppid", "getuid", "stat", "newfstatat")


def test_text_programs_are_within_their_lists_and_what_is_not_is_told(text_config: TextConfig) -> None:
    """The worker, the keeper, the forker and the grammars' processes make no call beyond their lists under load but
    those that were put in, each told of its own program."""
    trial = Trial(config=text_config, mode=Mode.COLLECT, seconds=1.0, observed=("-c", TEXT_SLIPS))
    outcome = run(trial)
    assert outcome.lived, lines(outcome, trial.mode)
    assert {one["program"] for one in outcome.programs} == {"worker", "keeper", "forker", "grammar"}
    assert outside(outcome) == {"worker": {"getuid"}, "grammar": {"getppid"}}
    assert all(one["used"] for one in outcome.programs)


def test_the_same_call_ends_a_text_worker_under_its_list(text_config: TextConfig) -> None:
    """Control: enforced, the call that was only told is the end."""
    outcome = run(Trial(config=text_config, mode=Mode.ENFORCE, seconds=1.0, observed=("-c", TEXT_SLIPS)))
    assert outcome.killed
    assert not outcome.lived


def test_a_program_that_cannot_start_is_told(tmp_path: Path) -> None:
    """A model that is none: no load, no verdict of calls, and the program's own words."""
    trial = Trial(config=TextConfig(model_dir=str(tmp_path)), mode=Mode.COLLECT, seconds=1.0)
    outcome = run(trial)
    assert (outcome.status, outcome.lived, outcome.programs) == (3, False, [])
    assert any("cannot load" in line for line in lines(outcome, trial.mode))


def test_nothing_that_serves_knows_of_it(root: Path) -> None:
    """Neither the sandboxes' packages nor the host's processes name the observed program; the command alone does.
    Control: it is found there."""
    naming = {
        path.relative_to(root).as_posix()
        for package in ("appliance", "engine", "isolation", "policy")
        for path in (root / package).rglob("*.py")
        if "appliance.operator.calls" in path.read_text() and "operator/calls" not in path.as_posix()
    }
    assert naming == {"appliance/operator/cli/sandbox.py"}


def test_a_call_of_the_observed_program_alone_is_no_call() -> None:
    """An entry without a number on this machine is left out of what is judged here."""
    calls = (Call("ppoll", None, 73, "only on the other machine"),)
    assert len(reporting(calls, "x86_64", everything=False)) < len(reporting(calls, "aarch64", everything=False))
