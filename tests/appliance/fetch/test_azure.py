"""A pull from a real server of Azure's blob storage (Azurite), where `make azurite` has got it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import obstore
import pytest
from obstore.store import AzureStore

from appliance.common.errors import ModelSourceError
from appliance.common.model_cache.manifest import MANIFEST
from appliance.fetch.pull import PullOrder
from tests.appliance.fetch.s3_server import free_ports
from tests.appliance.fetch.sample import make_model
from tests.appliance.fetch.test_pull import SIZES, pull

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key that Azurite has and documents; no secret."""

START_S = 60.0


@pytest.fixture(scope="module")
def azure(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a running server with a container ``models``."""
    program = root / ".venv/share/azurite/node_modules/.bin/azurite-blob"
    if not program.exists() or shutil.which("node") is None:
        pytest.skip("no Azurite here: `make azurite` gets it from npm")
    folder, (port,) = tmp_path_factory.mktemp("azurite"), free_ports(1)
    argv = [str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(folder)]
    argv += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        endpoint, end = f"http://127.0.0.1:{port}/{ACCOUNT}", time.monotonic() + START_S
        while True:
            try:
                make_container(endpoint)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.2)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def make_container(endpoint: str) -> None:
    """Make the container ``models``, which the library does not do: a request signed with the shared key."""
    now, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2021-12-02"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{now}", f"x-ms-version:{version}"]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/models", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": now, "x-ms-version": version, "authorization": f"SharedKey {ACCOUNT}:{signature}"}
    answer = httpx.put(f"{endpoint}/models?restype=container", headers=headers)
    assert answer.status_code == 201, answer.text


def sources(path: Path, endpoint: str, key: str) -> Path:
    """A file of sources for the server."""
    entry = {"prefix": "az://", "endpoint": endpoint, "account_name": ACCOUNT, "account_key": key}
    path.write_text(json.dumps({"sources": [entry]}))
    path.chmod(0o600)
    return path


def test_a_model_comes_from_azure(azure: str, tmp_path: Path) -> None:
    """By its manifest, and by the list of files with a digest; a wrong key is refused and not shown."""
    digest = make_model(tmp_path / "model", SIZES)
    config = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": azure}
    store = AzureStore("models", config=config, client_options={"allow_http": True})
    for path in (tmp_path / "model").iterdir():
        obstore.put(store, f"some/m/{path.name}", path)
    right = sources(tmp_path / "right.yaml", azure, KEY)
    assert pull(tmp_path / "cache", PullOrder("az://models/some/m"), right).digest == digest
    obstore.delete(store, f"some/m/{MANIFEST}")
    assert pull(tmp_path / "other", PullOrder("az://models/some/m", digest=digest), right).digest == digest
    wrong = base64.b64encode(b"wrong" * 12).decode()
    with pytest.raises(ModelSourceError, match="refuses the credentials") as caught:
        pull(tmp_path / "none", PullOrder("az://models/some/m"), sources(tmp_path / "wrong.yaml", azure, wrong))
    assert wrong not in str(caught.value)
