"""What is in the live engine's process at the moment of lock-down, after which nothing more can be opened or mapped.

The program is the real one, on a real channel; a wrapper tells modules and maps just before the lock-down goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig, TextConfig
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Drain, StepOutput
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, EngineReady, Role, TextReady
from isolation.ipc.segment import standard_layout
from tests.engine.support import model_config, save_model, submit

TELL = """
import json, os, sys
import engine.__main__ as program
lock_down = program.lock_down

def told(calls):
    own = {
        name: sorted({value.__name__ for value in vars(module).values() if type(value) is type(sys)})
        for name, module in sys.modules.items() if name.partition(".")[0] in ("engine", "isolation")
    }
    print(json.dumps({"own": own, "all": sorted(sys.modules)}), flush=True)
    lock_down(calls)

program.lock_down = told
sys.exit(program.main(sys.argv[1:]))
"""
BANNED = {"socket", "subprocess", "pickle", "multiprocessing", "asyncio", "ctypes", "ssl", "http", "urllib", "json"}
ALLOWED = {
    "engine.sandbox.attach": {"socket"},
    "engine.sandbox.lockdown": {"ctypes"},
    "engine.sandbox.weights_mapping": {"ctypes"},
    "engine.config": {"json"},
    "engine.backends.cuda.runtime.launch_digest": {"json"},
    "engine.startup.load": {"ctypes"},
    "engine.backends.native.abi": {"ctypes"},
    "engine.backends.native.adapting": {"ctypes"},
    "engine.backends.native.library": {"ctypes"},
    "engine.backends.native.program": {"ctypes"},
    "engine.backends.native.trial": {"ctypes"},
    "engine.model.checkpoint.config": {"json"},
    "engine.model.checkpoint.safetensors": {"json"},
}
"""Our modules that hold one of them: all of it is done before lock-down, when nothing of a tenant is there yet."""

FOREIGN = {
    "tokenizers",
    "jinja2",
    "minijinja",
    "safetensors",
    "transformers",
    "cryptography",
    "pydantic",
    "engine.text",
}
"""Parsers of text, and packages with extensions written in Rust."""

RUST_MARKS = (b"/rustc/", b"rust_panic", b"rust_eh_personality")
"""What the Rust compiler leaves in a library: paths of its own sources, names of its own functions."""


def rust_libraries(pid: int) -> list[str]:
    """The mapped files of a process that hold Rust code, NVIDIA's own aside: torch's CUDA build loads those."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and fields[5].startswith("/")}
    libraries = [Path(path) for path in sorted(paths) if ".so" in path and "/nvidia/" not in path]
    assert len(libraries) > 5
    return [path.name for path in libraries if any(mark in path.read_bytes() for mark in RUST_MARKS)]


class Guest:
    """A guest program on a real channel."""

    def __init__(self, folder: Path, command: list[str], role: Role, config: bytes) -> None:
        root = Path(__file__).resolve().parents[2]
        path = folder / f"{role.name}.sock"
        with Listener(str(path)) as listener:
            self.process = subprocess.Popen(
                [*command, str(path)], cwd=root, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
            )
            self.channel: Channel = listener.accept(None, 60.0, standard_layout(), role)
        self.next()
        self.channel.send(Configure(config))

    def next(self) -> Message:
        """The next message, waited for."""
        while not (found := self.channel.receive(1)):
            assert self.process.poll() is None
            self.channel.wait(1.0)
        return found[0]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self.channel.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Guest]:
    """The engine's program in its wrapper."""
    save_model(tmp_path, model_config(max_positions=256))
    config = EngineConfig(model_dir=str(tmp_path), model_digest="00", kv_bytes=1 << 20, dtype="bfloat16").to_json()
    guest = Guest(tmp_path, [sys.executable, "-c", TELL], Role.ENGINE, config)
    yield guest
    guest.close()


def test_the_engine_holds_no_parser_of_text_and_no_rust(engine: Guest) -> None:
    """At lock-down and after serving: none of our modules holds what it must not, no Rust is mapped, and all threads
    are under the filter; torch's own imports are there, which is what the filter is for."""
    assert isinstance(engine.next(), EngineReady)
    engine.channel.send(submit(7, range(1, 40), 5))
    while not (isinstance(output := engine.next(), StepOutput) and any(output.finishes)):
        continue
    assert engine.process.stdout is not None
    told = json.loads(engine.process.stdout.readline())
    held = {name: found for name, names in told["own"].items() if (found := set(names) & BANNED)}
    assert all(found <= ALLOWED.get(name, set()) for name, found in held.items()), held
    assert held["engine.sandbox.attach"] == {"socket"}
    assert not FOREIGN & set(told["all"])
    assert {"torch", "subprocess", "pickle"} <= set(told["all"])
    assert rust_libraries(engine.process.pid) == []
    for task in Path(f"/proc/{engine.process.pid}/task").iterdir():
        assert "\nSeccomp:\t2\n" in (task / "status").read_text()
    engine.channel.send(Drain())
    assert engine.process.wait(30) == 0


def test_rust_is_found_where_it_is(tmp_path: Path, root: Path) -> None:
    """Positive control: the text sandbox's process has the tokenizer's extension mapped, and the same look finds it."""
    model = root / "images" / "mini" / "athanor-mini"
    if not (model / "tokenizer.json").is_file():
        pytest.skip("the embedded model is not built")
    config = TextConfig(model_dir=str(model)).to_json()
    guest = Guest(tmp_path, [sys.executable, "-m", "engine.text"], Role.TEXT, config)
    try:
        assert isinstance(guest.next(), TextReady)
        assert any(name.startswith("tokenizers") for name in rust_libraries(guest.process.pid))
    finally:
        guest.close()
