"""The appliance from a built image: the pinned one and no other."""

from __future__ import annotations

import json
import select
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.operator.demo import DemoOptions, choose_ports, prepare_keys, prepare_policy, run_directory, write_config
from tests.system.conftest import ATHANOR

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(300)]


def test_serve_runs_from_the_pinned_image_and_from_no_other(tmp_path: Path, runsc_path: Path) -> None:
    """Built by `athanor image build`, pinned by its digest, serving a request; with one bit of the digest changed, or a
    file of the image changed, the start is refused."""
    image = tmp_path / "image"
    built = subprocess.run([ATHANOR, "image", "build", str(image)], capture_output=True, text=True, check=True)
    digest = built.stdout.split()[-1]
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    keys = prepare_keys(state)
    prepare_policy(state)
    options = DemoOptions(*choose_ports((0, 0, 0)), state_dir=state)
    path = write_config(state, options, {"athanor-mini": embedded_model()})
    config = json.loads(path.read_text().split("\n", 1)[1])
    config["sandbox"] = {"image": str(image), "image_digest": digest}
    config["run_dir"] = str(run_directory(state))
    path.write_text(json.dumps(config))

    process = subprocess.Popen([ATHANOR, "serve", "--config", str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 120)[0]
        ready = json.loads(process.stdout.readline())
        answer = httpx.post(
            ready["http"] + "/v1/completions",
            json={"model": "athanor-mini", "prompt": "a", "max_tokens": 2},
            headers={"authorization": f"Bearer {keys['alpha']}"},
            timeout=30,
        )
        assert answer.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    flipped = ("1" if digest[0] != "1" else "2") + digest[1:]
    path.write_text(json.dumps({**config, "sandbox": {"image": str(image), "image_digest": flipped}}))
    refused = subprocess.run([ATHANOR, "serve", "--config", str(path)], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 4 and "pins" in refused.stderr

    path.write_text(json.dumps(config))
    victim = next((image / "text").rglob("conversation.py"))
    victim.chmod(0o644)
    victim.write_text(victim.read_text() + "#")
    tampered = subprocess.run([ATHANOR, "serve", "--config", str(path)], capture_output=True, text=True, timeout=60)
    assert tampered.returncode == 4 and f"{victim} is not what the image was built with" in tampered.stderr

    path.write_text(json.dumps({**config, "sandbox": {**config["sandbox"], "image_keys": ["0" * 64]}}))
    unsigned = subprocess.run([ATHANOR, "serve", "--config", str(path)], capture_output=True, text=True, timeout=60)
    assert unsigned.returncode == 4 and "is not signed" in unsigned.stderr
