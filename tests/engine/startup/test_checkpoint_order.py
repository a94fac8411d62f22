"""A checkpoint of an engine's program is taken where it waits for its host: before it has a device, and not after."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from isolation.ipc.engine import Drain
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import WAITS_LINE, Configure, EngineReady, Hello, Role
from isolation.ipc.segment import standard_layout
from tests.engine.support import model_config, save_model

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120.0


def probe(notes: Path, *arguments: str) -> subprocess.Popen[str]:
    """The engine's program, noting what it does."""
    command = [sys.executable, "-m", "tests.engine.startup.order_probe", str(notes), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def serve(config: EngineConfig, folder: Path) -> tuple[list[str], int]:
    """Notes of a program that had to wait for its host until it said so, was told what it serves, and was drained."""
    notes, place = folder / "notes", str(folder / "host.sock")
    program = probe(notes, place)
    assert program.stderr is not None
    assert program.stderr.readline().strip() == WAITS_LINE
    waited = len(notes.read_text().splitlines())
    with Listener(place) as listener:
        channel = listener.accept(None, TIMEOUT_S, standard_layout(), Role.ENGINE)
        assert isinstance(receive(channel), Hello)
        channel.send(Configure(config.to_json()))
        spill = listener.accept(None, TIMEOUT_S, standard_layout(), Role.SPILL)
        assert isinstance(receive(channel), EngineReady)
        channel.send(Drain())
        assert program.wait(TIMEOUT_S) == 0, program.stderr.read()
        channel.close()
        spill.close()
    program.stderr.close()
    return notes.read_text().splitlines(), waited


def receive(channel) -> object:  # type: ignore[no-untyped-def]
    """The next message."""
    while True:
        for message in channel.receive(1):
            return message
        try:
            assert channel.wait(TIMEOUT_S)
        except PeerGoneError:
            pytest.fail("the program has ended")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """A tiny engine of the device backend, whose blocks may leave it."""
    save_model(tmp_path, model_config(max_positions=64))
    sizes = {"kv_bytes": 1 << 20, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_context": 64, "block_size": 4}
    return EngineConfig(model_dir=str(tmp_path), model_digest="00", backend="device", spill=True, **sizes)


def is_device(note: str) -> bool:
    """Whether a note tells of a device or of a driver's file."""
    return note.split()[0] in ("cuda", "open", "device")


def test_no_device_is_asked_for_before_the_host_is_met(config: EngineConfig) -> None:
    """Until it waits for its host, where it is saved, and until the host has told it what it serves, the program makes
    no call for a device, although it has imported the kernels; then it asks for one and builds the device backend.
    That a call before would be noted the next test shows."""
    with tempfile.TemporaryDirectory(prefix="o-") as folder:
        notes, waited = serve(config, Path(folder))
    met = notes.index("attached")
    assert "kernels True" in notes[:met] and "attach" in notes[:waited] and waited <= met
    assert not any(map(is_device, notes[:met]))
    after = notes[met:]
    assert "cuda is_available" in after and "device DeviceStorage" in after and "device PlainOperations" in after


@pytest.mark.parametrize("early", [False, True])
def test_an_engine_on_a_device_is_not_loaded_ahead(config: EngineConfig, early: bool) -> None:
    """With its configuration as an argument, as for a checkpoint with the model, the program ends with the reason, and
    has asked for no device. Control: a call before its begin, by the same program, is noted."""
    with tempfile.TemporaryDirectory(prefix="o-") as folder:
        alone = replace(config, spill=False)
        words = [alone.to_json().decode(), *(["early"] if early else [])]
        program = probe(Path(folder) / "notes", str(Path(folder) / "host.sock"), *words)
        _, said = program.communicate(timeout=TIMEOUT_S)
        notes = (Path(folder) / "notes").read_text().splitlines()
    assert program.returncode == 3
    assert "a checkpoint cannot hold what CUDA has" in said
    assert list(filter(is_device, notes)) == ["cuda is_available"] * early
