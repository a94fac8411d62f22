"""openai-python's own API tests against an appliance: how many of those on routes that exist pass.

    python bench/openai_tests.py SDIST [--url URL --key KEY] [--model MODEL] [--embedder MODEL] [--python PYTHON]

``SDIST`` is the folder of openai-python's source distribution; nothing is downloaded. Without ``--url`` an
appliance is started for the time of the run, with a small model for embeddings, which keeps files, batches and
responses. ``--python`` is an interpreter with that version of openai-python, aiohttp and pytest: that of
`make clients`, where it is there. Tests of routes that the appliance does not have are left out by name, and so are
nine for embeddings that no server passes, and tests that ask no server.

The tests are not changed. Their requests get a key, a model and ids of what the appliance has, and fields that are
refused by name are withheld (``openai_tests_plugin.py``): those tests are counted apart. The status is 1 where fewer
than ``BAR`` of all pass in one way or the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.system.batch_appliance import MINI, Kept
from tests.system.many_models import embedding_model

ROOT = Path(__file__).resolve().parents[1]
CLIENTS = ROOT / ".clients/agents/bin/python"
"""The interpreter of `make clients`."""

RUNSC = ROOT / ".venv/bin/runsc"

FILES = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_responses.py",
    "responses/test_input_tokens.py",
    "responses/test_input_items.py",
    "test_embeddings.py",
    "test_models.py",
    "test_files.py",
    "test_batches.py",
)
"""Tests of the routes that the appliance has, below ``tests/api_resources``."""

BAR = 0.97
TIMEOUT_S = 1_200.0


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    name: str
    outcome: str
    reason: str
    withheld: list[str]
    """Fields that the appliance refuses by name; "no X" is one that it needs, and the test does not send."""
    sent: int
    """Requests that it sent; without one it is a test of the client alone."""


NOT_SERVED = re.compile(
    r"chat/test_completions.py.*_(retrieve|update|list|delete)(\[|_|$)"
    r"|test_responses.py.*_(cancel|compact)(\[|_|$)"
    r"|test_models.py.*_delete\["
)
"""Tests of routes that the appliance does not have: stored chats, the end of a response and its compaction, and changes
of models."""

MOCKED = re.compile(r"test_files.py.*_(method|raw_response|streaming_response)_content\[")
"""Tests that bring a server of their own, which knows one file alone."""

NOT_ANSWERABLE = re.compile(r"test_embeddings.py.*_(method|raw_response|streaming_response)_create\[(strict|aiohttp)\]")
"""Tests that no server passes: the client asks for base64 of its own accord, and its strict form takes lists alone."""


def run(sdist: Path, python: Path, environment: dict[str, str]) -> list[Outcome]:
    """Run the tests; returns their outcomes."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as outcomes:
        options = ("-q", "-p", "openai_tests_plugin", "-p", "no:cacheprovider", "-o", "addopts=")
        argv = [str(python), "-m", "pytest", *options]
        argv += [f"tests/api_resources/{name}" for name in FILES]
        given = {**environment, "PYTHONPATH": str(ROOT / "bench"), "ATHANOR_OUTCOMES": outcomes.name}
        done = subprocess.run(
            argv, cwd=sdist, env={**os.environ, **given}, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        found = [Outcome(**json.loads(line)) for line in outcomes]
    if done.returncode not in (0, 1) or not found:
        raise SystemExit(f"the tests did not run:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return found


@contextlib.contextmanager
def address(url: str | None, key: str | None) -> Iterator[tuple[str, str]]:
    """URL and key of the appliance: one that is given, or one of our own for the time of the block."""
    if url is not None and key is not None:
        yield url, key
        return
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        vectors = Path(folder) / "models" / "vectors"
        embedding_model(vectors)
        embeds = {**MINI, "name": "vectors", "path": str(vectors), "runner": "embed", "truncates": True}
        served = Kept(Path(folder), RUNSC, [MINI, embeds])
        served.prepare()
        try:
            served.start()
            yield served.ready["http"], served.keys["alpha"]
        finally:
            served.stop()


def main() -> int:
    """Run them and print the figures."""
    parser = argparse.ArgumentParser(description="Run openai-python's own API tests against an appliance.")
    parser.add_argument("sdist", type=Path, help="folder of openai-python's source distribution")
    parser.add_argument("--url", help="an appliance that runs, such as http://127.0.0.1:8080")
    parser.add_argument("--key", help="API key of a tenant there")
    parser.add_argument("--model", default="athanor-mini", help="model for text")
    parser.add_argument("--embedder", default="vectors", help="model for embeddings")
    parser.add_argument("--python", type=Path, default=CLIENTS if CLIENTS.exists() else Path(sys.executable))
    arguments = parser.parse_args()
    with address(arguments.url, arguments.key) as (url, key):
        environment = {
            "TEST_API_BASE_URL": f"{url}/v1",
            "ATHANOR_KEY": key,
            "ATHANOR_MODEL": arguments.model,
            "ATHANOR_EMBEDDER": arguments.embedder,
        }
        outcomes = run(arguments.sdist, arguments.python, environment)
    left_out = (NOT_SERVED, MOCKED, NOT_ANSWERABLE)
    there = [one for one in outcomes if not any(names.search(one.name) for names in left_out)]
    # Only a test that passes without a request is one of the client alone: one that fails before it asks has failed.
    served = [one for one in there if one.sent or one.outcome != "passed"]
    passed = [one for one in served if one.outcome == "passed"]
    failed = [one for one in served if one.outcome == "failed"]
    asked = len(passed) + len(failed)
    whole = sum(not one.withheld for one in passed)
    print(
        f"{len(outcomes)} tests, {len(there)} on routes that exist, {len(there) - len(served)} of those ask no server, "
        f"{len(served) - asked} are skipped"
    )
    print(f"{whole} of {asked} pass as they are: {whole / asked:.1%}")
    for fields, number in Counter(tuple(one.withheld) for one in passed if one.withheld).most_common():
        print(f"  {number} more pass but for: {', '.join(fields)}")
    for one in failed:
        print(f"  failed {one.name.removeprefix('tests/api_resources/')}: {one.reason[:400]}")
    print(f"{len(passed)} of {asked}: {len(passed) / asked:.1%}; the bar is {BAR:.0%}")
    return 0 if len(passed) >= BAR * asked else 1


if __name__ == "__main__":
    sys.exit(main())
