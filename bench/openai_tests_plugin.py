"""A pytest plugin for ``openai_tests.py``: openai-python's tests ask an appliance, and each outcome goes to a file.

It runs in whatever environment has openai-python and pytest, and so imports nothing of ours. The requests stay the
tests' own but for key and model: theirs are those of a mock server, which answers anything of the right types. So some
have every field that the API ever had, with values such as no output tokens at all, and some lack what they are about.
Where a 400 names a field, the request is sent again without it, or with an input where there was none; the outcome
lists those fields.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from openai._base_client import AsyncAPIClient, BaseClient, SyncAPIClient

EMBEDDINGS = "/embeddings"
ONE_MODEL = re.compile(r"^/models/[^/]+$")
ABSENT = {"input": "?"}
"""Fields without which a request is about nothing, and what they get."""

MOST_FIELDS = 40
"""Fields that are withheld from one request: more than any has."""

_LOG = pytest.StashKey[Path]()
_withheld: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Have every request of the client carry the appliance's key, and a model of it."""
    config.stash[_LOG] = Path(os.environ["ATHANOR_OUTCOMES"])
    key, model, embedder = (os.environ[f"ATHANOR_{name}"] for name in ("KEY", "MODEL", "EMBEDDER"))
    build, request, request_async = BaseClient._build_request, SyncAPIClient.request, AsyncAPIClient.request

    def build_request(self: Any, options: Any, **others: Any) -> Any:
        if options.method == "post":
            body = options.json_data if isinstance(options.json_data, dict) else {}
            options.json_data = {**body, "model": embedder if options.url == EMBEDDINGS else model}
        if ONE_MODEL.match(options.url) and options.method == "get":
            options.url = f"/models/{model}"
        built = build(self, options, **others)
        built.headers["authorization"] = f"Bearer {key}"
        return built

    def request_again(self: Any, cast_to: Any, options: Any, **others: Any) -> Any:
        for _ in range(MOST_FIELDS):
            try:
                return request(self, cast_to, options, **others)
            except BadRequestError as error:
                _change(options, error)
        raise AssertionError("too many fields are refused")

    async def request_async_again(self: Any, cast_to: Any, options: Any, **others: Any) -> Any:
        for _ in range(MOST_FIELDS):
            try:
                return await request_async(self, cast_to, options, **others)
            except BadRequestError as error:
                _change(options, error)
        raise AssertionError("too many fields are refused")

    BaseClient._build_request = build_request  # type: ignore[method-assign]
    SyncAPIClient.request = request_again  # type: ignore[method-assign]
    AsyncAPIClient.request = request_async_again  # type: ignore[method-assign]


def _change(options: Any, error: BadRequestError) -> None:
    """Withhold the field that the error names, or add it where it is one of ``ABSENT``."""
    name = re.split(r"[.\[]", error.param or "")[0]
    body = dict(options.json_data) if isinstance(options.json_data, dict) else {}
    if name in body:
        del body[name]
        _withheld.append(name)
    elif name in ABSENT:
        body[name] = ABSENT[name]
        _withheld.append(f"no {name}")
    else:
        raise error
    options.json_data = body


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write a test's outcome: its name, whether it passed, was skipped or failed, why, and the fields withheld."""
    report = yield
    if report.when == "setup":
        _withheld.clear()
    if report.when == "call" or report.outcome != "passed":
        reason = "" if call.excinfo is None else call.excinfo.exconly().strip()
        found = {"name": item.nodeid, "outcome": report.outcome, "reason": reason, "withheld": sorted(set(_withheld))}
        with item.config.stash[_LOG].open("a") as log:
            log.write(json.dumps(found) + "\n")
    return report
