"""python -m engine.text as a process, over the real wire, bare and in a real sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.config import TextConfig
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.spec import Limits, Mount, SandboxSpec
from isolation.image.python_rootfs import python_rootfs
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, Failed, FailureCode, Hello, Role, TextReady
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.segment import standard_layout
from isolation.ipc.text import Encode, Encoded, ReadVocabulary, SourceKind, Vocabulary

PATIENCE_S = 60.0

BOMB = (
    "{% set c = messages[0].content %}"
    "{% if c == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if c == 'memory' %}{{ c * 10 ** 10 }}{% endif %}"
    "{% if c == 'recursion' %}{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}{% endif %}"
    "{{ c }}"
)


def next_message(channel: Channel) -> Message:
    """The next message of the guest."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for message in channel.receive(1):
            return message
        channel.wait(1.0)
    raise TimeoutError("the guest says nothing")


def chat(request: int, content: str) -> Encode:
    """A chat of one message."""
    source = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    return Encode(request, SourceKind.CHAT, source, 4096)


@contextmanager
def started(tmp_path: Path, root: Path) -> Iterator[tuple[Channel, subprocess.Popen[str]]]:
    """A worker's process and the host's end of its channel, before the configuration."""
    with tempfile.TemporaryDirectory(prefix="ath-", dir=tmp_path.anchor + "tmp") as folder:
        path = os.path.join(folder, "host.sock")
        with Listener(path) as listener:
            command = [sys.executable, "-m", "engine.text", path]
            process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
            try:
                channel = listener.accept({process.pid}, PATIENCE_S, standard_layout(), Role.TEXT)
                try:
                    yield channel, process
                finally:
                    channel.close()
            finally:
                process.kill()
                process.wait()
                assert process.stderr is not None
                process.stderr.close()


def configured(channel: Channel, model_dir: Path | str) -> Message:
    """The guest's first message after its configuration."""
    assert next_message(channel) == Hello(PROTOCOL_VERSION, Role.TEXT)
    channel.send(Configure(TextConfig(model_dir=str(model_dir)).to_json()))
    return next_message(channel)


def bomb_model(path: Path, tiny) -> Path:
    """A model with a template that can be made to misbehave."""
    path.mkdir()
    (path / "tokenizer.json").write_bytes(tiny("<x>"))
    (path / "chat_template.jinja").write_text(BOMB)
    return path


def check_bombs(channel: Channel) -> None:
    """Each bomb fails its own job; the job after it is served."""
    for number, content in enumerate(["loop", "memory", "recursion"]):
        channel.send(chat(2 * number, content))
        channel.send(chat(2 * number + 1, "ok"))
        failed = next_message(channel)
        assert isinstance(failed, Failed)
        assert (failed.request, failed.code) == (2 * number, FailureCode.INVALID)
        assert next_message(channel) == Encoded(2 * number + 1, array("I", list(b"ok")))


def test_a_whole_life(tmp_path, root, mini_dir, mini) -> None:
    """Ready, chats, probes, completions, vocabulary, drain: what is sent before the drain is answered in order, status
    0."""
    with started(tmp_path, root) as (channel, process):
        assert configured(channel, mini_dir) == mini.ready()
        job = chat(5, "Hello")
        channel.send(Ping(1))
        channel.send(job)
        channel.send(Ping(2))
        channel.send(Encode(6, SourceKind.TEXT, b"Hello", 4096))
        channel.send(ReadVocabulary(7, 0))
        channel.send(Drain())
        assert next_message(channel) == Pong(1)
        assert next_message(channel) == mini.answer(job)
        assert next_message(channel) == Pong(2)
        assert next_message(channel) == mini.answer(Encode(6, SourceKind.TEXT, b"Hello", 4096))
        assert next_message(channel) == Vocabulary(7, 0, mini._vocabulary.entries)
        assert process.wait(PATIENCE_S) == 0


def test_bombs_leave_the_worker_alive(tmp_path, root, tiny) -> None:
    """After a template bomb the same process answers the next job."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, bomb_model(tmp_path / "model", tiny)), TextReady)
        check_bombs(channel)
        assert process.poll() is None


@pytest.mark.parametrize("case", ["model", "configuration"])
def test_what_cannot_be_loaded_ends_with_3(case: str, tmp_path, root) -> None:
    """A missing model or a foreign configuration ends the process with status 3 and one line."""
    with started(tmp_path, root) as (channel, process):
        assert next_message(channel) == Hello(PROTOCOL_VERSION, Role.TEXT)
        config = TextConfig(model_dir=str(tmp_path)).to_json() if case == "model" else b"{}"
        channel.send(Configure(config))
        assert process.wait(PATIENCE_S) == 3
        [line] = process.stderr.read().splitlines()
        expected = {
            "model": "engine.text: cannot load: tokenizer.json is missing",
            "configuration": "engine.text: cannot load: configuration has unknown or missing keys",
        }
        assert line.startswith(expected[case])
        with pytest.raises(PeerGoneError):
            next_message(channel)


def test_a_host_that_leaves_ends_the_worker(tmp_path, root, mini_dir) -> None:
    """When the host's end closes, the process ends with status 1 and says so."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.close()
        assert process.wait(PATIENCE_S) == 1
        assert "the host is gone" in process.stderr.read()


def test_wrong_usage_ends_with_2(root) -> None:
    """Without the socket's path there is nothing to do."""
    command = [sys.executable, "-m", "engine.text"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "engine.text: usage: python -m engine.text SOCKET\n")


def test_the_worker_imports_little(root) -> None:
    """The text sandbox maps neither torch nor numpy, and no package of the host."""
    code = (
        "import sys\nimport engine.text.__main__\nprint('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"engine", "tokenizers", "jinja2"} <= loaded
    foreign = {"torch", "numpy", "transformers", "appliance", "policy", "yaml", "pydantic", "grpc"}
    assert not loaded & foreign
    ours = {name for name in loaded if name in ("engine", "isolation", "tokenizers", "jinja2", "markupsafe")}
    installed = loaded - set(sys.stdlib_module_names) - ours - {"__main__"}
    assert not {name for name in installed if not name.startswith("_")}


@pytest.mark.runsc
def test_the_same_in_a_sandbox(tmp_path, tiny, runsc_path) -> None:
    """Under gVisor the worker boots, its guards hold, and a drain ends it with status 0."""
    if os.geteuid() != 0:
        pytest.skip("the profile for root needs root")
    run_dir = Path(tempfile.mkdtemp(prefix="ath-"))
    try:
        model, sockets = bomb_model(run_dir / "model", tiny), run_dir / "ipc"
        sockets.mkdir()
        for path in (run_dir, model, sockets, *model.iterdir()):
            path.chmod(0o755)
        (run_dir / "state").mkdir()
        runtime = GvisorRuntime(find_runsc([runsc_path]), run_dir / "state")
        rootfs = python_rootfs("text")
        spec = SandboxSpec(
            name="text",
            argv=rootfs.argv("engine.text", "/ipc/host.sock"),
            env=guest_environment(threads=1),
            rootfs=rootfs,
            mounts=(Mount(sockets, "/ipc"), Mount(model, "/model")),
            limits=Limits(1 << 30),
        )
        with Listener(str(sockets / "host.sock")) as listener:
            sandbox = runtime.boot(spec)
            channel = listener.accept(sandbox.peer_pids, PATIENCE_S, standard_layout(), Role.TEXT)
        try:
            ready = configured(channel, "/model")
            assert isinstance(ready, TextReady), sandbox.output_tail()
            assert ready.exact_vocabulary
            check_bombs(channel)
            channel.send(Drain())
            assert sandbox.wait(PATIENCE_S) == 0
        finally:
            channel.close()
            sandbox.delete()
            runtime.cleanup_stale()
            runtime.close()
    finally:
        shutil.rmtree(run_dir)
