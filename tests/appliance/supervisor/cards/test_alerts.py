"""The shipped alerts of GPUs, from a pretended driver over the watch and a scrape to a real Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from ruamel.yaml import YAML

from appliance.common.control import LOSS_REASONS, Control
from appliance.common.listen_config import ListenConfig
from appliance.gateway.telemetry import names
from appliance.gateway.watch.cards import WatchedCards
from appliance.gateway.watch.metrics_listener import serve_metrics
from appliance.operator.demo import choose_ports
from appliance.supervisor.cards.judge import CardVerdict
from isolation.host.process import start
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.supervisor.cards.conftest import GIB, HANGS, LOST, Machine
from tests.appliance.supervisor.cards.test_watch import Watched, watching
from tests.observers import observer

CONFIG = """\
global: {{scrape_interval: 250ms, evaluation_interval: 250ms, scrape_timeout: 250ms}}
rule_files: [{rules}]
scrape_configs: [{{job_name: athanor, static_configs: [{{targets: ["{target}"]}}]}}]
"""


def quick_rules(root: Path) -> dict[str, object]:
    """The alerts of GPUs as they are shipped, which hold as soon as they are evaluated."""
    groups = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())["groups"]
    found = [rule for group in groups for rule in group["rules"] if rule.get("alert", "").startswith("AthanorGpu")]
    return {"groups": [{"name": "gpus", "interval": "250ms", "rules": [{**rule, "for": "0s"} for rule in found]}]}


@dataclass
class Scraped(Watched):
    """A watch whose states become the metrics of an appliance."""

    fake: FakeAppliance = field(default_factory=FakeAppliance)
    cards: WatchedCards = field(default_factory=WatchedCards)

    def publish(self, message: Control, fds: tuple[int, ...]) -> bool:
        """As the gateway does."""
        super().publish(message, fds)
        self.cards.take(self.states[-1])
        self.fake.telemetry.metrics.levels([*self.cards.levels(self.fake.telemetry.count)])
        return True

    def act(self, verdict: CardVerdict) -> None:
        """The engine goes down with the reason of the verdict, and is there again at once."""
        self.verdicts.append(verdict)
        self.fake.telemetry.count(names.SANDBOX_LOSSES, model="m", role="engine", reason=verdict.reason)


@contextlib.asynccontextmanager
async def prometheus(root: Path, folder: Path, target: str) -> AsyncIterator[str]:
    """A Prometheus that scrapes four times a second."""
    (folder / "rules.yml").write_text(json.dumps(quick_rules(root)))
    words = {"rules": folder / "rules.yml", "target": target.removeprefix("http://")}
    (folder / "prometheus.yml").write_text(CONFIG.format(**words))
    address = f"127.0.0.1:{choose_ports((0,))[0]}"
    options = f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=error"
    child = start([observer("prometheus"), *options, f"--web.listen-address={address}"], cwd=folder)
    try:
        yield address
    finally:
        await asyncio.to_thread(child.end)


async def firing(client: httpx.AsyncClient, address: str) -> set[str]:
    """Alerts that fire now; none before it answers."""
    with contextlib.suppress(httpx.TransportError):
        found = (await client.get(f"http://{address}/api/v1/alerts")).json()
        return {one["labels"]["alertname"] for one in found["data"]["alerts"]} if "data" in found else set()
    return set()


@pytest.mark.timeout(120)
async def test_alerts_of_gpus_fire_under_their_causes(machine: Machine, root: Path, tmp_path: Path) -> None:
    """None while a card is well and held down by its limit of power alone; then each under its cause, and those of a
    card that is lost replace those of its figures."""
    watched = Scraped()
    metrics = watched.fake.telemetry.metrics
    metrics.expect(names.SANDBOX_LOSSES, model=["m"], role=["engine"], reason=LOSS_REASONS)
    parts = watched.fake.parts()
    listen = ListenConfig.model_validate({"metrics": "127.0.0.1:0"})
    async with (
        serve_metrics(listen, parts.metrics, parts.refresh, parts.ready) as shown,
        prometheus(root, tmp_path, shown["metrics"]) as address,
        httpx.AsyncClient() as client,
        asyncio.timeout(90),
        watching(machine, watched),
    ):

        async def until(query: str) -> None:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.get(f"http://{address}/api/v1/query", params={"query": query})
                    if answer.is_success and answer.json()["data"]["result"]:
                        return
                await asyncio.sleep(0.1)

        await until("count_over_time(athanor_gpu_lost[10s]) > 3")
        assert await firing(client, address) == set()
        machine.card(ecc=2, clocks=0x40, pid=os.getpid(), held=79 * GIB)
        while await firing(client, address) != {"AthanorGpuFailing", "AthanorGpuHot", "AthanorGpuMemory"}:
            await asyncio.sleep(0.1)
        machine.card(state=LOST)
        while await firing(client, address) - {"AthanorGpuMemory"} != {"AthanorGpuLost"}:
            await asyncio.sleep(0.1)
        machine.card(state=HANGS)
        while "AthanorGpuUnwatched" not in await firing(client, address):
            await asyncio.sleep(0.1)
        assert "AthanorGpuLost" in await firing(client, address)
