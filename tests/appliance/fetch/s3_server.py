"""A real S3 server (SeaweedFS) for tests: its processes, its bucket, and its files over plain HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import obstore
from obstore.store import S3Store

BUCKET = "models"
OPEN_BUCKET = "open"
"""A bucket that anybody reads."""

USER, SECRET = "athanor", "a-secret-of-the-tests"
START_S = 90.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server on loopback."""

    endpoint: str
    files: str
    """Address under which the bucket is served over HTTP without credentials."""

    def store(self, bucket: str = BUCKET) -> S3Store:
        """A bucket, made when it is written to. Each reserves volumes of its own."""
        config = {"endpoint": self.endpoint, "access_key_id": USER, "secret_access_key": SECRET, "region": "us-east-1"}
        return S3Store(bucket, config=config, client_options={"allow_http": True})

    def upload(self, folder: Path, prefix: str, bucket: str = BUCKET) -> str:
        """Upload a model's folder; gives its address."""
        store = self.store(bucket)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path)
        return f"s3://{bucket}/{prefix}"

    def sources(self, path: Path, *, secret: str = SECRET) -> Path:
        """A file of sources with this server's endpoint and credentials."""
        keys = {"access_key_id": USER, "secret_access_key": secret}
        entry = {"prefix": "s3://", "endpoint": self.endpoint, "region": "us-east-1", **keys}
        path.write_text(json.dumps({"sources": [entry]}))
        path.chmod(0o600)
        return path


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different; gRPC's are given as well, so that none is derived."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def serve_s3(folder: Path) -> Iterator[S3Server]:
    """Run a server whose data is below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"accessKey": USER, "secretKey": SECRET}
    identity = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    anybody = {"name": "anonymous", "actions": [f"Read:{OPEN_BUCKET}", f"List:{OPEN_BUCKET}"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, anybody]}))
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), free_ports(8), strict=True))
    flags = [f"-{name}.port={ports[name]}" for name in names]
    flags += [f"-{name}.port.grpc={ports[f'{name}.grpc']}" for name in names]
    argv = [
        str(Path(sys.executable).parent / "weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    argv += ["-filer", "-s3", f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=512", "-volume.max=64"]
    # Fixed ports of services that nothing here uses: a second server on the machine would end.
    argv += ["-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0", *flags]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (folder / "log").open("wb") as log, closing(httpx.Client()) as client:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
        try:
            _wait(client, endpoint, process, folder / "log")
            yield S3Server(endpoint, f"http://127.0.0.1:{ports['filer']}/buckets/{BUCKET}")
        finally:
            process.kill()  # its data goes as well
            process.wait()


def _wait(client: httpx.Client, endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it takes an object: its parts find each other after they listen."""
    end = time.monotonic() + START_S
    server = S3Server(endpoint, "")
    while True:
        assert process.poll() is None, log.read_text()[-2_000:]
        try:
            client.get(endpoint)
            obstore.put(server.store(), "probe", b"probe")
            return
        except (httpx.TransportError, obstore.exceptions.BaseError):
            assert time.monotonic() < end, log.read_text()[-2_000:]
            time.sleep(0.2)
