"""Pulls that are killed at random moments: nothing unfinished is visible, and in the end every byte is right."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from appliance.common.catalog import read_model
from tests.appliance.fetch.s3_server import S3Server
from tests.appliance.fetch.sample import make_model

MIB = 1 << 20
ATHANOR = (sys.executable, "-m", "appliance.operator.cli")


def configuration(folder: Path, sources: Path, rate: int) -> Path:
    """An appliance's configuration with a cache of models, and a bandwidth that leaves time to kill."""
    values = {
        "models": [{"name": "none", "path": "none"}],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": "run",
        "model_cache": {"directory": "cache", "sources": str(sources), "max_rate": rate},
    }
    path = folder / "athanor.yaml"
    path.write_text(json.dumps(values))
    return path


def start(config: Path, address: str) -> subprocess.Popen[bytes]:
    """Start ``athanor model pull`` in a process group of its own."""
    argv = [*ATHANOR, "model", "pull", address, "--config", str(config), "-o", "json"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def kill_at_random_moments(config: Path, address: str, kills: int, longest_s: float, draw: random.Random) -> list[int]:
    """Kill the command and its downloader ``kills`` times while they download; gives the models seen after each."""
    partial = config.parent / "cache" / "partial"
    seen = []
    for _ in range(kills):
        process = start(config, address)
        end = time.monotonic() + 90
        while not any(partial.glob("*/files/*")) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        delay = time.monotonic() + draw.uniform(0, longest_s)
        while time.monotonic() < delay and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None, f"it had ended before it was killed: {process.communicate()}"
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        seen.append(len(list((config.parent / "cache" / "models").glob("*"))))
    return seen


def run_kills(s3: S3Server, sources: Path, folder: Path, *, sizes: tuple[int, ...], kills: int, rate: int) -> None:
    """Kill so many pulls, then let one end, and compare."""
    digest = make_model(folder / "model", sizes)
    address = s3.upload(folder / "model", f"kills/{kills}")
    config = configuration(folder, sources, rate)
    longest_s = 1.2 * sum(sizes) / rate / kills  # together about 0.6 of the model
    assert kill_at_random_moments(config, address, kills, longest_s, random.Random(kills)) == [0] * kills
    process = start(config, address)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    pulled = json.loads(out)
    print(f"{sum(sizes) >> 20} MiB, {kills} kills: the last pull fetched {pulled['fetched'] >> 20} MiB")
    assert pulled["digest"] == digest == read_model("m", Path(pulled["folder"])).digest
    assert pulled["fetched"] < pulled["size"], "it went on where the killed ones were"
    assert list((folder / "cache" / "partial").iterdir()) == []


@pytest.mark.timeout(600)
def test_a_killed_pull_goes_on(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """Two kills in 48 MiB: no model is visible, and the last pull fetches only what is missing."""
    run_kills(s3, sources, tmp_path, sizes=(26 * MIB, 22 * MIB + 1), kills=2, rate=16 * MIB)


@pytest.mark.full
def test_twenty_kills_of_two_gigabytes(s3: S3Server, sources: Path, tmp_path: Path) -> None:
    """The bar: 2 GB, killed at 20 random moments, ends with the right digests."""
    run_kills(s3, sources, tmp_path, sizes=(700_000_000, 700_000_000, 600_000_001), kills=20, rate=24 * MIB)
