"""``athanor demo``: the real appliance with a generated configuration, policy and keys in a state directory.

Keys and policy are made once and kept. The configuration is written at each start, because ports and models come from
the command line. ``keys.json`` has the plain keys, readable by their owner only, so that a newcomer finds them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.common.catalog import EMBEDDED_MODEL, embedded_model, find_files
from appliance.common.config import MODEL_NAME
from appliance.common.credentials import new_pepper
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.common.lock import exclusive
from appliance.operator import kernels
from appliance.operator.launcher import Addresses
from appliance.operator.serve import launch
from isolation.host.atomic_file import write_whole
from isolation.host.scratch import Outside

TENANTS = ("alpha", "beta")
"""The demo's two tenants."""

CONFIG = "athanor.yaml"
LOCK = "demo.lock"
"""Names in the state directory; either shows that it is a demo's."""

DTYPES = {EMBEDDED_MODEL: "float32"}
"""Model to dtype, where it differs from that of the weights."""

KV_BYTES = 128 << 20
"""KV memory of each model."""

MAX_RUN_PATH_BYTES = 46
"""Bytes of the run directory's path that leave room for the longest socket name below it."""

POLICY = """\
# Who may do what. Check a change with `athanor policy check`, put it in force with `athanor reload`.
version: 1
tenants:
"""

TENANT = """\
  {name}:
    credentials: ["key:{key}"]
    models: ["*"]
    deterministic: allowed
    limits:
      requests_per_minute: 6000
      tokens_per_minute: 10000000
      concurrency: 256
      max_context_tokens: 131072
      max_output_tokens: 8192
"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line may set."""

    http_port: int = 8080
    grpc_port: int = 8081
    admin_port: int = 8082
    state_dir: Path = field(default_factory=lambda: Path(".athanor"))
    models: tuple[Path, ...] = ()
    unsafe_no_sandbox: bool = False
    kernels: Path | None = None
    """Compiled kernels; None for those beside the packages, if any."""
    checkpoints: Path | None = None
    """Folder for saved sandboxes; None for the state directory. Several demos may share one."""
    no_checkpoints: bool = False
    """Whether every start is a cold one."""
    settings: tuple[str, ...] = ()
    """Keys of the configuration set on the command line, ``KEY=VALUE``."""


@dataclass(frozen=True, slots=True)
class DemoReady:
    """What the ready line says."""

    addresses: Addresses
    api_keys: dict[str, str]
    state_dir: Path

    def to_json(self) -> str:
        """The one line of ``--json``."""
        tenants = {tenant: {"api_key": key} for tenant, key in self.api_keys.items()}
        return json.dumps({**asdict(self.addresses), "tenants": tenants})


def run(
    options: DemoOptions, on_ready: Callable[[DemoReady], None], *, note: Callable[[Outside], None] | None = None
) -> int:
    """Prepare the state directory and serve until SIGTERM.

    Args:
        options: the command line.
        on_ready: called once, when the appliance serves.
        note: called with the run directory, which a guard of this process removes when this function cannot.

    Raises:
        ApplianceError: it cannot start.
    """
    state = options.state_dir.resolve()
    models = choose_models(options.models)
    with contextlib.ExitStack() as held:
        with os_errors_as(f"cannot prepare the state directory {state}"):
            claim(state)
            held.enter_context(exclusive(state / LOCK, f"the state directory {state}"))
            keys = prepare_keys(state)
            prepare_policy(state)
            if note is not None:
                note(Outside("run directory", str(run_path(state))))
            config = write_config(state, options, models)
        try:
            return launch(config, lambda addresses: on_ready(DemoReady(addresses, keys, state)), options.settings)
        finally:
            # Both host processes have ended, and with them every sandbox: what is left are locks and empty folders.
            shutil.rmtree(run_directory(state), ignore_errors=True)


def choose_models(folders: tuple[Path, ...]) -> dict[str, Path]:
    """Name to folder of what is served: the embedded model and these; a model is named as its folder.

    Raises:
        ConfigError: a folder is no model, or its name cannot be a model's, or is one already.
    """
    models = {EMBEDDED_MODEL: embedded_model()}
    for folder in folders:
        path = folder.resolve()
        if not re.fullmatch(MODEL_NAME, path.name):
            raise ConfigError(
                f"--model {folder}: a model is named as its folder, and {path.name!r} is no name for one; use letters, "
                f"digits, dot, dash and underscore, and begin with a letter or digit"
            )
        if path.name in models:
            raise ConfigError(f"--model {folder}: a model named {path.name} is served already; rename the folder")
        find_files(path.name, path)
        models[path.name] = path
    return models


def claim(state: Path) -> None:
    """Make the state directory, private; one that exists must be a demo's already, or empty.

    Raises:
        ConfigError: it is full of something else.
        OSError: it cannot be made or changed.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (state / CONFIG).exists() and not (state / LOCK).exists() and any(state.iterdir()):
        raise ConfigError(
            f"{state} holds other things than a demo's state, and a demo makes its directory private and removes "
            f"what it started there; choose a directory that is new or empty"
        )
    os.chmod(state, 0o700)


def prepare_keys(state: Path) -> dict[str, str]:
    """The tenants' plain keys; made at the first start."""
    plain_file = state / "keys.json"
    if plain_file.exists() and (state / "credentials.json").exists() and (state / "pepper").exists():
        try:
            kept = json.loads(plain_file.read_text())
            return {tenant: str(kept[tenant]) for tenant in TENANTS}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{plain_file} is damaged; remove it, and new keys are made") from error
    pepper = new_pepper()
    plain: dict[str, str] = {}
    records: dict[str, KeyRecord] = {}
    for tenant in TENANTS:
        plain[tenant], digest = issue(f"{tenant}-1", pepper)
        records[f"{tenant}-1"] = KeyRecord(digest, datetime.now(UTC), tenant=tenant)
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records(records).encode())
    write_whole(plain_file, (json.dumps(plain, indent=2) + "\n").encode())
    return plain


def prepare_policy(state: Path) -> None:
    """Write the policy unless there is one: an edited policy is the operator's own."""
    path = state / "policy.yaml"
    if not path.exists():
        text = POLICY + "".join(TENANT.format(name=name, key=f"{name}-1") for name in TENANTS)
        path.write_text(text)


def run_path(state: Path) -> Path:
    """Path of the folder for sockets: below the state directory, or, where a socket's path would be too long (108
    bytes, unix(7)), a short name that belongs to this state directory alone."""
    below = state / "run"
    if len(os.fsencode(below)) <= MAX_RUN_PATH_BYTES:
        return below
    tag = hashlib.sha256(os.fsencode(state)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"athanor-{os.geteuid()}-{tag}"


def run_directory(state: Path) -> Path:
    """Folder for sockets, see ``run_path``; one with a short name is made here, private.

    Raises:
        ConfigError: the short directory exists and is somebody else's.
    """
    short = run_path(state)
    if short.parent == state:
        return short
    short.mkdir(mode=0o700, exist_ok=True)
    owned = short.lstat()
    if not stat.S_ISDIR(owned.st_mode) or owned.st_uid != os.geteuid() or owned.st_mode & 0o022:
        raise ConfigError(f"{short} is not a private directory of this user; remove it, or use a shorter --state-dir")
    return short


def choose_ports(wanted: tuple[int, ...]) -> list[int]:
    """The wanted ports, free ones in place of zeros: chosen here, so that a restarted gateway keeps its addresses."""
    with contextlib.ExitStack() as held:
        chosen = []
        for port in wanted:
            if port == 0:
                probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            chosen.append(port)
        return chosen


def base_config(
    state: Path, ports: Sequence[int], kernels_folder: Path | None, run_dir: Path | None = None
) -> dict[str, Any]:
    """Configuration on loopback ports, with the files of a state directory, compiled kernels (those beside the
    packages when None, if there are any) and a folder for sockets (the state directory's when None); without models."""
    compiled = kernels_folder.resolve() if kernels_folder is not None else kernels.installed()
    return {
        "listen": {role: f"127.0.0.1:{port}" for role, port in zip(("http", "grpc", "admin"), ports, strict=True)},
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_dir or run_directory(state)),
        "sandbox": {"kernels": None if compiled is None else str(compiled)},
    }


def write_config(state: Path, options: DemoOptions, served: dict[str, Path]) -> Path:
    """Write ``athanor.yaml`` for these options and models; gives its path."""
    models = [
        {"name": name, "path": str(path), "dtype": DTYPES.get(name, "auto"), "kv_bytes": KV_BYTES}
        for name, path in served.items()
    ]
    saved = options.checkpoints or state / "checkpoints"
    ports = choose_ports((options.http_port, options.grpc_port, options.admin_port))
    config = {**base_config(state, ports, options.kernels), "models": models, "audit": {"directory": "audit"}}
    config["model_cache"] = {"directory": "models"}
    config["sandbox"] |= {
        "unsafe_no_sandbox": options.unsafe_no_sandbox,
        "checkpoints": None if options.no_checkpoints else str(saved.resolve()),
        "form_cache": str((state / "forms.json").resolve()),
    }
    path = state / CONFIG
    # JSON is YAML: what is generated needs no second writer.
    path.write_text("# Written by `athanor demo` at each start.\n" + json.dumps(config, indent=2) + "\n")
    return path
