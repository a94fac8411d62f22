"""What ``athanor bench`` does: write a card of the machine, start a server or take the given one, play the loads, show
and keep the figures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from appliance.common.errors import ApplianceError, ConfigError
from appliance.common.figures import counted
from appliance.common.version import VERSION
from appliance.operator.bench import metrics, report, workload
from appliance.operator.bench.client import Client
from appliance.operator.bench.errors import BenchError, CardError, TargetError
from appliance.operator.bench.run import play
from appliance.operator.cli import exits
from appliance.operator.cli.bench_target import Target, own_appliance
from appliance.operator.cli.long_work import LongWork, of_counted
from appliance.operator.cli.terminal import errors, fail, output
from isolation.errors import IsolationError

if TYPE_CHECKING:
    from appliance.operator.bench.metrics import Figures
    from appliance.operator.bench.run import Run
    from appliance.operator.bench.workload import Load

ENGINE_TIMEOUT_S = 1_800.0
"""Seconds for the engine alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The command line, as values."""

    loads: tuple[str, ...]
    url: str | None
    api_keys: tuple[str, ...]
    model: str | None
    prompt_tokens: int
    output_tokens: int
    tenants: int
    kv_bytes: int
    dtype: str
    kernels: Path | None
    """Compiled kernels; None for those beside the packages, if any."""
    seed: int
    price_per_hour: float | None
    pid: int | None
    json_file: Path | None
    plots: Path | None
    record: Path | None
    """File for a card of this machine; None for no card."""
    note: str
    """Note on that card."""


def run(wish: Wish) -> int:
    """Measure, show, write; gives the exit code: ``REFUSED`` when a request failed."""
    try:
        loads = [workload.parse_load(text) for text in wish.loads]
        document: dict[str, Any] = {"athanor": VERSION, "machine": _machine(), "seed": wish.seed}
        over_http = [one for one in loads if one.kind != "engine"]
        results: list[Figures] = []
        if wish.plots is not None:
            _check_plots()
        _record(wish)
        if over_http:
            with _target(wish) as target:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    results = runner.run(_measure(target, over_http, wish))
                heading = f"{target.model} at {target.url}"
                if target.sandbox:
                    heading += f" in {target.sandbox}, ready after {target.started_s:.1f} s"
            output().print(report.tables(results, heading))
            document |= {"target": heading, "started_s": target.started_s, "loads": [one.to_dict() for one in results]}
        for load in loads:
            if load.kind == "engine":
                document["engine"] = _engine(load, wish)
        if wish.json_file is not None:
            wish.json_file.write_text(json.dumps(document, indent=2) + "\n")
        if wish.plots is not None:
            _plot(document, wish.plots)
    except BenchError as error:
        fail(exits.REFUSED, str(error))
    except (ApplianceError, IsolationError) as error:
        fail(exits.CANNOT_START, str(error))
    except OSError as error:
        fail(exits.REFUSED, f"cannot write {error.filename}: {error.strerror}")
    return exits.REFUSED if any(one.failed for one in results) else exits.OK


def _record(wish: Wish) -> None:
    """Write the card that was asked for: before the loads, while the machine is as quiet as it will be."""
    from appliance.operator.cli import bench_record

    if wish.record is None:
        if wish.note:
            raise CardError("--note is for a card of this machine; add --record")
        return
    _say("this machine: facts, speed of its memory ...")
    wish.record.write_text(bench_record.record(wish.note).to_json())
    errors().print(f"wrote {wish.record}", style="dim", soft_wrap=True)


@contextlib.contextmanager
def _target(wish: Wish) -> Iterator[Target]:
    """The server named, or one of ours for a while."""
    if wish.url is not None:
        if wish.model is None:
            raise TargetError("a server is measured by a model it serves; name it with --model")
        if wish.pid is not None and not Path("/proc", str(wish.pid)).exists():
            raise TargetError(f"--pid {wish.pid}: no process of this machine has that id")
        yield Target(wish.url, wish.model, wish.api_keys, wish.pid or 0, "")
        return
    folder = Path(wish.model) if wish.model is not None else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--model {folder} is no folder; without --url it names the model to serve")
    _say("starting: sandboxes, model, a first token ...")
    with own_appliance(folder, wish.kv_bytes, wish.dtype, wish.kernels) as target:
        yield replace(target, api_keys=target.api_keys[: wish.tenants])


async def _measure(target: Target, loads: Sequence[Load], wish: Wish) -> list[Figures]:
    shape = workload.Shape(wish.prompt_tokens, wish.output_tokens)
    tenants = max(1, len(target.api_keys))
    client = Client(target.url, target.model, target.api_keys)
    results = []
    for load in loads:
        plans = workload.plan(load, shape, tenants=tenants, seed=wish.seed)
        _say(f"{load.name}: {counted(len(plans), 'request')} ...")
        warm = workload.warm_up(load, shape, tenants=tenants, seed=wish.seed)
        total = len(plans)
        with LongWork(load.name, of_counted("request")) as work:
            work.stage("warming up")

            def began(run: Run, work: LongWork = work, total: int = total) -> None:
                work.stage("measuring")
                work.follow(lambda: (len(run.samples), total))

            played = await play(client, load, plans, warm, target.pid or None, began)
        results.append(metrics.figures(played, price_per_hour=wish.price_per_hour))
    return results


def _engine(load: Load, wish: Wish) -> dict[str, Any]:
    """The engine alone, in a process of its own: this one has no tensors."""
    from appliance.common.catalog import embedded_model
    from appliance.operator import kernels
    from isolation.host.process import MINIMAL_ENVIRONMENT
    from isolation.host.process import run as run_program

    folder = Path(wish.model) if wish.model is not None else embedded_model()
    _say(f"{load.name}: {folder.name} ...")
    argv = [
        sys.executable,
        "-m",
        "appliance.operator.bench.engine_alone",
        "--model",
        str(folder.resolve()),
        "--dtype",
        wish.dtype,
    ]
    argv += ["--batches", ",".join(map(str, load.batches)), "--prompt-tokens", str(wish.prompt_tokens)]
    argv += ["--output-tokens", str(wish.output_tokens)]
    compiled = wish.kernels or kernels.installed()
    if compiled is not None:
        argv += ["--kernels", str(compiled.resolve())]
    with tempfile.TemporaryDirectory(prefix="athanor-bench-") as scratch, LongWork(load.name):
        done = run_program(argv, timeout_s=ENGINE_TIMEOUT_S, env=MINIMAL_ENVIRONMENT, cwd=Path(scratch))
    found: dict[str, Any] = json.loads(done.stdout)
    output().print(report.engine_table(found["rows"], found))
    return found


def _check_plots() -> None:
    """Before anything is measured."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "plots need matplotlib, which is not installed here; install the extra: pip install 'athanor[bench]' in a "
            "virtual environment, athanor package deb --extra bench for a package; or leave --plots out"
        )


def _plot(document: dict[str, Any], folder: Path) -> None:
    from appliance.operator.bench import plots

    for path in plots.draw(document, folder):
        errors().print(f"wrote {path}", style="dim", soft_wrap=True)


def _machine() -> dict[str, Any]:
    """What a figure's reader has to know of where it was taken."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def _say(text: str) -> None:
    errors().print(text, style="dim", soft_wrap=True)
