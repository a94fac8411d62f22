"""The server that ``athanor bench`` measures when it is given none: this appliance, in a state directory for a while.

It is the real one, started by `athanor serve`: two tenants with keys, gVisor sandboxes, loopback. Its policy sets no
limit that a load could meet by itself, so that what is measured is the machine and not a quota.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from appliance.common.catalog import EMBEDDED_MODEL
from appliance.common.errors import ConfigError, StartError
from appliance.operator import demo
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start

START_TIMEOUT_S = 120.0
"""Seconds to the ready line: two sandboxes a model, on a busy machine."""

POLL_S = 0.05

END_GRACE_S = 60.0
"""A drain, and the removal of every sandbox."""

KV_BLOCK = 8
"""Tokens of a KV block: prefixes of scaled traces come in so many."""

POLICY = """\
version: 1
tenants:
"""
TENANT = """\
  {name}:
    credentials: ["key:{name}-1"]
    models: ["*"]
    limits:
      requests_per_minute: 1000000
      tokens_per_minute: 1000000000
      concurrency: 4096
      max_context_tokens: 1048576
      max_output_tokens: 1048576
"""


Adjust: TypeAlias = Callable[[Path, dict[str, Any]], None]
"""What is called with state directory and configuration."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running appliance of our own."""

    url: str
    model: str
    api_keys: tuple[str, ...]
    pid: int
    """Process that all others of the server descend from."""
    sandbox: str
    """What holds its engine; empty of a server that is not ours."""
    started_s: float = 0.0
    """Seconds from the start of its process to a first token of its model."""
    admin: str = ""
    """Address of the operator's listener; empty of a server that is not ours."""
    state: Path = Path()
    """Folder with all its files, of a server that is ours."""


@contextlib.contextmanager
def own_appliance(
    model_folder: Path | None,
    kv_bytes: int,
    dtype: str,
    kernels_folder: Path | None = None,
    *,
    adjust: Adjust | None = None,
    environment: Mapping[str, str] = MINIMAL_ENVIRONMENT,
) -> Iterator[Target]:
    """Serve a model (the embedded one when None) for the time of the block, on compiled kernels (those beside the
    packages when None, if there are any). ``adjust`` is called with the state directory and the configuration before
    the start, and may change both; ``environment`` is added to the smallest one there is.

    Raises:
        ApplianceError: it cannot start; with the last lines of its log.
        IsolationError: its process cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        state = Path(folder) / "state"
        config, keys = _prepare(state, model_folder, kv_bytes, dtype, kernels_folder, adjust)
        log = Path(folder) / "log"
        argv = (sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(config))
        with log.open("wb") as file:
            child = start(argv, env={**MINIMAL_ENVIRONMENT, **environment}, stdio=file.fileno(), own_group=True)
        began = time.monotonic()
        try:
            ready = wait_ready(child, log)
            started_s = time.monotonic() - began
            yield Target(
                ready["http"],
                ready["models"][-1],
                tuple(keys.values()),
                child.pid,
                ready["sandbox"],
                started_s,
                ready["admin"],
                state,
            )
        finally:
            child.end(END_GRACE_S)


def _prepare(
    state: Path,
    model_folder: Path | None,
    kv_bytes: int,
    dtype: str,
    kernels_folder: Path | None,
    adjust: Adjust | None,
) -> tuple[Path, dict[str, str]]:
    """State directory with keys, policy and configuration; the run directory lies beside it."""
    models = demo.choose_models((model_folder,) if model_folder is not None else ())
    name = EMBEDDED_MODEL if model_folder is None else model_folder.resolve().name
    if not 1 << 20 <= kv_bytes <= 1 << 40:
        raise ConfigError(f"a KV cache of {kv_bytes} bytes is outside {1 << 20} to {1 << 40}")
    if dtype == "auto":
        dtype = demo.DTYPES.get(name, dtype)
    state.mkdir(mode=0o700)
    run_dir = state.parent / "run"  # not below the state: a socket's path has 108 bytes (unix(7))
    keys = demo.prepare_keys(state)
    (state / "policy.yaml").write_text(POLICY + "".join(TENANT.format(name=tenant) for tenant in keys))
    model = {"name": name, "path": str(models[name]), "dtype": dtype, "kv_bytes": kv_bytes, "block_size": KV_BLOCK}
    config = {**demo.base_config(state, demo.choose_ports((0, 0, 0)), kernels_folder, run_dir), "models": [model]}
    if adjust is not None:
        adjust(state, config)
    path = state / "athanor.yaml"
    path.write_text(json.dumps(config))
    return path, keys


def wait_ready(child: Child, log: Path) -> dict[str, Any]:
    """The ready line; everything else in the log is a log.

    Raises:
        StartError: it does not come; with the last lines of the log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and child.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"http"'):
                with contextlib.suppress(ValueError):
                    return dict(json.loads(line))
        time.sleep(POLL_S)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    raise StartError(f"the appliance to be measured did not get ready; its last words:\n{tail}")
