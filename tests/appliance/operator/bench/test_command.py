"""The command itself: exit codes, files, and errors that say what to do."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appliance.operator.cli.app import for_line

from .test_client import Handler, Server, answering, good, status


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """A server in a thread of its own, for a command that runs in this one; gives its address."""
    loop = asyncio.new_event_loop()
    server = Server(handler)
    loop.run_until_complete(server.__aenter__())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.__aexit__())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def bench(*arguments: str) -> Result:
    """``athanor bench`` on a terminal of 80 columns."""
    words = ["bench", *arguments]
    return CliRunner().invoke(for_line(words), words, env={"COLUMNS": "80", "TERM": "dumb"}, prog_name="athanor")


@pytest.mark.full
def test_a_server_is_measured_and_written_down(tmp_path: Path) -> None:
    """Two loads against a right server: exit 0, tables, a JSON file with every request, plots beside it."""
    pytest.importorskip("matplotlib", reason="plots are an extra")
    with serving(good) as url:
        done = bench(
            "closed:2,requests=6",
            "open:100,requests=5",
            "--url",
            url,
            "--model",
            "m",
            "--price-per-hour",
            "1",
            "--output-tokens",
            "4",
            "--json",
            str(tmp_path / "f.json"),
            "--plots",
            str(tmp_path),
        )
    assert done.exit_code == 0, done.output
    assert "closed:2,requests=6" in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    document = json.loads((tmp_path / "f.json").read_text())
    assert [(one["requests"], one["failed"], one["output_tokens"]) for one in document["loads"]] == [
        (6, 0, 24),
        (5, 0, 20),
    ]
    assert document["machine"]["cores"] >= 1
    assert (tmp_path / "latency.png").stat().st_size > 10_000


def test_failures_end_with_one_and_are_named() -> None:
    """A script sees that a load failed, a person sees how."""
    with serving(answering(status(503))) as url:
        done = bench("closed:1,requests=3", "--url", url, "--model", "m")
    assert done.exit_code == 1
    assert "3 of 3 failed (3 http 503)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("closed:x",), 1, "'closed:x'"),
        (("--url", "http://127.0.0.1:1"), 1, "--model"),
        (("--url", "gopher://x", "--model", "m"), 1, "no address"),
        (("--model", "no/such/folder"), 4, "no folder"),
        (("trace:no/such/file", "--url", "http://127.0.0.1:1", "--model", "m"), 1, "cannot be read"),
        (("closed:1,requests=1", "--url", "http://127.0.0.1:1", "--model", "m", "--json", "no/f"), 1, "cannot write"),
        (("--url", "http://127.0.0.1:1", "--model", "m", "--pid", "4194305"), 1, "no process"),
        (("--output-tokens", "0"), 2, "--output-tokens"),
    ],
)
def test_wrong_wishes_are_refused_with_the_mend(arguments: tuple[str, ...], code: int, words: str) -> None:
    """Each kind of mistake has its exit code and names what is wrong."""
    done = bench(*arguments)
    assert (done.exit_code, words in done.output) == (code, True), done.output


def test_plots_without_their_library_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured; the message names the extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = bench("closed:1", "--url", "http://127.0.0.1:1", "--model", "m", "--plots", "x")
    assert done.exit_code == 1
    assert "athanor[bench]" in done.stderr and "--extra bench" in done.stderr


@pytest.mark.full
def test_the_engine_alone_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The embedded model, one and two sequences: rates and shares above nothing, beside what they stand on."""
    done = bench("engine:1,2", "--prompt-tokens", "8", "--output-tokens", "4", "--json", str(tmp_path / "f.json"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "f.json").read_text())["engine"]
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    assert all(row["decode_tokens_per_s"] > 0 and row["roofline_share"] > 0 for row in found["rows"])
    assert found["read_bytes_per_s"] > 1e8 and found["weight_bytes"] > 5_000_000
