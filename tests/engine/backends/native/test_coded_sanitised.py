"""The compiled codec of coded weights under address and undefined-behaviour sanitisers, with hostile chunks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from appliance.operator.kernels import find_compiler
from engine.backends.native.manifest import SOURCES
from engine.model.coded.codec import NumpyCodec
from engine.model.coded.palette import choose_code, code_table
from tests.engine.model.coded_samples import SAMPLES, Words, trained

FLAGS = ("-O2", "-g", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

Feed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """Runs the program on some weights for some rounds; skips where no compiler has the sanitisers."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    program = tmp_path_factory.mktemp("sanitised") / "hostile"
    units = [str(Path(__file__).with_name("hostile_coded.c")), str(SOURCES / "coded.c")]
    made = subprocess.run([compiler, *FLAGS, *units, "-o", str(program)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        if "sanitize" not in made.stderr and "asan" not in made.stderr:
            raise AssertionError(made.stderr)
        pytest.skip("the compiler has no sanitisers")

    def run(words: Words, rounds: int, *more: str) -> subprocess.CompletedProcess[str]:
        code = choose_code(NumpyCodec().count(words.tobytes()))
        head = np.array([len(code.exponents)], np.uint64).tobytes()
        palette = code.exponents.ljust(16, b"\0") + code.lengths.ljust(16, b"\0")
        codes, count = np.array(code_table(code), np.uint32).tobytes(), np.array([len(words)], np.uint64).tobytes()
        given = head + palette + codes + count + words.tobytes()
        environment = {"ASAN_OPTIONS": "detect_leaks=0"}  # leaks are looked for by tracing, which a sandbox may forbid
        done = subprocess.run(
            [str(program), str(rounds), *more], input=given, capture_output=True, check=False, env=environment
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")
        )

    return run


def counts(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Chunks that were taken and refused."""
    assert done.returncode == 0, done.stderr[:2_000]
    taken, refused = map(int, done.stdout.split())
    return taken, refused


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_touched_beside_the_buffers(name: str, feed: Feed) -> None:
    """Each sample is coded and decoded, and two hundred mutations of it are decoded, in buffers of the stated sizes."""
    taken, refused = counts(feed(SAMPLES[name], 200))
    assert taken >= 1
    assert taken + refused == 200


def test_thousands_of_hostile_chunks(feed: Feed) -> None:
    """Ten thousand mutations of small tensors with escapes; most are refused, some decode to other weights."""
    taken, refused = counts(feed(trained(700, odd=20), 10_000))
    assert taken > 100
    assert refused > 1_000


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(4))
def test_hundreds_of_thousands_of_hostile_chunks(seed: int, feed: Feed) -> None:
    """A hundred thousand mutations of tensors of one and several chunks."""
    assert sum(counts(feed(trained((300, 700, 4_097, 9_000)[seed], seed, odd=20), 100_000))) == 100_000


def test_a_byte_too_many_would_be_seen(feed: Feed) -> None:
    """Positive control: where one byte more is stated than there is, the sanitiser ends the program and says why."""
    done = feed(trained(700), 1, "control")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
