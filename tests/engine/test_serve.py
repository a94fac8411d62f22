"""The serving loop over a scripted channel, and the program over the real one."""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import serve as serve_module
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.spill import LOOK_S
from engine.errors import EngineError
from engine.serve import IDLE_WAIT_S, RECEIVE_LIMIT, HostStuckError, UnexpectedMessageError, serve
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, Drain, StepOutput
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.memory_order import LOOK_AGAIN_S
from isolation.ipc.messages import Configure, EngineReady, FailureCode, Finish
from isolation.ipc.ping import Ping, Pong
from tests.engine.engine_process import Host
from tests.engine.support import make_engine, model_config, random_model, save_model, submit

MODEL = random_model(model_config())

SAID = re.compile(
    r"engine computes with plain operations; no compiled kernels: none were given\n"
    r"engine holds its weights as float32\n"
    r"engine holds \d+ MiB of weights, \d+ MiB of KV, \d+ MiB of buffers\n"
)
"""All that a healthy engine says."""


MAX_LOOKS = 100_000
"""Most times that a serving loop looks for messages in a test; none here needs a thousand."""


class ScriptedChannel:
    """A host in a script: each entry is what one ``receive`` finds, and ``full`` sends are refused."""

    def __init__(self, *script: list[Message], full: int = 0) -> None:
        self.script = deque(script)
        self.sent: list[StepOutput] = []
        self.urgent: list[bool] = []
        self.usages: list[KvUsage] = []
        self.pongs: list[tuple[int, int]] = []
        """Answers to probes, with the number of steps sent before."""
        self.waits: list[float] = []
        self.also: list[int | None] = []
        self.full = full
        self.refused = False
        self.silent = 0
        """Waits that end because their time is over."""
        self.looks = 0

    def send(self, message: Message, *, urgent: bool) -> None:
        """Take a frame, or refuse it while the ring is full."""
        if self.full:
            self.full -= 1
            self.refused = True
            raise RingFull
        if isinstance(message, KvUsage):
            self.usages.append(message)
            return
        if isinstance(message, Pong):
            assert not urgent, "the host looks for it"
            self.pongs.append((message.number, len(self.sent)))
            return
        assert isinstance(message, StepOutput)
        self.sent.append(message)
        self.urgent.append(urgent)

    def receive(self, limit: int) -> list[Message]:
        """The next entry of the script, never more than asked for; a loop that looks for ever fails."""
        self.looks += 1
        assert self.looks <= MAX_LOOKS, f"the serving loop neither sleeps nor ends; it has sent {len(self.sent)} frames"
        if not self.script or not limit:
            return []
        entry = self.script.popleft()
        if len(entry) > limit:
            self.script.appendleft(entry[limit:])
        return entry[:limit]

    def wait(self, timeout_s: float, also: int | None = None) -> bool:
        """Note the sleep; a host whose script is over and who reads nothing more is gone."""
        self.waits.append(timeout_s)
        self.also.append(also)
        if not self.script and not self.refused:
            raise PeerGoneError("gone")
        self.refused = False
        self.silent -= 1
        return self.silent < 0


class ScriptedBell:
    """The channel to the supervisor in a script: whether something is there at each time that the bell is asked for."""

    def __init__(self, *, there: list[bool], gone_after: int) -> None:
        self._there = deque(there)
        self._gone_after = gone_after
        self.armed = self.disarmed = 0

    def fileno(self) -> int:
        """A number that no descriptor has."""
        return 12_345

    def arm(self) -> bool:
        """The next entry of the script."""
        self.armed += 1
        return self._there.popleft()

    def disarm(self) -> None:
        """Nobody is at the other end after some times."""
        self.disarmed += 1
        if self.disarmed == self._gone_after:
            raise PeerGoneError("gone")


def tokens_of(channel: ScriptedChannel) -> dict[int, list[int]]:
    """All tokens sent, by request."""
    tokens: dict[int, list[int]] = {}
    for output in channel.sent:
        for request, token_id in zip(output.requests, output.token_ids, strict=True):
            tokens.setdefault(request, []).append(token_id)
    return tokens


def test_one_frame_a_step_and_sleep_when_idle() -> None:
    """Submissions are answered step by step, one frame each; with nothing to do the loop sleeps long."""
    channel = ScriptedChannel([submit(1, [5], 4), submit(2, [6], 2)])
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), channel)
    assert [len(output.requests) for output in channel.sent] == [2, 2, 1, 1]
    assert channel.waits == [IDLE_WAIT_S]


def test_a_probe_is_answered_in_its_turn_and_by_nothing_else() -> None:
    """Idle, between steps and while all is drained: one answer each, before what was sent behind it, and no step, no
    block and no count of the engine is different for it. The ring may be full meanwhile."""
    engine = make_engine(MODEL)
    channel = ScriptedChannel([Ping(7)], [Ping(8), submit(1, [5], 3)], [Ping(9)], full=1)
    with pytest.raises(PeerGoneError):
        serve(engine, channel)
    assert channel.pongs == [(7, 0), (8, 0), (9, 1)]
    control = ScriptedChannel([submit(1, [5], 3)])
    plain = make_engine(MODEL)
    with pytest.raises(PeerGoneError):
        serve(plain, control)
    assert [output.token_ids for output in channel.sent] == [output.token_ids for output in control.sent]
    assert engine.scheduler.num_available_blocks == plain.scheduler.num_available_blocks
    drained = ScriptedChannel([submit(1, [5], 2), Drain(), Ping(1)])
    serve(make_engine(MODEL), drained)
    assert drained.pongs == [(1, 0)]


def test_what_accounts_have_is_told_while_it_changes_and_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a host that sent a table of quotas, be it empty: at most once a second, the last time before a long sleep,
    so that what it shows of an idle engine is so. A host that sent none is told nothing."""
    engine = make_engine(MODEL)
    now_ns = [0]
    monkeypatch.setattr(engine, "_clock_ns", lambda: now_ns[0])
    channel = ScriptedChannel([KvQuotas(), submit(1, [5] * 9, 40)], *([[]] * 60))
    sleep = channel.wait
    monkeypatch.setattr(channel, "wait", lambda s: (now_ns.__setitem__(0, now_ns[0] + int(s * 1e9)), sleep(s))[1])
    with pytest.raises(PeerGoneError):
        serve(engine, channel)
    first, last = channel.usages
    assert [use.held > 0 for use in first.uses] == [True]
    assert [(use.held, use.resident > 0) for use in last.uses] == [(0, True)]
    assert channel.waits[0] == 1.0
    assert set(channel.waits[1:]) == {IDLE_WAIT_S}
    silent = ScriptedChannel([submit(1, [5] * 9, 40)])
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), silent)
    assert (silent.usages, silent.waits) == ([], [IDLE_WAIT_S])


def test_a_deadline_ends_a_request_that_waits_for_its_mask_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two structured requests, one before its first token and one behind it, both without a mask: the engine has
    nothing to compute and no message comes. Each is answered when its deadline has passed, and its blocks are free. The
    engine sleeps exactly so long; one that waits without a deadline (control) is not ended and lets it sleep long."""
    engine = make_engine(MODEL)
    now_ns = [0]
    monkeypatch.setattr(engine, "_clock_ns", lambda: now_ns[0])
    asked = [
        submit(1, [5], 4, structured=True, deadline_us=3_000_000),
        submit(2, [6] * 9, 4, structured=True, deadline_us=2_000_000),
        submit(3, [7], 4, structured=True),
        Masks(array("Q", [2]), array("I", [0]), bytes([MaskState.OPEN]), b"\xff" * 16),
    ]
    channel = ScriptedChannel(asked, *([[]] * 20))
    free = engine.scheduler.num_available_blocks
    held: list[int] = []

    def sleep(timeout_s: float) -> bool:
        held.append(free - engine.scheduler.num_available_blocks)
        now_ns[0] += round(timeout_s * 1e9)
        return wait(timeout_s)

    wait = channel.wait
    monkeypatch.setattr(channel, "wait", sleep)
    with pytest.raises(PeerGoneError):
        serve(engine, channel)
    ends = [(one.request, one.code) for output in channel.sent for one in output.failures]
    assert ends == [(2, FailureCode.DEADLINE), (1, FailureCode.DEADLINE)]
    assert channel.waits[:2] == [2.0, 1.0]
    assert set(channel.waits[2:]) == {IDLE_WAIT_S}
    assert held[0] > 0
    assert set(held[1:]) == {0}
    assert engine.scheduler.num_waiting == 1
    assert len(tokens_of(channel)[2]) == 1


@pytest.mark.parametrize(
    ("num_blocks", "order"), [(8, [1, 1, 2, 2, 2, 2]), (64, [1, 2, 2, 2, 2, 1])], ids=["full", "room"]
)
def test_blocks_of_a_request_that_waits_for_its_mask_are_waited_for_at_rest(num_blocks: int, order: list[int]) -> None:
    """One request waits for its mask and holds most blocks, another waits for blocks: the engine rests between its
    looks in place of empty steps without end, and both are served once the mask has come. With room for both (control)
    it never rests so, and the second is served first."""
    engine = make_engine(MODEL, num_blocks=num_blocks)
    masks = [Masks(array("Q", [1]), array("I", [one]), bytes([MaskState.OPEN]), b"\xff" * 16) for one in (0, 1)]
    begin = [submit(1, [5] * 20, 2, structured=True), masks[0]]
    channel = ScriptedChannel(begin, [], [submit(2, [6] * 20, 4)], *([[]] * 20), [masks[1]], *([[]] * 20))
    with pytest.raises(PeerGoneError):
        serve(engine, channel)
    assert [request for output in channel.sent for request in output.requests] == order
    assert (channel.waits.count(LOOK_S) >= 19) is (num_blocks == 8)
    assert set(channel.waits) - {LOOK_S} == {IDLE_WAIT_S}


def test_the_supervisor_wakes_an_idle_engine() -> None:
    """What comes over the second channel ends the engine's long sleep: asked for before each, taken behind it. One that
    is there already makes the sleep short, and one whose other end is closed is asked no more."""
    bell = ScriptedBell(there=[False, True, False], gone_after=2)
    channel = ScriptedChannel([], [], [], [], [])
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), channel, bell)
    assert channel.waits == [LOOK_AGAIN_S, LOOK_S, LOOK_AGAIN_S, IDLE_WAIT_S, IDLE_WAIT_S]
    assert channel.also == [bell.fileno(), None, bell.fileno(), None, None]
    assert (bell.armed, bell.disarmed) == (3, 2)


def test_a_lost_bell_of_the_supervisor_costs_one_look() -> None:
    """Where no bell rang the engine looks at the supervisor's ring once more before it sleeps for long: what lies there
    is taken then, and not at the end of the sleep. Where nothing lies there (control) it sleeps on."""
    bell = ScriptedBell(there=[False, False, False, True, False], gone_after=9)
    channel = ScriptedChannel([], [], [])
    channel.silent = 3
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), channel, bell)
    assert channel.waits == [LOOK_AGAIN_S, IDLE_WAIT_S - LOOK_AGAIN_S, LOOK_AGAIN_S, LOOK_AGAIN_S]
    assert (bell.armed, bell.disarmed) == (5, 2)


def test_what_a_reader_waits_for_is_urgent() -> None:
    """The step with a first token, an end or a refusal rings for a host that naps; the ones between do not."""
    channel = ScriptedChannel([submit(1, [5], 6)], [], [], [submit(2, [6], 2)], [])
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), channel)
    assert [len(output.requests) for output in channel.sent] == [1, 1, 1, 2, 2, 1]
    assert channel.urgent == [True, False, False, True, True, True]
    channel = ScriptedChannel([submit(1, [5], 4)], [], [submit(2, [6] * 400, 2)], [])
    with pytest.raises(PeerGoneError):
        serve(make_engine(MODEL), channel)
    assert [bool(output.failures) for output in channel.sent] == [False, False, True, False]
    assert channel.urgent == [True, False, True, True]


def test_drain_finishes_what_runs_and_refuses_the_rest() -> None:
    """After Drain live requests end as usual, new ones are refused, and the loop returns."""
    channel = ScriptedChannel([submit(1, [5], 4), Drain()], [submit(2, [6], 4)])
    serve(make_engine(MODEL), channel)
    assert list(tokens_of(channel)) == [1]
    assert channel.sent[-1].finishes[-1] == Finish.LENGTH
    assert [(one.request, one.code) for output in channel.sent for one in output.failures] == [
        (2, FailureCode.OVERLOADED)
    ]
    assert channel.waits == []


def test_drain_of_an_idle_engine_returns_at_once() -> None:
    """Nothing to finish: nothing is sent and nobody sleeps."""
    channel = ScriptedChannel([Drain()])
    serve(make_engine(MODEL), channel)
    assert (channel.sent, channel.waits) == ([], [])


def test_abort_frees_at_the_next_step() -> None:
    """An aborted request gets its failure in the next frame and no token after it."""
    channel = ScriptedChannel([submit(1, [5], 50), submit(2, [6], 3)], [Abort(1)], [Drain()])
    serve(make_engine(MODEL), channel)
    assert {request: len(tokens) for request, tokens in tokens_of(channel).items()} == {1: 1, 2: 3}
    assert [(one.request, one.code) for one in channel.sent[1].failures] == [(1, FailureCode.ABORTED)]


def test_a_full_ring_stops_the_engine_and_loses_nothing() -> None:
    """While the host reads nothing no step is run; what it sends meanwhile is taken in order afterwards."""
    engine = make_engine(MODEL)
    channel = ScriptedChannel([submit(1, [5], 6)], [submit(2, [6], 3)], [Drain()], full=3)
    steps = []
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: (steps.append(channel.full), execute(plan))[1]
    serve(engine, channel)
    calm = ScriptedChannel([submit(1, [5], 6)], [submit(2, [6], 3)], [Drain()])
    serve(make_engine(MODEL), calm)
    assert tokens_of(channel) == tokens_of(calm)
    assert steps.count(3) == 1
    assert all(full == 0 for full in steps[1:])


def test_the_backlog_is_bounded_while_the_ring_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that floods and does not read is read from up to a bound, and then waited for with a pause."""
    pauses: list[float] = []
    monkeypatch.setattr(serve_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    flood = [[submit(10 + number, [1], 1) for number in range(2 * RECEIVE_LIMIT)]]
    channel = ScriptedChannel([submit(1, [5], 2)], *flood, [Drain()], full=5)
    serve(make_engine(MODEL, max_waiting=600), channel)
    assert len(tokens_of(channel)) == 2 * RECEIVE_LIMIT + 1
    assert len(pauses) == 4


def test_a_host_that_never_reads_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for room is bounded."""
    monkeypatch.setattr(serve_module, "SEND_TIMEOUT_S", -1.0)
    with pytest.raises(HostStuckError):
        serve(make_engine(MODEL), ScriptedChannel([submit(1, [5], 2)], full=10_000))


def test_a_message_out_of_turn_ends_the_process() -> None:
    """An engine takes submissions, aborts and drain, and nothing else."""
    with pytest.raises(UnexpectedMessageError, match="Configure"):
        serve(make_engine(MODEL), ScriptedChannel([Configure(b"{}")]))
    assert issubclass(UnexpectedMessageError, EngineError)


# The program over the real channel.


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, model_config(max_positions=256))
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Starts engines and ends them."""
    hosts: list[Host] = []

    def make(config: bytes | None) -> Host:
        hosts.append(Host(tmp_path))
        hosts[-1].begin(config)
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def config_for(folder: Path, **changes: object) -> bytes:
    """The configuration as the host sends it."""
    values = {"model_dir": str(folder), "model_digest": "00", "kv_bytes": 1 << 20, **changes}
    return EngineConfig(**values).to_json()


def test_the_program_serves_and_drains(start: object, model_dir: Path) -> None:
    """Hello, Configure, EngineReady, tokens, Drain, exit 0, and not a word on stderr."""
    host = start(config_for(model_dir))
    ready = host.next()
    assert isinstance(ready, EngineReady)
    assert (ready.vocab_size, ready.max_context, ready.block_size) == (97, 256, 16)
    host.channel.send(submit(7, range(20), 12))
    tokens: list[int] = []
    while len(tokens) < 12:
        output = host.next()
        assert isinstance(output, StepOutput)
        tokens += output.token_ids
    assert output.finishes[-1] == Finish.LENGTH
    host.channel.send(Drain())
    code, said = host.end()
    assert code == 0
    assert SAID.fullmatch(said), said


@pytest.mark.clock
def test_an_idle_engine_uses_no_processor_and_ends_quietly_with_its_host(start: object, model_dir: Path) -> None:
    """Asleep it burns next to nothing; when the host goes away it exits 0 without another word."""
    host = start(config_for(model_dir))
    assert isinstance(host.next(), EngineReady)
    stat = Path(f"/proc/{host.process.pid}/stat")

    def ticks() -> int:
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    threading.Event().wait(1.5)
    assert ticks() - before <= 15
    host.channel.close()
    code, said = host.end()
    assert code == 0
    assert SAID.fullmatch(said), said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_dir": "/nowhere/at/all"}, "config.json cannot be read: No such file or directory"),
        pytest.param({"threads": 0}, "threads is 0; it must be at least 1", marks=pytest.mark.full),
        pytest.param({"kv_bytes": 10}, "kv_bytes is 10", marks=pytest.mark.full),
    ],
)
def test_a_load_error_is_one_line_and_status_3(
    start: object, model_dir: Path, change: dict[str, object], said: str
) -> None:
    """What cannot be loaded is said in one line without a path or a traceback."""
    host = start(config_for(model_dir, **change))
    status, errors = host.end()
    assert status == 3
    assert errors.startswith(f"engine cannot start: {said}")
    assert len(errors.splitlines()) == 1
    assert "/nowhere" not in errors


def test_an_engine_that_hangs_is_told_with_its_place(start: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its configuration and gets none: the wait ends, and says what was waited for and the line at
    which the engine stands. Control: all other tests here, whose engines answer in time."""
    host = start(None)
    monkeypatch.setattr(host, "_until", time.monotonic() + 0.2)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)the engine sent no message.*it runs.*in _configuration"):
        host.next()


def test_wrong_arguments_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a socket the program says how it is called."""
    from engine.__main__ import main

    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m engine SOCKET [CONFIGURATION]\n"


def test_engine_type_is_what_the_loop_drives() -> None:
    """The loop takes the same object that tests and benchmarks drive without a channel."""
    assert isinstance(make_engine(MODEL), Engine)
