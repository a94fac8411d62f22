"""``athanor model bench``: how fast a served model is, beside what was expected of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, FIND, Admin, Config, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig
    from appliance.operator.bench.live import EngineMemory, LiveLevel

BENCH_EXAMPLES = """
athanor tenant add bench --models "*" --credential key:bench-live | once: the account that is measured under
athanor model bench llama | 1, 4 and 16 streams, beside tenants that go first
athanor model bench llama -o json | for a record
"""

TENANT = "bench"
"""Tenant under which models are measured."""

KEY_ID = "bench-live"
"""Its key, which is there only while a measurement runs."""

KEY_LIFE = timedelta(minutes=20)
"""End of that key, should the command be killed: all levels, at their longest, and some time."""

IN_FORCE_S = 15.0
"""Patience until the appliance has the key."""

PAUSE_S = 0.1
"""Between two questions whether it has."""


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in requests and policies.")],
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=4_096, help="Of each prompt; no two begin alike.")
    ] = 128,
    output_tokens: Annotated[int, typer.Option(metavar="N", min=2, max=1_024, help="Of each answer.")] = 64,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="HTTP listener, in place of the configuration's.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = FIND,
    output_format: Output = Format.TABLE,
) -> None:
    """Measure a model of the running appliance: tokens a second, first token, load time, memory.

    Sends 44 requests, 16 at once at most, under the tenant bench with low priority: they get what
    other tenants leave. Beside each rate is the most that the machine's memory could give.
    """
    from appliance.operator.cli.policy_versions import load_configuration

    loaded = load_configuration(config)
    model = next((one for one in loaded.models if one.name == name), None)
    if model is None:
        fail(exits.REFUSED, f"no model {name} is configured", "athanor model list shows what is served")
    if model.runner in ("embed", "classify"):
        fail(exits.REFUSED, f"the model {name} generates no tokens: its runner is {model.runner}")
    facts = _expected(loaded, name, config)
    with _own_key(config, admin) as key:
        levels, memory = _measured(url or _address(loaded), key, facts, admin, (prompt_tokens, output_tokens))
    _show(facts, levels, memory, output_format)
    if any(one.failures for one in levels):
        raise typer.Exit(exits.REFUSED)


def _expected(loaded: ApplianceConfig, name: str, config: Path) -> dict[str, Any]:
    """What is expected of the model before it is measured."""
    from appliance.common.catalog import find_files
    from appliance.common.model_memory import model_need
    from appliance.operator.speed import MACHINE_CARD, read_speed

    model = next(one for one in loaded.models if one.name == name)
    on_card = model.gpu != "off"
    need = model_need(model, find_files(name, model.folder)[0], on_card=on_card)
    speed = None if on_card else read_speed(config.resolve().parent / MACHINE_CARD)
    return {"model": name, "weights_bytes": need.weights, "about_bytes": need.about, "read_bytes_per_s": speed}


def _address(loaded: ApplianceConfig) -> str:
    """Address of the HTTP listener on this machine."""
    listener = loaded.listen.http
    if listener.startswith("unix:"):
        fail(exits.REFUSED, f"the HTTP listener is {listener}, and this command needs a port", "--url names one")
    host, _, port = listener.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - not bound here
    return f"{'https' if loaded.listen.tls else 'http'}://{host}:{port}"


@contextlib.contextmanager
def _own_key(config: Path, admin: str) -> Iterator[str]:
    """Make the account's key for the time of the block."""
    from appliance.common.scopes import Scope
    from appliance.operator.cli.tenant_change import present
    from appliance.operator.key_table import WantedKey, changing

    found = present(config)
    tenant = found.policy.tenants.get(TENANT)
    if tenant is None or f"key:{KEY_ID}" not in [str(one) for one in tenant.credentials]:
        how = f'athanor tenant add {TENANT} --models "*" --credential key:{KEY_ID}'
        fail(exits.REFUSED, f"the policy has no tenant {TENANT} with the credential key:{KEY_ID}", how)
    now = datetime.now(UTC)
    with changing(found.key_files) as table:
        old = table.records.get(KEY_ID)
        if old is not None and old.holds(now):
            ends = f"{old.expires:%H:%M} UTC" if old.expires is not None else "never"
            fail(exits.REFUSED, f"the key {KEY_ID} is in use: a model is being measured, or was; it ends {ends}")
        table.drop(KEY_ID)
        scopes = frozenset({Scope.GENERATE})
        made = table.add(WantedKey(tenant=TENANT, id=KEY_ID, expires=now + KEY_LIFE, scopes=scopes), now)
    try:
        _in_force(admin, table.digest)
        yield made.key
    finally:
        with changing(found.key_files) as table:
            table.drop(KEY_ID)


def _in_force(admin: str, digest: str) -> None:
    """Wait until the appliance has this key table; the command ends if it does not take it."""
    from appliance.common.status import KeysStatus
    from appliance.operator.cli.admin_client import ask, read

    began = time.monotonic()
    while (status := read(KeysStatus, ask(admin, "/keys"))).digest != digest:
        if time.monotonic() - began > IN_FORCE_S:
            why = status.problem or f"it has another key table, {status.file}"
            fail(exits.REFUSED, f"the appliance does not take the key of this measurement: {why}", "athanor doctor")
        time.sleep(PAUSE_S)


def _measured(
    url: str, key: str, facts: dict[str, Any], admin: str, lengths: tuple[int, int]
) -> tuple[list[LiveLevel], EngineMemory]:
    import asyncio

    from appliance.operator.bench import live
    from appliance.operator.bench.client import Client
    from appliance.operator.bench.errors import BenchError
    from appliance.operator.bench.workload import Shape
    from appliance.operator.cli.admin_client import UnreachableError, try_text
    from appliance.operator.speed import most_tokens_per_s

    memory, model = live.EngineMemory(), facts["model"]

    def scrape() -> str:
        try:
            return try_text(admin, "/metrics")
        except UnreachableError:
            return ""

    async def measure() -> list[LiveLevel]:
        client = Client(url, model, (key,), tier=live.LOW)
        watcher = asyncio.create_task(live.watch(memory, model, scrape))
        try:
            weights, speed = facts["weights_bytes"], facts["read_bytes_per_s"]
            bound = lambda streams: most_tokens_per_s(weights, speed, streams)  # noqa: E731 - one use
            found = await live.measure(client, Shape(*lengths), bound, _say)
            live.look(memory, model, await asyncio.to_thread(scrape))
            return found
        finally:
            watcher.cancel()
            client.close()

    try:
        return asyncio.run(measure()), memory
    except BenchError as error:
        fail(exits.REFUSED, str(error), "athanor status; athanor policy explain tells what the tenant bench may do")


def _say(text: str) -> None:
    errors().print(text, style="dim", soft_wrap=True)


def _show(facts: dict[str, Any], levels: list[LiveLevel], memory: EngineMemory, output_format: Format) -> None:
    rows = [{**asdict(one), "share_of_bound": one.share} for one in levels]
    seen = {"memory_peak_bytes": memory.most, "memory_limit_bytes": memory.limit, "load_s": memory.loaded_s}
    if print_data({**facts, "tenant": TENANT, "levels": rows, **seen}, output_format):
        return
    from rich.text import Text

    from appliance.common.figures import duration, printable, size
    from appliance.operator.bench.report import milliseconds, number
    from appliance.operator.cli.tables import table
    from appliance.operator.speed import HOW

    console = output()
    titles = ("REQUESTS", "FAILED", "TOKENS/S", "AT MOST", "FIRST TOKEN", "P95", "LATER TOKENS")
    shown = table("STREAMS", numbers=titles)
    for one in levels:
        failed = sum(one.failures.values())
        times = (one.first_token_p50_s, one.first_token_p95_s, one.later_token_p50_s)
        shown.add_row(
            Text(str(one.streams), "bold"),
            Text(str(one.requests)),
            Text(str(failed), "bold red" if failed else "dim"),
            number(one.tokens_per_s),
            Text("-", "dim") if one.bound is None else number(one.bound),
            *(Text("-", "dim") if value is None else milliseconds(value) for value in times),
        )
    console.print(shown)
    loaded = "not told" if memory.loaded_s is None else duration(memory.loaded_s)
    held = "not told" if memory.most is None else f"{size(memory.most)} at most of {size(memory.limit or 0)}"
    lines = [
        f"load    {loaded}, of the engine's sandbox when it last booted",
        f"memory  {held}; about {size(facts['about_bytes'])} was expected, with all of its KV",
    ]
    if facts["read_bytes_per_s"] is None:
        lines.append(f"at most not known: {HOW}")
    else:
        speed = facts["read_bytes_per_s"] / 1e9
        lines.append(f"at most memory at {speed:.1f} GB/s, weights of {size(facts['weights_bytes'])} read once a step")
    for line in lines:
        console.print(printable(line), soft_wrap=True, markup=False, highlight=False)
