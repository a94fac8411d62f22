"""Names of models and routes: what a tenant can ask about them is the same whatever others have."""

from __future__ import annotations

import random
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from appliance.common.errors import ApplianceError
from appliance.gateway.generate_request import (
    CallContext,
    EmbedRequest,
    GenerateRequest,
    Operation,
    Principal,
    ScoreOperation,
    ScoreRequest,
    TextPrompt,
    TokenizerOperation,
    TokenizerRequest,
    TokenPrompt,
)
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from isolation.ipc.sampling import Sampling
from policy.loader import Source, load_policy

EVE = Principal("eve", "key:eve")
CALL = CallContext("POST /v1/completions", "http")

POOR = """\
version: 1
tenants:
  eve: {credentials: ["key:eve"], models: ["own", "own-route", "own:*"], adapters: ["own:hers"]}
  bob: {credentials: ["key:bob"], models: ["*"]ADAPTERS}
routes:
  own-route: {to: [{model: own}]}
"""
RICH = (
    POOR.replace("[{model: own}]", "[{model: own, weight: 99}, {model: secret}], fallback: [spare]")
    + """\
  secret-route: {to: [{model: secret}]}
  own-route-2: {to: [{model: own}, {model: spare}]}
  vectors-route: {to: [{model: vectors}]}
  own-route-to-adapter: {to: [{model: "own:his"}]}
"""
).replace("ADAPTERS", ', adapters: ["own:his", "secret:his"]')
POOR = POOR.replace("ADAPTERS", "")
"""The same for eve by the names that she has; others have more, and her own route leads further."""

ADAPTERS = {
    ("own", 1): {"own:hers": bytes(32)},
    ("own", 4): {"own:hers": bytes(32), "own:his": b"b" * 32},
    ("secret", 4): {"secret:his": b"c" * 32},
}
"""Adapters by model and number of models that are served."""

GUESSES = (
    *("secret", "spare", "vectors", "secret-route", "own-route-2", "vectors-route", "bob", "nothing"),
    *("own:his", "secret:his", "own:nothing", "nothing:his", "own-route-to-adapter", "own:", "own:*", "own:hers:his"),
    *("own-rout", "own*", "*", "own-route/secret", "own-route:secret", "routes.own-route", "SECRET", "secret "),
)
"""Names that eve may not use, or nobody has; some try what a route could be taken apart by."""


def service(policy: str, *models: str) -> GatewayService:
    """A gateway with these models, whose sandboxes are not there: no answer below comes from one."""
    keys = {name: name.encode().ljust(32, b"k") for name in ("eve", "bob")}
    served = {
        name: ModelSandboxes(
            name, "embed" if name == "vectors" else "model", adapters=ADAPTERS.get((name, len(models)))
        )
        for name in models
    }
    for model in served.values():
        model.created = 0
        model.begin_drain()
    ledger = Ledger(load_policy([Source("p.yaml", policy)]), keys)
    return GatewayService(served, ledger, open_telemetry(TelemetrySettings(version="0")))


def requests(name: str) -> Iterator[tuple[str, Any]]:
    """A request of each kind for a name."""
    yield (
        "generate",
        GenerateRequest(
            request_id="r", operation=Operation.TEXT_COMPLETION, model=name, prompt=TextPrompt("x"), sampling=Sampling()
        ),
    )
    yield "embed", EmbedRequest(request_id="r", model=name, inputs=(TextPrompt("x"),))
    for scored in ScoreOperation:
        queries = () if scored is ScoreOperation.CLASSIFY else (TextPrompt("x"),)
        yield (
            "score",
            ScoreRequest(request_id="r", operation=scored, model=name, queries=queries, documents=(TextPrompt("x"),)),
        )
    for operation, prompt in (
        (TokenizerOperation.TOKENIZE, TextPrompt("x")),
        (TokenizerOperation.DETOKENIZE, TokenPrompt(array("I", [1]))),
    ):
        yield operation.value, TokenizerRequest(request_id="r", operation=operation, model=name, prompt=prompt)


async def answers(gateway: GatewayService, who: Principal, name: str) -> AsyncIterator[tuple[object, ...]]:
    """All that an error says to the caller, for each kind of request, but for the name."""
    for kind, request in requests(name):
        asked = gateway.routed(who, request)
        try:
            if kind == "generate":
                await anext(gateway.generate(who, asked, CALL))
            else:
                await getattr(gateway, kind)(who, asked, CALL)
        except ApplianceError as error:
            said = (error.wire, error.message, error.param, error.retry_after_s, error.details)
            yield kind, *(str(part).replace(repr(name), "?") for part in said)


async def test_what_others_have_changes_nothing_that_a_tenant_is_told() -> None:
    """Two machines: on one there are further models, adapters and routes, and the tenant's own route leads to more.
    Lists and every error by every name are the same on both. Control: a tenant that may use all of it is told."""
    poor = service(POOR, "own")
    rich = service(RICH, "own", "secret", "spare", "vectors")
    assert poor.models(EVE) == rich.models(EVE)
    assert [card.name for card in rich.models(EVE)] == ["own", "own-route", "own:hers"]
    for name in ("own", "own-route", "own:hers", *GUESSES):
        told = [[one async for one in answers(gateway, EVE, name)] for gateway in (poor, rich)]
        assert told[0] == told[1], name
        assert len(told[0]) == 7
    bob = Principal("bob", "key:bob")
    assert len(poor.models(bob)) < len(rich.models(bob))
    for name in ("secret", "secret-route", "own:his", "own-route-to-adapter"):
        told = [[one async for one in answers(gateway, bob, name)] for gateway in (poor, rich)]
        assert told[0] != told[1]


async def test_names_that_are_not_hers_are_refused_alike() -> None:
    """On one machine: each guess is refused as the others are, and differently from a name of her own (control)."""
    rich = service(RICH, "own", "secret", "spare", "vectors")
    told = {name: tuple([one async for one in answers(rich, EVE, name)]) for name in GUESSES}
    assert len(set(told.values())) == 1
    for name in ("own", "own:hers"):
        assert tuple([one async for one in answers(rich, EVE, name)]) not in told.values()


async def test_no_field_of_a_request_chooses_the_model_of_a_route() -> None:
    """A caller that fills in what the gateway fills in is not believed: the front ends leave the alias empty, and a
    request that came with one would still need the route to lead there and the alias to be granted."""
    rich = service(RICH, "own", "secret", "spare", "vectors")
    (_, request), *_ = requests("secret")
    for alias in ("secret-route", "own-route-2", "nothing"):
        forged = replace(request, alias=alias)
        (error,) = [one async for one in answers_to(rich, forged)]
        assert error.wire.code == "model_not_found"
    for alias in ("own:his", "own:hers", "own-route", ""):
        forged = replace(request, model="own", alias=alias, adapter="own:his")
        (error,) = [one async for one in answers_to(rich, forged)]
        assert error.wire.reason in ("MODEL_NOT_FOUND", "POLICY_CHANGED", "UNAVAILABLE"), alias
        assert not rich.model_sandboxes["own"].draining or error.wire.reason != "OK"
    forged = replace(request, model="vectors", alias="own-route")
    (error,) = [one async for one in answers_to(rich, forged)]
    assert error.wire.reason in ("INVALID_REQUEST", "POLICY_CHANGED")


async def answers_to(gateway: GatewayService, request: GenerateRequest) -> AsyncIterator[ApplianceError]:
    """The error of one request of eve's."""
    try:
        await anext(gateway.generate(EVE, request, CALL))
    except ApplianceError as error:
        yield error


def area(some: list[float], others: list[float]) -> float:
    """How often a time of the first kind is longer than one of the second: 0.5 where nothing tells them apart."""
    order = sorted(others)
    wins = sum(bisect_left(order, one) + bisect_right(order, one) for one in some)
    return wins / (2 * len(some) * len(others))


@pytest.mark.clock
@pytest.mark.parametrize(
    ("count", "margin"), [(300, 0.12), pytest.param(20_000, 0.02, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
async def test_the_time_of_a_refusal_does_not_tell_an_adapter_of_others(count: int, margin: float) -> None:
    """A refusal of a name takes as long whether it is another tenant's adapter or nobody's, in processor time of the
    whole request: the area under the curve of an observer who guesses by it stays beside a half. Control: the same
    observer tells a name of eve's own from both."""
    rich = service(RICH, "own", "secret", "spare", "vectors")
    kinds = {"theirs": "own:his", "nobody's": "own:hid", "hers": "own:hers"}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    draw, order = random.Random(2), [kind for kind in kinds for _ in range(count)]
    draw.shuffle(order)
    for kind in order:
        (_, request), *_ = requests(kinds[kind])
        began = time.process_time_ns()
        assert [one async for one in answers_to(rich, rich.routed(EVE, request))]
        times[kind].append(time.process_time_ns() - began)
    assert abs(area(times["theirs"], times["nobody's"]) - 0.5) < margin
    assert abs(area(times["hers"], times["nobody's"]) - 0.5) > 0.2
