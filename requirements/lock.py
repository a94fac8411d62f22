"""Renew the pinned versions: `make lock`; those of the peers that bench/ measures: `lock.py peers`; the fuzzer's:
`lock.py fuzz`; an older Triton: `lock.py triton`; those of the clients that tests call with: `lock.py clients`.

Writes ``run.lock`` (what the appliance needs but torch), ``dev.lock`` (that and its tests), ``cpu.lock`` (torch's CPU
build as found here) and ``cuda.lock`` (its CUDA build and what that brings), all with hashes and without any index
address. The two builds are apart because pip, given hashes of both, prefers the one from an index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13")
"""Interpreters whose wheels are listed in cuda.lock."""

OPTIONS = (
    "--quiet",
    "--generate-hashes",
    "--strip-extras",
    "--allow-unsafe",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-emit-trusted-host",
    "--no-emit-options",
)
HEADER = "# Written by `make lock`; installed with --require-hashes beside cpu.lock or, failing that, cuda.lock.\n"


PEERS_HEADER = "# Written by `python requirements/lock.py peers`; installed by bench/peers.py beside cpu.lock.\n"
NOT_NEEDED = ("torch", "torchvision")
"""Left out of peers.lock: torch is in cpu.lock, and torchvision's one build needs another torch than that."""


def main() -> int:
    """Write the files."""
    match sys.argv[1:]:
        case ["peers"]:
            return peers()
        case ["fuzz"]:
            return alone("fuzz", "bench/fuzz/run.py")
        case ["triton"]:
            return alone("triton", "requirements/observers.py")
        case ["clients"]:
            return clients()
        case _:
            return own()


def alone(name: str, user: str) -> int:
    """Write the lock of something that few need and that has nothing of the others beside it."""
    target = HERE / f"{name}.lock"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "piptools", "compile", *OPTIONS]
    subprocess.run([*command, "-o", str(target), f"requirements/{name}.in"], check=True, cwd=HERE.parent)
    rest = re.sub(r"\A(#.*\n)+", "", target.read_text())
    target.write_text(f"# Written by `python requirements/lock.py {name}`; used by {user}.\n{rest}")
    return 0


def peers() -> int:
    """Write ``peers.lock``."""
    target = HERE / "peers.lock"
    target.unlink(missing_ok=True)
    command = [sys.executable, "-m", "piptools", "compile", *OPTIONS]
    subprocess.run([*command, "-o", str(target), str(HERE / "peers.in")], check=True, cwd=HERE.parent)
    entries = re.split(r"^(?=[a-z0-9])", re.sub(r"\A(#.*\n)+", "", target.read_text()), flags=re.MULTILINE)
    target.write_text(PEERS_HEADER + "".join(one for one in entries if one.partition("==")[0] not in NOT_NEEDED))
    return 0


def clients() -> int:
    """Write the lock of each environment of clients: some of them do not go together."""
    for source in sorted((HERE / "clients").glob("*.in")):
        target = source.with_suffix(".lock")
        target.unlink(missing_ok=True)
        command = [sys.executable, "-m", "piptools", "compile", *OPTIONS]
        subprocess.run([*command, "-o", str(target), str(source.relative_to(HERE.parent))], check=True, cwd=HERE.parent)
        rest = re.sub(r"\A(#.*\n)+", "", target.read_text())
        target.write_text("# Written by `python requirements/lock.py clients`; used by `make clients`.\n" + rest)
    return 0


def own() -> int:
    """Write the four files of the appliance itself."""
    pins, hashes = torch_builds()
    for name, extras in (("run", ("build",)), ("dev", ("build", "bench", "dev"))):
        target = HERE / f"{name}.lock"
        target.unlink(missing_ok=True)  # else the pin of torch without its local version would choose the CUDA build
        asked = [part for extra in extras for part in ("--extra", extra)]
        command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, *asked]
        subprocess.run([*command, "-o", str(target), "pyproject.toml"], check=True, cwd=HERE.parent)
        rest, version, own = without_torch(target.read_text())
        target.write_text(HEADER + rest)
    lines = ["# The CPU build of torch, where the machine's own settings offer it.\n"]
    lines += [f"torch=={version} \\\n", " \\\n".join(f"    --hash=sha256:{value}" for value in own) + "\n"]
    (HERE / "cpu.lock").write_text("".join(lines))
    lines = ["# The CUDA build of torch and what it brings, for machines that are not offered the CPU build.\n"]
    for name in sorted(pin for pin in pins if pin.startswith(("nvidia", "cuda", "triton", "torch"))):
        listed = " \\\n".join(f"    --hash=sha256:{value}" for value in sorted(hashes[name]))
        lines.append(f"{name}=={pins[name]} \\\n{listed}\n")
    (HERE / "cuda.lock").write_text("".join(lines))
    return 0


def torch_builds() -> tuple[dict[str, str], dict[str, set[str]]]:
    """Versions and hashes of the CUDA build of torch and of what it brings, as the registry's metadata names them."""
    wanted = re.search(r'"(torch==[^"]+)"', (HERE.parent / "pyproject.toml").read_text())
    assert wanted is not None
    environment = {**os.environ, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    pins: dict[str, str] = {}
    hashes: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as scratch:
        for python in PYTHONS:
            report = Path(scratch) / f"{python}.json"
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--dry-run",
                "--ignore-installed",
                "--only-binary=:all:",
                "--python-version",
                python,
                "--target",
                scratch,
                "--report",
                str(report),
                wanted.group(1),
            ]
            subprocess.run(command, env=environment, check=True)
            for item in json.loads(report.read_text())["install"]:
                name = item["metadata"]["name"].lower().replace("_", "-")
                pins[name] = item["metadata"]["version"]
                hashes[name].add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return pins, hashes


def without_torch(text: str) -> tuple[str, str, list[str]]:
    """The lock without its entry of torch, torch's public version, and the hashes of the build found here."""
    body = re.sub(r"\A(#.*\n)+", "", text)
    pattern = re.compile(r"^torch==([0-9.]+)\S* \\\n((?:    --hash=\S+(?: \\)?\n)+)(?:    # via .*\n)?", re.MULTILINE)
    found = pattern.search(body)
    assert found is not None
    return pattern.sub("", body, count=1), found.group(1), re.findall(r"sha256:(\w+)", found.group(2))


if __name__ == "__main__":
    sys.exit(main())
