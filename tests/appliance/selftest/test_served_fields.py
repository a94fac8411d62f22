"""What the API serves is what the self-test tries: G2 and the fuzzer know each field of a request by its name."""

from __future__ import annotations

import json

import pytest

from appliance.gateway.http.app import DOCUMENT
from appliance.selftest import fuzzed_requests, words

STORED = ("/v1/files", "/v1/batches")
"""Routes of files and batches, whose fields are in ``g2_stored`` and ``fuzzed_batches``."""


def fields_of(path: str) -> set[str]:
    """The fields that a route's body may have, by the document that the server gives its tenants."""
    content = json.loads(DOCUMENT.read_bytes())["paths"][path]["post"]["requestBody"]["content"]
    return {name for kind in content.values() for name in kind["schema"]["properties"]}


@pytest.mark.parametrize("path", words.BODIES)
def test_each_field_is_tried_for_a_namespace(path: str) -> None:
    """Every field of every route that reaches an engine is among those with which G2 tries to name another tenant."""
    assert fields_of(path) - set(words.FIELDS) == set()


def test_each_route_with_a_body_is_walked_or_named() -> None:
    """Besides files and batches, G2 leaves out the routes on which no model answers, and a second name of one."""
    posted = {path for path, one in json.loads(DOCUMENT.read_bytes())["paths"].items() if "post" in one}
    with_body = {path for path in posted if "{" not in path} - set(STORED)
    without_engine = {*fuzzed_requests.WITHOUT_ANSWER, "/v1/responses/input_tokens", "/v1/messages/count_tokens"}
    assert with_body - set(words.BODIES) == {*without_engine, "/v2/rerank"}


def test_each_field_is_fuzzed() -> None:
    """Every field of every route but those of files and batches is drawn by the fuzzer. Control: one that is not served
    is not missed, and a name of this file's own would be."""
    paths = [*words.BODIES, *fuzzed_requests.WITHOUT_ANSWER]
    served = {name for path in paths for name in fields_of(path)}
    assert served - set(fuzzed_requests.FIELDS) == set()
    assert {*served, "no_such_field"} - set(fuzzed_requests.FIELDS) == {"no_such_field"}
