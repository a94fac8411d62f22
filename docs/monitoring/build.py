"""Write the dashboards' JSON beside this file, and the page of the alerts: ``python docs/monitoring/build.py``. A test
compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.monitoring import runbooks
from docs.monitoring.grafana import Dashboard, render
from docs.monitoring.health import SANDBOXES, SLO
from docs.monitoring.tenants import TENANT_PAGE
from docs.monitoring.traces import JAEGER, TEMPO
from docs.monitoring.use import KV, OVERVIEW

HERE = Path(__file__).resolve().parent
PAGES: dict[str, Dashboard] = {
    "overview.json": OVERVIEW,
    "tenants.json": TENANT_PAGE,
    "kv.json": KV,
    "sandboxes.json": SANDBOXES,
    "slo.json": SLO,
    "traces.json": TEMPO,
    "traces-jaeger.json": JAEGER,
}


def text(page: Dashboard) -> str:
    """A file's content."""
    return json.dumps(render(page), indent=2) + "\n"


def main() -> int:
    """Write all files."""
    for name, page in PAGES.items():
        (HERE / name).write_text(text(page))
    runbooks.PLACE.write_text(runbooks.page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
