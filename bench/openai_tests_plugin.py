"""A pytest plugin for ``openai_tests.py``: openai-python's tests ask an appliance, and each outcome goes to a file.

It runs in whatever environment has openai-python and pytest, and so imports nothing of ours. The requests stay the
tests' own but for names of what the server has: the key, the model, and the ids of files, batches and responses, each
of which is made for its request. The tests' own are those of a mock server, which answers anything of the right types.
So some have every field that the API ever had, with values such as no output tokens at all, and some lack what they
are about. Where a 400 names a field, the request is sent again without it, or with another value where it needs one;
the outcome lists those fields.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from openai import BadRequestError
from openai._base_client import AsyncAPIClient, BaseClient, SyncAPIClient

EMBEDDINGS = "/embeddings"
STORED = ("/files", "/batches")
"""Routes whose requests name no model."""

ONE_MODEL = re.compile(r"^/models/[^/]+$")
ONE_STORED = re.compile(r"^/(files|batches|responses)/(?!input_tokens$|compact$)[^/]+(/content|/cancel|/input_items)?$")
"""A file, a batch or a response, by its id."""

ABSENT = {"input": "?"}
"""Fields without which a request is about nothing, and what they get."""

ANSWER_S = 60.0

MOST_FIELDS = 40
"""Fields that are withheld from one request: more than any has."""

_LOG = pytest.StashKey[Path]()
_withheld: list[str] = []
_sent: list[str] = []
"""Paths of the requests of the test that runs."""


class Maker:
    """Makes what a request names, over the appliance's own routes."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self._url, self._key, self._model = url, key, model

    def file(self) -> str:
        """The id of a new file, whose lines a batch takes."""
        body = {"model": self._model, "input": "?", "max_output_tokens": 1}
        line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body})
        edge = "made-by-the-plugin"
        parts = (
            'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
            f'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n{line}\n',
        )
        form = "".join(f"--{edge}\r\n{part}\r\n" for part in parts) + f"--{edge}--\r\n"
        return str(json.loads(self._post("/files", form, f"multipart/form-data; boundary={edge}"))["id"])

    def batch(self) -> str:
        """The id of a new batch."""
        body = {"input_file_id": self.file(), "endpoint": "/v1/responses", "completion_window": "24h"}
        return str(json.loads(self._post("/batches", json.dumps(body)))["id"])

    def response(self) -> str:
        """The id of a new response, whose stream can be read again too."""
        body = {"model": self._model, "input": "?", "max_output_tokens": 4, "stream": True, "background": True}
        text = self._post("/responses", json.dumps(body))
        events = [json.loads(row.removeprefix("data: ")) for row in text.splitlines() if row.startswith("data: {")]
        return str(events[0]["response"]["id"])

    def item(self, response: str) -> str:
        """The id of an item that a response answers."""
        return str(json.loads(self._send(f"/responses/{response}/input_items"))["data"][0]["id"])

    def id_of(self, kind: str) -> str:
        """The id of something new, by the first word of its path."""
        return {"files": self.file, "batches": self.batch, "responses": self.response}[kind]()

    def _post(self, path: str, body: str, kind: str = "application/json") -> str:
        return self._send(path, body.encode(), {"content-type": kind})

    def _send(self, path: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})) -> str:
        asked = urllib.request.Request(self._url + path, body, {"authorization": f"Bearer {self._key}", **headers})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())


def pytest_configure(config: pytest.Config) -> None:
    """Have every request of the client carry the appliance's key, and name what the appliance has."""
    config.stash[_LOG] = Path(os.environ["ATHANOR_OUTCOMES"])
    key, model, embedder = (os.environ[f"ATHANOR_{name}"] for name in ("KEY", "MODEL", "EMBEDDER"))
    maker = Maker(os.environ["TEST_API_BASE_URL"], key, model)
    build, request, request_async = BaseClient._build_request, SyncAPIClient.request, AsyncAPIClient.request

    def build_request(self: Any, options: Any, **others: Any) -> Any:
        _sent.append(options.url)
        one = ONE_STORED.match(options.url)
        name = maker.id_of(one[1]) if one is not None else ""
        if "after" in (options.params or {}):
            after = maker.item(name) if one is not None else maker.id_of(options.url.strip("/"))
            options.params = {**options.params, "after": after}
        if one is not None:
            options.url = f"/{one[1]}/{name}{one[2] or ''}"
        elif options.method == "post":
            body = options.json_data if isinstance(options.json_data, dict) else {}
            options.json_data = {**body, **_named(body, options.url, maker, embedder, model)}
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


def _named(body: dict[str, Any], url: str, maker: Maker, embedder: str, model: str) -> dict[str, Any]:
    """What the appliance has in place of what a body names."""
    if url in STORED:
        return {"input_file_id": maker.file()} if "input_file_id" in body else {}
    earlier = {"previous_response_id": maker.response()} if "previous_response_id" in body else {}
    return {"model": embedder if url == EMBEDDINGS else model, **earlier}


def _change(options: Any, error: BadRequestError) -> None:
    """Withhold the field that the error names, or give it a value where it is needed."""
    name = re.split(r"[.\[]", error.param or "")[0]
    body = dict(options.json_data) if isinstance(options.json_data, dict) else {}
    if name in (options.params or {}):
        options.params = {key: value for key, value in options.params.items() if key != name}
        _withheld.append(name)
    elif name in body:
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
    """Write a test's outcome: its name, whether it passed, was skipped or failed, why, the fields withheld, and how
    many requests it sent."""
    report = yield
    if report.when == "setup":
        _withheld.clear()
        _sent.clear()
    if report.when == "call" or report.outcome != "passed":
        reason = "" if call.excinfo is None else call.excinfo.exconly().strip()
        found = {"name": item.nodeid, "outcome": report.outcome, "reason": reason, "withheld": sorted(set(_withheld))}
        found["sent"] = len(_sent)
        with item.config.stash[_LOG].open("a") as log:
            log.write(json.dumps(found) + "\n")
    return report
