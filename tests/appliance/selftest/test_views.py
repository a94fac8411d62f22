"""Tables and plots of figures: what they show, that they fit, that the files are what they say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from appliance.operator.bench import report
from appliance.operator.bench.metrics import Figures, figures
from appliance.operator.bench.workload import parse_load
from tests.appliance.operator.bench.test_metrics import run_of, sample

PEERS = {
    "heading": "4 passes",
    "cases": [
        {
            "name": "0.5B shape bfloat16, 16 streams",
            "ratios": {
                "openvino-genai": {"median": 0.9, "least": 0.8, "most": 1.1},
                "llama.cpp": {"median": 1.5, "least": 1.4, "most": 1.6},
            },
        }
    ],
}
ENGINE = {
    "model": "m",
    "dtype": "float32",
    "threads": 1,
    "read_bytes_per_s": 2.5e10,
    "weight_bytes": 10**9,
    "cache_bytes": 10**6,
    "backend": "compiled kernels with tiles, 1 thread",
    "rows": [
        {
            "batch": batch,
            "prefill_tokens_per_s": 900.0,
            "decode_tokens_per_s": 20.0 * batch,
            "step_s": 0.05,
            "roofline_share": 0.8,
        }
        for batch in (1, 16)
    ],
}


def results() -> list[Figures]:
    """A closed loop, a faster one, and an open loop with failures."""
    slow = run_of("closed:1", sample(0.0, 0.5, 0.7), sample(2.0, 2.5, 2.7))
    fast = run_of("closed:8,requests=16", *(sample(0.1 * n, 0.1 * n + 0.2, 0.1 * n + 0.21) for n in range(16)))
    fast.server_cpu_s = {"gateway": 0.001, "sandboxes": 0.01}
    trace = run_of("open:2", sample(0.0, 1.0, 2.0), sample(1.0, 3.0, 4.0, tenant=1), sample(2.0, failure="http 429"))
    return [figures(one, price_per_hour=1.0) for one in (slow, fast, trace)]


def shown(width: int, *parts: object) -> str:
    """What a terminal of this width would show."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_fit_a_terminal_and_name_every_failure() -> None:
    """Eighty columns hold all of it; failures are told with their kinds, and that rates beside them are void."""
    text = shown(80, report.tables(results(), "m at http://127.0.0.1:1"), report.engine_table(ENGINE["rows"], ENGINE))
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text
    assert "1 of 3 failed (1 http 429); its rates are void" in " ".join(text.split())
    words = ("closed:8,requests=16", "500/30 ms", "SANDBOXES", "key 2", "$/M TOKENS", "80 %", "25.0 GB/s", "with tiles")
    for word in words:
        assert word in text


def test_a_load_without_one_success_is_shown() -> None:
    """Dashes stand where nothing was measured."""
    text = shown(80, report.tables([figures(run_of("closed:1", sample(0.0, failure="connect")))], "m"))
    assert "1 of 1 failed (1 connect)" in text


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.full)])
def test_plots_are_real_files(tmp_path: Path, times: int) -> None:
    """Each plot is a PNG of some size and an SVG whose text says what was measured, the same bytes each time: drawing
    all of them is seconds, so the second time is of the full count."""
    plots = pytest.importorskip("appliance.operator.bench.plots", reason="matplotlib is not installed")
    document = json.loads(
        json.dumps(
            {
                "target": "m at http://127.0.0.1:1",
                "loads": [one.to_dict() for one in results()],
                "engine": ENGINE,
                "peers": PEERS,
            }
        )
    )
    written = plots.draw(document, tmp_path / "a")
    names = {path.name for path in written}
    assert names == {
        f"{name}.{kind}" for name in ("latency", "frontier", "timeline-1", "engine", "peers") for kind in ("png", "svg")
    }
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 10_000
        else:
            ElementTree.parse(path)
    text = (tmp_path / "a" / "latency.svg").read_text()
    assert "Time to first token" in text and "open:2" in text and "500 ms" in text
    assert "1 failed" in (tmp_path / "a" / "timeline-1.svg").read_text()
    for number in range(1, times):
        again = plots.draw(document, tmp_path / str(number))
        assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]


def test_nothing_to_plot_is_no_file(tmp_path: Path) -> None:
    """A document without one success gives no plot."""
    plots = pytest.importorskip("appliance.operator.bench.plots", reason="matplotlib is not installed")
    failed = figures(run_of("closed:1", sample(0.0, failure="connect"))).to_dict()
    assert plots.draw({"target": "m", "loads": [failed]}, tmp_path) == []


def test_the_default_loads_are_loads() -> None:
    """What the command measures when it is told nothing can be read by its own parser."""
    from appliance.operator.cli.bench import DEFAULT_LOADS

    assert [parse_load(text).kind for text in DEFAULT_LOADS] == ["closed", "closed", "closed", "open"]
