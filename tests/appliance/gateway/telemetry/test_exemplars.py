"""Exemplars: from a bucket of a histogram to the trace of a request in it, as a real Prometheus keeps them."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from appliance.common.config import ListenConfig
from appliance.common.status import Readiness
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.exemplars import Exemplars
from appliance.gateway.telemetry.scrape import OPENMETRICS
from appliance.gateway.telemetry.tracer import OtelTelemetry, open_telemetry
from appliance.gateway.watch.metrics_listener import serve_metrics
from appliance.operator.demo import choose_ports
from tests.appliance.gateway.telemetry.calls import SETTINGS, serve
from tests.appliance.gateway.telemetry.collector import Collector
from tests.observers import observer, program

CONFIG = """\
global: {{scrape_interval: 250ms, scrape_timeout: 250ms}}
scrape_configs: [{{job_name: athanor, static_configs: [{{targets: ["{target}"]}}]}}]
"""

TTFT = "gen_ai_server_time_to_first_token_seconds"
PATIENCE_S = 60.0


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> Iterator[OtelTelemetry]:
    """Telemetry that exports all traces to the collector."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    one = open_telemetry(SETTINGS)
    yield one
    one.close()


def exemplars(text: str) -> list[tuple[str, str]]:
    """Metric and trace of each exemplar of a scrape."""
    return re.findall(r'^(\w+)_bucket\{[^}]*\} \S+ # \{trace_id="(\w{32})"\} \S+ \d+\.\d+$', text, re.MULTILINE)


def test_a_bucket_leads_to_the_last_exported_trace_in_it(telemetry: OtelTelemetry) -> None:
    """OpenMetrics has an exemplar in each histogram of times with the request's trace id, of the later of two; the text
    form has none, and both have the series in common."""
    telemetry.metrics.know(tenants=["alpha"], models=["mini"])
    serve(telemetry)
    trace_id = serve(telemetry)
    content_type, body = telemetry.metrics.render(openmetrics=True)
    found = exemplars(body.decode())
    assert content_type.startswith(OPENMETRICS) and body.endswith(b"# EOF\n")
    assert ("gen_ai_server_request_duration_seconds", trace_id) in found and (TTFT, trace_id) in found
    plain = telemetry.metrics.render()[1].decode()
    assert "# {" not in plain and "trace_id" not in plain

    def names_of(text: str) -> set[str]:
        stripped = (line.partition(" # ")[0].rpartition(" ")[0] for line in text.splitlines() if line[0] != "#")
        return {one for one in stripped if not one.startswith("process_")}

    assert names_of(plain) == names_of(body.decode())


def test_a_trace_that_is_not_exported_is_no_exemplar(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is sampled, or no collector is there, no bucket leads to a trace that nobody can open."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    unsampled = open_telemetry(replace(SETTINGS, sample_ratio=0.0))
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    for telemetry in (unsampled, open_telemetry(SETTINGS)):
        serve(telemetry)
        body = telemetry.metrics.render(openmetrics=True)[1].decode()
        assert f"{TTFT}_count" in body and exemplars(body) == []
        telemetry.close()


def test_exemplars_are_bounded() -> None:
    """Beyond the bound the one that was set longest ago goes."""
    kept = Exemplars({names.TIME_TO_FIRST_TOKEN: (1.0, 2.0)}, most=2)
    for number, value in enumerate((0.5, 1.5, 0.6, 2.5)):
        kept.note(names.TIME_TO_FIRST_TOKEN, {}, value, f"{number:032x}", 10**18)
    assert [one.labels["trace_id"][-1] for one in kept._kept.values()] == ["2", "3"]


async def test_prometheus_keeps_what_the_listener_serves(telemetry: OtelTelemetry) -> None:
    """A real Prometheus, which asks for OpenMetrics, reads the whole scrape and finds a request's trace by the query of
    the histogram; a client that does not ask gets text."""
    prometheus = observer("prometheus")
    telemetry.metrics.know(tenants=["alpha"], models=["mini"])
    listen = ListenConfig.model_validate({"metrics": "127.0.0.1:0"})
    parts = telemetry.metrics.render, lambda: None, lambda: Readiness(ready=True)
    port = choose_ports((0,))[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with serve_metrics(listen, *parts) as shown, httpx.AsyncClient() as client:
            address = shown["metrics"]
            assert (await client.get(address + "/metrics")).headers["content-type"].startswith("text/plain")
            (folder / "p.yml").write_text(CONFIG.format(target=address.removeprefix("http://")))
            argv = [prometheus, f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data"]
            argv += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
            with program(argv, folder / "log", (port,)):
                trace_id, found = serve(telemetry), ""
                query = {"query": f"{TTFT}_bucket", "start": time.time() - 600, "end": time.time() + 600}
                deadline = time.monotonic() + PATIENCE_S
                while trace_id not in found:
                    assert time.monotonic() < deadline, (folder / "log").read_text()[-2_000:]
                    answer = await client.get(f"http://127.0.0.1:{port}/api/v1/query_exemplars", params=query)
                    found = answer.text  # "Service Unavailable" until it has started
    assert '"status":"success"' in found
