"""A pytest plugin for ``openai_tests.py``: openai-python's tests ask an appliance, and each outcome goes to a file.

It runs in whatever environment has openai-python and pytest, and so imports nothing of ours. The requests stay the
tests' own but for key and model: theirs are those of a mock server.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from openai._base_client import BaseClient

EMBEDDINGS = "/embeddings"
ONE_MODEL = re.compile(r"^/models/[^/]+$")


def pytest_configure(config: pytest.Config) -> None:
    """Have every request of the client carry the appliance's key, and a model of it."""
    key, model, embedder = (os.environ[f"ATHANOR_{name}"] for name in ("KEY", "MODEL", "EMBEDDER"))
    build = BaseClient._build_request

    def build_request(self: Any, options: Any, **others: Any) -> Any:
        if isinstance(options.json_data, dict) and "model" in options.json_data:
            options.json_data["model"] = embedder if options.url == EMBEDDINGS else model
        if ONE_MODEL.match(options.url) and options.method == "get":
            options.url = f"/models/{model}"
        request = build(self, options, **others)
        request.headers["authorization"] = f"Bearer {key}"
        return request

    BaseClient._build_request = build_request  # type: ignore[method-assign]
    config.stash[_LOG] = Path(os.environ["ATHANOR_OUTCOMES"])


_LOG = pytest.StashKey[Path]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write a test's outcome: its name, whether it passed, was skipped or failed, and the last line of the reason."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        reason = "" if call.excinfo is None else call.excinfo.exconly().strip()
        with item.config.stash[_LOG].open("a") as log:
            log.write(json.dumps({"name": item.nodeid, "outcome": report.outcome, "reason": reason}) + "\n")
    return report
