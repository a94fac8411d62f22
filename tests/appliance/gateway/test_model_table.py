"""The gateway's table of models: what the supervisor says is served, and how requests of a leaving model end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.config import ModelConfig
from appliance.common.control import Control, Welcome
from appliance.common.control_models import (
    ApplyModels,
    ModelDrained,
    ModelGone,
    ModelServed,
    ModelsReviewed,
    ReviewModels,
)
from appliance.common.errors import ApplianceError, ConfigError, ModelRemovedError, UnavailableError
from appliance.common.served_models import LEAVING, SERVED
from appliance.gateway.model_table import ModelTable
from appliance.gateway.process import Gateway
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from tests.appliance.gateway.test_process import gateway as gateway

Told = list[Control]


class Life:
    """A request of which only the end counts; it leaves when it is withdrawn, or is told to."""

    def __init__(self, live: set[Any], model: ModelSandboxes, alias: str = "", adapter: str = "") -> None:
        self.live, self.model, self.call = live, model, SimpleNamespace(alias=alias, adapter=adapter)
        self.error: ApplianceError | None = None
        live.add(self)

    def withdraw(self, error: ApplianceError) -> None:
        """Take the error, and leave."""
        self.error = error
        self.live.discard(self)


@pytest.fixture
def table(gateway: Gateway) -> SimpleNamespace:
    """A table over the demo's gateway, what it told the supervisor, and which models it said have changed."""
    told: Told = []
    changed: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    found = ModelTable(
        gateway._service, told.append, lambda: True, lambda come, gone: changed.append((come, gone)), drain_s=0.2
    )
    live = gateway._service.dependencies.live
    return SimpleNamespace(
        table=found, told=told, changed=changed, models=gateway._service.model_sandboxes, live=live, gateway=gateway
    )


def word(name: str, state: str = SERVED, *, entry: str = "e", again: int = 0) -> ModelServed:
    """The supervisor's word about a model."""
    return ModelServed(name, "model", 0, entry, state, again, [f"{name}:tuned {'ab' * 32}"], 0, [])


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that happens by itself."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_the_supervisors_word_is_the_table(table: SimpleNamespace) -> None:
    """What it does not serve goes with its attachment, what it names comes; readiness does not wait for that, and a
    policy's routes and metrics are told once for each change."""
    table.table.welcome(Welcome(1, "s", "l", ["new"]))
    table.table.served(word("new"))
    table.table.served(word("new"))
    assert list(table.models) == ["new"] and table.models["new"].arriving
    assert table.changed == [((), ("athanor-mini",)), (("new",), ())]
    table.table.gone(ModelGone("new"))
    table.table.gone(ModelGone("new"))
    assert not table.models and table.changed[2:] == [((), ("new",))]


@pytest.mark.parametrize(
    "bad",
    [
        word("../x"),
        word("m", "gone"),
        ModelServed("m", "python", 0, "e", SERVED, 0, [], 0, []),
        ModelServed("m", "model", 0, "e", SERVED, 0, ["m:t xyz"], 0, []),
    ],
)
async def test_what_no_supervisor_serves_is_refused(table: SimpleNamespace, bad: ModelServed) -> None:
    """A name that is none, an unknown state, an unknown runner."""
    with pytest.raises(ValueError, match="no supervisor of this release"):
        table.table.served(bad)


async def test_a_leaving_model_waits_for_its_requests_and_cuts_the_rest(table: SimpleNamespace) -> None:
    """One request ends in time and has no error; one is cut with the typed error, one of a route with one that may be
    tried again; one of another model (control) goes on. Then the supervisor is told, once."""
    table.table.served(word("new"))
    model, other = table.models["new"], table.models["athanor-mini"]
    ends, stays, routed = (Life(table.live, model, alias) for alias in ("", "", "fast"))
    adapted = Life(table.live, model, "new:tuned", "new:tuned")
    control = Life(table.live, other)
    table.table.served(word("new", LEAVING))
    await asyncio.sleep(0)
    table.live.discard(ends)
    assert ModelDrained("new") not in table.told
    await until(lambda: ModelDrained("new") in table.told)
    assert (ends.error, control.error) == (None, None)
    assert isinstance(stays.error, ModelRemovedError) and isinstance(routed.error, UnavailableError)
    assert isinstance(adapted.error, ModelRemovedError)
    assert "the model fast " in routed.error.message
    assert table.told.count(ModelDrained("new")) == 1
    table.live.discard(control)


async def test_a_changed_model_comes_again(table: SimpleNamespace) -> None:
    """Its requests get an error that may be tried again, and after the word that it serves it is another one. Meanwhile
    a reload that still has it finds nothing to change, and one without it does."""
    table.table.served(word("new"))
    before = table.models["new"]
    life = Life(table.live, before)
    table.table.served(word("new", LEAVING, again=1))
    await until(lambda: ModelDrained("new") in table.told)
    assert isinstance(life.error, UnavailableError) and life.error.retry_after_s
    wanted = ModelConfig(name="new", path="/m")
    assert not table.table.difference((), (wanted,))
    assert table.table.difference((), ()).removed == ("new",)
    table.table.served(word("new", entry="other"))
    assert table.models["new"] is not before
    assert table.table.difference((), ()).removed == ("new",)


async def test_the_supervisors_word_counts_for_a_model_that_is_known(table: SimpleNamespace) -> None:
    """A gateway that began with another configuration takes adapters, runner and truncation from the supervisor."""
    table.table.served(word("new"))
    model = table.models["new"]
    assert model.adapters == {"new:tuned": bytes.fromhex("ab" * 32)}
    table.table.served(ModelServed("new", "embed", 1, "e", SERVED, 0, ["new:other " + "cd" * 32], 1, ["bad", "good"]))
    assert table.models["new"] is model
    assert (model.runner, model.truncates, list(model.adapters)) == ("embed", True, ["new:other"])
    assert (model.templated, model.labels) == (True, ("bad", "good"))


async def test_a_drain_ends_with_its_model(table: SimpleNamespace) -> None:
    """A model that was dropped while it drained, and came again, is not said to be drained."""
    table.table.served(word("new"))
    life = Life(table.live, table.models["new"])
    table.table.served(word("new", LEAVING))
    table.table.welcome(Welcome(1, "s", "l", ["athanor-mini"]))
    table.table.served(word("new"))
    assert life.error is not None
    await until(lambda: not table.table._tasks)
    assert ModelDrained("new") not in table.told


async def test_a_model_that_is_not_here_is_drained_at_once(table: SimpleNamespace) -> None:
    """A gateway that attaches while a model leaves has no request of it."""
    table.table.served(word("new", LEAVING))
    assert table.told == [ModelDrained("new")]


async def test_a_review_has_one_answer(table: SimpleNamespace) -> None:
    """Problems are raised, without any the id is given and applied; a supervisor that goes ends the wait."""
    running = asyncio.create_task(table.table.review(()))
    await until(lambda: bool(table.told))
    asked = table.told.pop()
    assert isinstance(asked, ReviewModels)
    table.table.takers[ModelsReviewed](ModelsReviewed("another", ["no"]))
    table.table.takers[ModelsReviewed](ModelsReviewed(asked.request, []))
    assert await running == asked.request
    table.table.apply(asked.request)
    assert table.told.pop() == ApplyModels(asked.request)
    running = asyncio.create_task(table.table.review(()))
    await until(lambda: bool(table.told))
    table.table.takers[ModelsReviewed](ModelsReviewed(table.told[-1].request, ["a.yaml:1:1: no room"]))
    with pytest.raises(ConfigError, match="a.yaml:1:1: no room"):
        await running
    running = asyncio.create_task(table.table.review(()))
    await until(lambda: len(table.told) == 2)
    table.table.welcome(Welcome(1, "s", "l", ["athanor-mini"]))
    with pytest.raises(ConfigError, match="the supervisor went while it looked"):
        await running
