"""/openapi.json over a real socket: a valid document, and all that it says is what the server does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from appliance.common.batches.values import LineProblem, StoredBatch, StoredFile
from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.auth import Auth
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Finished,
    FinishReason,
    PromptToken,
    PromptTokens,
    Started,
)
from appliance.gateway.http import stored_objects
from appliance.gateway.http.app import DOCUMENT, ROUTES
from appliance.operator.reference.openapi import document
from tests.appliance.gateway.front.support import MODEL, Running, Step, logprob_script, text_script
from tests.appliance.gateway.http.schema_samples import Samples
from tests.appliance.gateway.http.scripts import CALLING, CUT, REFUSING

FOUND = json.loads(DOCUMENT.read_bytes())
SAMPLES = Samples(FOUND)
OPERATIONS = [(method.upper(), path, one) for path, table in FOUND["paths"].items() for method, one in table.items()]
POSTED = {
    path: one["requestBody"]["content"]["application/json"]["schema"]
    for method, path, one in OPERATIONS
    if "application/json" in one.get("requestBody", {}).get("content", {})
}
"""Path -> schema of its JSON body."""

TALK = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": TALK},
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    "/v1/responses": {"model": MODEL, "input": "hi"},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "hi"},
    "/v1/messages": {"model": MODEL, "messages": TALK, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": TALK},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
    "/v1/rerank": {"model": MODEL, "query": "hi", "documents": ["a", "b"]},
    "/v2/rerank": {"model": MODEL, "query": "hi", "documents": ["a", "b"]},
    "/v1/score": {"model": MODEL, "text_1": "hi", "text_2": "a"},
    "/v1/classify": {"model": MODEL, "input": "hi"},
    "/tokenize": {"model": MODEL, "messages": TALK},
    "/detokenize": {"model": MODEL, "tokens": [5]},
    "/v1/attestations": {"model": MODEL, "nonce": "9f86d081884c7d65"},
}
"""The least body that each route answers."""

NAMES = ("a", "a" * 64)
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in NAMES]
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/responses", "tool_choice"): {"tools": [{"type": "function", "name": name} for name in NAMES]},
    ("/v1/responses/input_tokens", "tool_choice"): {"tools": [{"type": "function", "name": name} for name in NAMES]},
    ("/v1/messages", "tool_choice"): {"tools": [{"name": name} for name in NAMES]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [{"name": name} for name in NAMES]},
    **{(path, "tool_choice"): {"tools": FUNCTIONS} for path in ("/v1/chat/completions", "/tokenize")},
    **{(path, "stream_options"): {"stream": True} for path in ("/v1/chat/completions", "/v1/completions")},
    **{
        (path, "whitespace"): {"response_format": {"type": "json_object"}}
        for path in ("/v1/chat/completions", "/v1/completions")
    },
    ("/v1/score", "queries"): {"text_1": None, "text_2": None, "queries": "a", "documents": "a"},
    ("/v1/score", "documents"): {"text_1": None, "text_2": None, "queries": "a", "documents": "a"},
    ("/tokenize", "prompt"): {"messages": None},
    ("/tokenize", "add_special_tokens"): {"messages": None, "prompt": "hi"},
}
"""Path and field -> what has to stand beside the field."""

TWINS = {
    "/v1/completions": "/v1/chat/completions",
    "/v1/responses/input_tokens": "/v1/responses",
    "/v2/rerank": "/v1/rerank",
    "/v1/messages/count_tokens": "/v1/messages",
}
"""Path -> the one with which it shares the readers of fields that both have; of those a few values are enough."""

A_FEW = 3

KEPT = {"store", "previous_response_id", "background"}
"""Fields that nothing can be sent for where nothing is kept; tests of stored and background responses send them."""


def client(running: Running) -> httpx.AsyncClient:
    """A tenant's client."""
    return httpx.AsyncClient(base_url=running.base_url, headers=running.authorization, timeout=30)


def test_the_document_is_valid_and_up_to_date() -> None:
    """It is OpenAPI 3.1 and its schemas are JSON Schema; what the tables say now is what the file says. Control: a
    document with a word in a wrong place is found."""
    OpenAPIV31SpecValidator(FOUND).validate()
    assert document.render() == DOCUMENT.read_text(), "run: python -m appliance.operator.reference"
    for schema in (*FOUND["components"]["schemas"].values(), *POSTED.values()):
        Draft202012Validator.check_schema(schema)
    wrong = json.loads(DOCUMENT.read_bytes())
    wrong["paths"]["/v1/limits"]["get"]["responses"]["200"].pop("description")
    assert not OpenAPIV31SpecValidator(wrong).is_valid()


async def test_it_is_for_tenants_and_says_nothing_of_one(running: Running) -> None:
    """Two tenants get one document, which names no model; without a credential there is a 401, as for a path that is
    not there."""
    async with httpx.AsyncClient(base_url=running.base_url) as one:
        refused, unknown = await one.get("/openapi.json"), await one.get("/no-such-path")
        answers = [
            await one.get("/openapi.json", headers={"authorization": f"Bearer {key}"})
            for key in (running.key, running.other_key)
        ]
        headers = (await one.head("/openapi.json", headers=running.authorization)).headers
    assert refused.status_code == unknown.status_code == 401 and refused.json() == unknown.json()
    assert answers[0].content == answers[1].content == DOCUMENT.read_bytes()
    assert answers[0].headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(answers[0].content))
    assert not any(word in answers[0].text for word in (MODEL, "acme", "globex"))


async def test_each_route_is_listed_and_each_listed_one_answers(running: Running) -> None:
    """Paths and methods are those of the router's table, with their scopes; none answers 405, and none the 404 of a
    route that is not there. Control: the other methods of a path do."""
    assert {(route.method, document.path_of(route)) for route in ROUTES} == {(one, path) for one, path, _ in OPERATIONS}
    scopes = {(route.method, document.path_of(route)): route.scope for route in ROUTES if route.auth is Auth.TENANT}
    async with client(running) as one:
        for method, path, operation in OPERATIONS:
            asked = path.replace("{model}", MODEL).replace("{", "").replace("}", "")
            answer = await one.request(method, asked, content=b"{}" if method == "POST" else None)
            assert answer.status_code != 405, path
            assert answer.status_code != 404 or answer.json()["error"]["code"] != "unknown_url", path
            assert (await one.request("PATCH", asked)).status_code == 405
            roles = {role for kind in operation["security"] for roles in kind.values() for role in roles}
            assert roles == {scopes[method, path]} if (method, path) in scopes else roles == set()


def sound(path: str, field: str) -> Iterator[dict[str, Any]]:
    """Bodies with values of a field that the document allows."""
    beside = LEAST[path] | BESIDE.get((path, field), {})
    for value in SAMPLES.within(POSTED[path]["properties"][field]):
        if field == "input" and isinstance(value, list) and value and isinstance(value[0], dict):
            value = [*value, {"role": "user", "content": "hi"}]  # an item of reasoning alone is no conversation
        if value is not None or field not in {*LEAST[path], *beside, "prompt"}:
            yield {**beside, field: value}


def ends(choices: int) -> list[Step]:
    """A session that ends so many choices."""
    others = [ChoiceFinished(choice, FinishReason.STOP) for choice in range(1, choices)]
    return [Started(7, 0), *others, Finished(FinishReason.STOP, 7, 0, 0)]


WHOLE = ("/v1/chat/completions", "/v1/messages")
"""Paths of which every run sends each kind of value of each field; of the others' fields it sends a few."""


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        *((path, path in WHOLE) for path in LEAST),
        *(pytest.param(path, True, marks=pytest.mark.full) for path in LEAST if path not in WHOLE),
    ],
)
async def test_listed_fields_are_taken_and_others_reported(running: Running, path: str, whole: bool) -> None:
    """Each field is served with each kind of value that its schema allows, up to the ends of its ranges; a value that
    the schema refuses is a 400 that names the field; a field that is not listed is named in x-athanor-ignored, and one
    that is listed as refused is a 400 with that advice."""

    async def text_of(*_: Any) -> str:
        return ""

    running.service.detokenize = text_of  # type: ignore[method-assign]
    schema, sent = POSTED[path], 0
    async with client(running) as one:
        for field in schema["properties"]:
            shared = field in POSTED[TWINS.get(path, "/v1/batches")]["properties"]
            most = None if whole and not shared else A_FEW
            for body in islice(sound(path, field), most) if field not in KEPT else ():
                running.service.script = ends(body.get("n") or 1)
                answer = await one.post(path, json=body)
                fine = (200, 404) if field == "model" else (200,)
                assert answer.status_code in fine, (body, answer.text)
                assert "x-athanor-ignored" not in answer.headers, (field, answer.headers["x-athanor-ignored"])
                sent += 1
            beside = LEAST[path] | BESIDE.get((path, field), {})
            for value in islice(SAMPLES.without(schema["properties"][field]), most):
                answer = await one.post(path, content=json.dumps({**beside, field: value}))
                assert answer.status_code == 400, (field, value, answer.text)
                error = answer.json()["error"]
                assert field in (error.get("param") or error["message"]), (field, value, error)
                sent += 1
        answer = await one.post(path, json=LEAST[path] | {"no_such_field": 1})
        assert (answer.status_code, answer.headers.get("x-athanor-ignored")) == (200, "no_such_field")
        for field, advice in schema.get("x-athanor-refused", {}).items():
            error = (await one.post(path, json=LEAST[path] | {field: ["zz"]})).json()["error"]
            assert advice in error["message"] and field in error["message"]
    assert sent > 4 * len(schema["properties"])


def test_fields_of_a_batch_are_those_that_are_taken() -> None:
    """The reader of /v1/batches takes what the schema allows, and refuses by name what it does not."""
    least = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}

    def take(document: dict[str, Any]) -> None:
        stored_objects.new_batch(document)
        stored_objects.output_keep_of(document)

    for field, schema in POSTED["/v1/batches"]["properties"].items():
        for value in SAMPLES.within(schema):
            take(least | {field: value})
        for value in SAMPLES.without(schema):
            with pytest.raises(InvalidRequestError) as refused:
                take(least | {field: value})
            assert refused.value.param == field


def holds(name: str, value: Any) -> None:
    """Fail unless a value satisfies a schema of the document."""
    problem = next(SAMPLES.validator({"$ref": f"#/components/schemas/{name}"}).iter_errors(value), None)
    assert problem is None, (name, problem and (problem.json_path, problem.message), value)


def answer_of(method: str, path: str, kind: str = "application/json") -> str:
    """The name of the schema of an answer, or of a stream's events."""
    found = FOUND["paths"][path][method.lower()]["responses"]["200"]["content"][kind]
    return str((found["schema"] if kind == "application/json" else found["x-athanor-event"])["$ref"]).rpartition("/")[2]


SCRIPTS = {
    "text": (text_script("Hel", "lo"), {}),
    "scores": (logprob_script(), {"logprobs": True, "top_logprobs": 2}),
    "calls": (CALLING, {}),
    "no call": (REFUSING, {}),
    "cut": (CUT, {}),
    "none": (text_script(), {}),
}


CALLS = ("calls", "no call", "cut")
"""Those that are of conversations alone."""


@pytest.mark.parametrize("name", SCRIPTS)
async def test_answers_are_those_that_the_document_describes(running: Running, name: str) -> None:
    """Whole answers and each event of a stream have the fields that the document lists, and no others, for texts,
    scores, reasoning, calls, calls that are none, and calls that are cut; so have errors."""
    running.service.script, scores = SCRIPTS[name]
    more = {
        "/v1/chat/completions": scores,
        "/v1/completions": {"logprobs": 2} if scores else {},
        "/v1/responses": {"top_logprobs": 2} if scores else {},
        "/v1/messages": {},
    }
    async with client(running) as one:
        for path, fields in more.items():
            if path == "/v1/completions" and name in CALLS:
                continue
            body = LEAST[path] | fields
            whole = await one.post(path, json=body)
            assert whole.status_code == 200, whole.text
            holds(answer_of("POST", path), whole.json())
            streamed = await one.post(path, json=body | {"stream": True})
            events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
            assert len(events) > 1
            for event in events:
                if event != "[DONE]":
                    holds(answer_of("POST", path, "text/event-stream"), json.loads(event))
            failed = await one.post(path, json=body | {"model": 7})
            holds("MessagesError" if "messages" in path else "Error", failed.json())


async def test_other_answers_are_those_that_the_document_describes(running: Running) -> None:
    """So have the answers of the routes that do not generate."""
    async with client(running) as one:
        for path in LEAST:
            holds(answer_of("POST", path), (await one.post(path, json=LEAST[path])).json())
        embedded = await one.post("/v1/embeddings", json=LEAST["/v1/embeddings"] | {"encoding_format": "base64"})
        holds("Embeddings", embedded.json())
        for path in ("/v1/limits", "/v1/usage", "/version", "/v1/models", "/health", "/health/live", "/health/ready"):
            holds(answer_of("GET", path), (await one.get(path)).json())
        holds(answer_of("GET", "/v1/models/{model}"), (await one.get(f"/v1/models/{MODEL}")).json())
        running.ready[0] = False
        holds("Ready", (await one.get("/health")).json())
    file = stored_objects.file_object(StoredFile("file-1", "batch", "a.jsonl", 3, 1, 2))
    for problems in ([], [LineProblem("invalid", "no JSON", 3, "body")]):
        facts = ("batch_1", "acme", "key:a", "/v1/completions", "file-1", "failed", 1, 2)
        holds("Batch", stored_objects.batch_object(StoredBatch(*facts, failed_at=2, problems=problems)))
    holds(answer_of("GET", "/v1/files"), stored_objects.page_object([file], more=True))
    holds(answer_of("GET", "/v1/batches"), stored_objects.page_object([], more=False))
    holds("FileDeleted", stored_objects.file_deleted("file-1"))


async def test_the_schemas_are_closed(running: Running) -> None:
    """Control of the two above: one field more, or one missing, is found in each kind of answer."""
    async with client(running) as one:
        for path in LEAST:
            found = (await one.post(path, json=LEAST[path])).json()
            name = answer_of("POST", path)
            for wrong in ({**found, "zz": 1}, dict(list(found.items())[1:])):
                assert not SAMPLES.validator({"$ref": f"#/components/schemas/{name}"}).is_valid(wrong), path


async def test_a_prompts_scores_are_described(running: Running) -> None:
    """The answers with a prompt's log-probabilities satisfy the document too."""
    prompt = PromptTokens("hi", (PromptToken(1, b"h", None, ()), PromptToken(2, b"i", -0.5, ((2, b"i", -0.5),))))
    first, *rest = text_script("a")
    running.service.script = [first, prompt, *rest]
    async with client(running) as one:
        for path, fields in (
            ("/v1/chat/completions", {"prompt_logprobs": 1}),
            ("/v1/completions", {"prompt_logprobs": 1}),
            ("/v1/completions", {"echo": True, "logprobs": 1}),
        ):
            answer = await one.post(path, json=LEAST[path] | fields)
            assert "prompt_logprobs" in answer.text or "echo" in fields
            holds(answer_of("POST", path), answer.json())
