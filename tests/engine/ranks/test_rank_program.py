"""The program of several ranks on a real channel: it serves, it ends with any of its ranks, and it refuses."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from engine.config import EngineConfig
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain, StepOutput
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, EngineReady, Hello, Role
from isolation.ipc.segment import standard_layout
from tests.engine.support import model_config, save_model, submit

GONE_S = 1.0
"""Seconds after which a rank's death is the engine's."""

HUNG_S = 60.0
"""Seconds after which an engine that has not ended counts as hung, and not as late on a busy machine."""

FEW_KILLS, FULL_KILLS = 2, 200


def children(pid: int) -> list[int]:
    """Processes that this one has started, in order."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Host:
    """The host's end of a real engine of two ranks."""

    def __init__(self, folder: Path, root: Path, config: EngineConfig, ranks: int = 2) -> None:
        path = folder / "host.sock"
        command = [sys.executable, "-m", "engine.ranks", str(path), str(ranks)]
        self.closed = False
        with Listener(str(path)) as listener:
            self.process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
            self.channel: Channel = listener.accept(None, 100.0, standard_layout(), Role.ENGINE)
        assert isinstance(self.next(), Hello)
        self.channel.send(Configure(config.to_json()))

    def next(self) -> Message:
        """The next message, waited for."""
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            if found := self.channel.receive(1):
                return found[0]
            self.channel.wait(1.0)
        raise AssertionError("the engine said nothing")

    def tokens(self, request: int, count: int) -> list[int]:
        """Tokens of one request alone."""
        self.channel.send(submit(request, range(1, 20), count))
        found: list[int] = []
        while len(found) < count:
            output = self.next()
            if isinstance(output, StepOutput):
                found += output.token_ids
        return found

    def close(self) -> None:
        """End the process if it is still there; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.channel.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, model_config(max_positions=256))
    return folder


def config_for(folder: Path, **changes: object) -> EngineConfig:
    """The configuration as the host sends it."""
    values = {"model_dir": str(folder), "model_digest": "00", "kv_bytes": 1 << 20, "tensor_parallel": 2, **changes}
    return EngineConfig(**values)


@pytest.fixture
def start(tmp_path: Path, root: Path) -> Iterator[Callable[..., Host]]:
    """Starts engines and ends them."""
    hosts: list[Host] = []

    def make(config: EngineConfig, ranks: int = 2) -> Host:
        hosts.append(Host(tmp_path, root, config, ranks))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def test_two_ranks_serve_locked_down_and_drain(start: Callable[..., Host], model_dir: Path) -> None:
    """Ready, tokens, drained with status 0; all three processes are under a filter, and the second rank holds nothing
    of the host's."""
    host = start(config_for(model_dir))
    assert isinstance(host.next(), EngineReady)
    first, second = children(host.process.pid)
    assert len(set(host.tokens(7, 12))) > 1
    for pid in (host.process.pid, first, second):
        for task in Path(f"/proc/{pid}/task").iterdir():
            assert "\nSeccomp:\t2\n" in (task / "status").read_text()
    held = [os.readlink(one) for one in Path(f"/proc/{second}/fd").iterdir() if int(one.name) > 2]
    assert len([one for one in held if one.startswith("pipe:")]) == 2
    assert not [one for one in held if one.startswith("socket:") or "memfd" in one]
    host.channel.send(Drain())
    assert host.process.wait(30) == 0
    assert not alive(first) and not alive(second)


Task = tuple[int, int]
"""A thread: numbers of its process and of itself."""


def queued(pids: list[int]) -> dict[Task, float]:
    """Seconds for which each thread of these processes has waited for a core since it began."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                text = Path(f"/proc/{pid}/task/{task}/schedstat").read_text()
                found[pid, int(task)] = int(text.split()[1]) / 1e9
    return found


@dataclass(frozen=True, slots=True)
class Death:
    """What followed a kill, in seconds from it."""

    own_s: float
    """Until the killed process had ended: until then the kernel frees its memory, and tells nobody."""
    gone_s: float
    """Until nothing of the engine was left."""
    queued_s: float
    """For how long of it a thread waited for a core that others had: one of the killed process, then one of the keeper,
    then of the others' the one that waited longest."""

    @property
    def late(self) -> bool:
        """Whether it took longer than it may on a machine where nobody waits for a core."""
        return self.gone_s - self.queued_s > GONE_S


def watch(everyone: list[int], victim: int, begun: float) -> Death:
    """See the processes of an engine end: the keeper, then its ranks; ``victim``: the one that was killed."""
    first = queued(everyone)
    last, others_from, ends = dict(first), dict(first), dict[int, float]()
    with ExitStack() as files:
        ended, owners = select.poll(), {}
        for pid in everyone:
            owners[pidfd := os.pidfd_open(pid)] = pid
            files.callback(os.close, pidfd)
            ended.register(pidfd, select.POLLIN)
        while len(ends) < len(everyone):
            assert time.monotonic() < begun + HUNG_S, "a process outlives its engine"
            last |= queued(everyone)
            for pidfd, _ in ended.poll(1):
                ended.unregister(pidfd)
                ends[owners[pidfd]] = time.monotonic() - begun
                if owners[pidfd] == victim:
                    others_from = dict(last)
    since = {task: (first if task[0] in (everyone[0], victim) else others_from) for task in last}
    waits = {task: last[task] - since[task].get(task, 0.0) for task in last}
    longest = {pid: max((wait for task, wait in waits.items() if task[0] == pid), default=0.0) for pid in everyone}
    others = max(longest[pid] for pid in everyone if pid not in (everyone[0], victim))
    return Death(ends[victim], max(ends.values()), others + sum(longest[pid] for pid in {everyone[0], victim}))


def kill(host: Host, victim: int, *, serving: bool = True, after_s: float = 0.0) -> Death:
    """Kill the keeper (0) or a rank (1, 2, ...) of an engine, so many seconds after it has begun to give tokens, or to
    load."""
    if serving:
        assert isinstance(host.next(), EngineReady)
    everyone = [host.process.pid, *children(host.process.pid)]
    assert len(everyone) > victim and all(alive(pid) for pid in everyone)
    if serving:
        for number in range(7, 11):
            host.channel.send(submit(number, range(1, 20), 200))
        assert isinstance(host.next(), StepOutput)
    time.sleep(after_s)
    begun = time.monotonic()
    os.kill(everyone[victim], signal.SIGKILL)
    death = watch(everyone, everyone[victim], begun)
    assert host.process.wait(HUNG_S) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return death


@pytest.mark.full
@pytest.mark.clock
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_end_of_any_process_is_the_engines(start: Callable[..., Host], model_dir: Path, victim: int) -> None:
    """kill -9 of the keeper or of either rank while they serve: within a second nothing is left."""
    death = kill(start(config_for(model_dir)), victim)
    assert not death.late, death


@pytest.mark.full
@pytest.mark.clock
def test_an_engine_that_does_not_end_is_late(start: Callable[..., Host], model_dir: Path) -> None:
    """The control of all kills here: a keeper that is stopped, and so waits for no core, leaves its engine there for
    longer than it may."""
    host = start(config_for(model_dir))
    assert isinstance(host.next(), EngineReady)
    keeper, first, second = everyone = [host.process.pid, *children(host.process.pid)]
    os.kill(keeper, signal.SIGSTOP)
    begun = time.monotonic()
    os.kill(second, signal.SIGKILL)
    goes_on = threading.Timer(2 * GONE_S, os.kill, (keeper, signal.SIGCONT))
    goes_on.start()
    death = watch(everyone, second, begun)
    goes_on.join()
    assert death.late and not alive(first), death


STAGED = {"tensor_parallel": 1, "pipeline_parallel": 2}
BOTH = {"tensor_parallel": 2, "pipeline_parallel": 2}
KILLED = (({}, 2), (STAGED, 2), (BOTH, 4))
"""Layouts, with their ranks."""


def draw_kills(count: int) -> list[tuple[dict[str, int], int, int, bool, float]]:
    """Layout, ranks, victim, whether it serves, and the moment of each of so many kills; the first is of a pipeline
    that serves."""
    dice, drawn = random.Random(20261159), []
    for _ in range(count):
        layout, ranks = dice.choice(KILLED)
        serving = dice.random() < 0.75
        drawn.append((layout, ranks, dice.randint(0, ranks), serving, dice.uniform(0, 0.05 if serving else 2)))
    return drawn


@pytest.mark.full
@pytest.mark.clock
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("count", [FEW_KILLS, FULL_KILLS])
def test_kills_at_random_moments_leave_nothing(
    start: Callable[..., Host], model_dir: Path, count: int, record_property: Callable[[str, object], None]
) -> None:
    """kill -9 of a process and at a moment drawn at random, while engines load and while they serve four requests: each
    is gone within a second, not counting what its processes wait for a core that others have."""
    drawn, deaths = draw_kills(count), []
    assert drawn[0][0] == STAGED and drawn[0][2] > 0 and drawn[0][3]
    for layout, ranks, victim, serving, after_s in drawn:
        host = start(config_for(model_dir, **layout), ranks)
        deaths.append(kill(host, victim, serving=serving, after_s=after_s))
        host.close()
    took = [death.gone_s for death in deaths]
    record_property("kills", len(took))
    record_property("seconds", f"median {median(took):.3f}, longest {max(took):.3f}, load {os.getloadavg()[0]:.0f}")
    record_property("above a second", sum(one > GONE_S for one in took))
    record_property("longest without waits for a core", f"{max(one.gone_s - one.queued_s for one in deaths):.3f}")
    assert not [death for death in deaths if death.late]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 are 3 ranks and the program was started with 2"),
        ({"pipeline_parallel": 2}, "tensor_parallel 2, pipeline_parallel 2 are 4 ranks and the program was started"),
        ({"quantization": "int8"}, "tensor_parallel 2: ranks do not compute quantization int8 yet"),
        ({"adapters": '{"00": "/a"}'}, "tensor_parallel 2: ranks do not compute adapters yet"),
        ({"runner": "null"}, "tensor_parallel 2: ranks do not compute runner null yet"),
        ({"backend": "device"}, "tensor_parallel 2: ranks do not compute a GPU yet"),
    ],
)
def test_what_ranks_do_not_compute_is_refused(model_dir: Path, change: dict[str, object], said: str) -> None:
    """A typed error with the numbers, before weights are read; control: ranks without it."""
    from engine.errors import ConfigurationError
    from engine.startup.ranks import check_ranks

    check_ranks(config_for(model_dir), 2)
    with pytest.raises(ConfigurationError, match=said):
        check_ranks(config_for(model_dir, **change), 2)


@pytest.mark.parametrize(
    ("fields", "ranks", "said"),
    [
        ({"num_heads": 3, "num_kv_heads": 1}, {}, "3 attention heads cannot be dealt evenly to 2 ranks"),
        ({"num_heads": 6, "num_kv_heads": 3}, {}, "3 key-value heads cannot be dealt evenly to 2 ranks"),
        ({"intermediate_size": 1}, {}, "an MLP's inner width of 1 cannot be dealt to 2 ranks"),
        ({"num_layers": 2}, {"pipeline_parallel": 3}, "2 layers cannot be cut into 3 stages"),
        ({}, {"expert_parallel": 4}, "one of the two is 1, or both are alike"),
        ({}, {"tensor_parallel": 1, "expert_parallel": 2}, "0 experts cannot be dealt to 2 ranks"),
    ],
)
def test_a_model_that_cannot_be_dealt_is_refused(fields: dict[str, int], ranks: dict[str, int], said: str) -> None:
    """The message has both numbers; control: the model as it is."""
    from engine.errors import ConfigurationError
    from engine.startup.ranks import check_shape

    config = config_for(Path("/m"), **ranks)
    check_shape(model_config(), config_for(Path("/m")))
    with pytest.raises(ConfigurationError, match=said):
        check_shape(model_config(**fields), config)


@pytest.mark.parametrize(
    ("costs", "stages", "head", "cuts"),
    [
        ([1, 1, 1, 1], 2, 0, ((0, 2), (2, 4))),
        ([1, 1, 1, 1], 2, 2, ((0, 3), (3, 4))),
        ([5, 1, 1, 1], 2, 0, ((0, 1), (1, 4))),
        ([1, 2, 3, 4, 5], 3, 0, ((0, 3), (3, 4), (4, 5))),
        ([1, 1, 1], 3, 100, ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_layers_are_cut_by_what_they_take(
    costs: list[int], stages: int, head: int, cuts: tuple[tuple[int, int], ...]
) -> None:
    """The slowest stage is as fast as can be, with what follows the last layer; each stage has a layer at least."""
    from engine.startup.stages import cut_layers

    assert cut_layers(costs, stages, head) == cuts


@pytest.mark.full
def test_a_refused_configuration_ends_all_ranks_with_one_line(start: Callable[..., Host], model_dir: Path) -> None:
    """Status 3, one line on stderr, and no rank is left."""
    host = start(config_for(model_dir, tensor_parallel=3))
    _, errors = host.process.communicate(timeout=60)
    assert host.process.returncode == 3
    assert errors == "engine cannot start: tensor_parallel 3 are 3 ranks and the program was started with 2\n"


@pytest.mark.parametrize("arguments", [[], ["/s"], ["/s", "1"], ["/s", "9"], ["/s", "-2"], ["/s", "2", "x"]])
def test_wrong_arguments_are_status_2(root: Path, arguments: list[str]) -> None:
    """Without a socket and a number of ranks the program says how it is called, and forks nothing."""
    command = [sys.executable, "-m", "engine.ranks", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m engine.ranks SOCKET RANKS")


def test_stages_pass_on_what_is_longer_than_a_queue(root: Path) -> None:
    """Four ranks in two stages: texts reach all, streams the next stage and results the first, in pieces; the last of
    them is told that ranks are out of step."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.ranks.ring"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
