"""policy.routes: the choice, its shares and its stability; policy.route_reading: routes of several files."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from math import sqrt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.errors import PolicyError, PolicySchemaError
from policy.evaluate import visible_models
from policy.loader import Source, load_policy
from policy.model import IsolationClass, ModelState, PolicySet
from policy.route_schema import MAX_ROUTES, MAX_TARGETS
from policy.routes import (
    DRAWS,
    ChoiceReason,
    RouteChoice,
    candidates,
    choose,
    draw_of,
    leads,
    likeliest,
    reachable,
    reachable_alone,
    shares,
    visible_route,
)
from policy.simulate import Load, Question, chosen, decide
from tests.policy.drawn_policies import MODELS, TENANTS, documents, loaded, loads, questions

SHARED = IsolationClass.SHARED
READY = dict.fromkeys(("mini", "next", "backup"), ModelState.READY)
DRAWN = 10_000


def policy_of(**routes: Any) -> PolicySet:
    """A policy with these routes, which one tenant may use."""
    return loaded({"version": 1, "tenants": {"alpha": {"credentials": ["key:a"], "models": ["*"]}}, "routes": routes})


CANARY = {"to": [{"model": "mini", "weight": 95}, {"model": "next", "weight": 5}]}


def models_drawn(route: dict[str, Any], keys: list[str], tenant: str = "alpha") -> list[str]:
    """The model of each key's request for a route, while all models are ready."""
    policy = policy_of(fast=route)
    found = policy.routes["fast"]
    states = dict.fromkeys(found.models, ModelState.READY)
    return [choose(policy, found, SHARED, states, draw_of(tenant, "fast", key)).model for key in keys]


@pytest.mark.parametrize(
    "weights", [[95, 5], [1, 1], [1], [1000, 1], [3, 2, 1], [1] * MAX_TARGETS], ids=lambda weights: str(weights[:3])
)
def test_shares_are_the_weights(weights: list[int]) -> None:
    """Of 10,000 requests each target gets its share, within 4 standard deviations. Control: a share that is off by a
    tenth of all would be noticed."""
    route = {"to": [{"model": f"m{index}", "weight": weight} for index, weight in enumerate(weights)]}
    found = Counter(models_drawn(route, [f"req_{number}" for number in range(DRAWN)]))
    assert sum(found.values()) == DRAWN
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        bound = 4 * sqrt(DRAWN * share * (1 - share))
        assert abs(found[f"m{index}"] - DRAWN * share) <= bound
        assert bound < DRAWN / 10


def test_equal_keys_stay_together_and_tenants_draw_apart() -> None:
    """One key is one model each time; two tenants with the same keys are not drawn alike, nor are two routes."""
    keys = [f"chat-{number}" for number in range(400)]
    half = {"to": [{"model": "mini"}, {"model": "next"}]}
    assert models_drawn(half, keys) == models_drawn(half, keys)
    for other in ("beta", "alpha "):
        same = sum(a == b for a, b in zip(models_drawn(half, keys), models_drawn(half, keys, other), strict=True))
        assert 120 < same < 280
    alike = sum((draw_of("a", "fast", key) < DRAWS // 2) == (draw_of("a", "slow", key) < DRAWS // 2) for key in keys)
    assert 120 < alike < 280


def test_parts_of_a_draw_are_not_run_together() -> None:
    """What ends one part does not begin the next; any text is a key."""
    assert draw_of("ab", "c", "d") != draw_of("a", "bc", "d") != draw_of("a", "b", "cd")
    assert 0 <= draw_of("a", "b", "\ud800\x00") < DRAWS


def test_a_new_canary_moves_its_share_and_nothing_else() -> None:
    """When 5 of 100 go to another model those move, and no conversation moves between others."""
    keys = [f"chat-{number}" for number in range(4_000)]
    before = models_drawn({"to": [{"model": "mini", "weight": 100}]}, keys)
    after = models_drawn(CANARY, keys)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {("mini", "next")}
    assert 140 < len(moved) < 260


def test_draws_at_the_edges_are_somewhere_and_beyond_them_nowhere() -> None:
    """The first and the last draw have a model; a number that is no draw is refused, not rounded."""
    policy = policy_of(fast=CANARY)
    route = policy.routes["fast"]
    assert [candidates(policy, route, SHARED, draw) for draw in (0, DRAWS - 1)] == [["mini"], ["next"]]
    with pytest.raises(ValueError, match="draw"):
        candidates(policy, route, SHARED, DRAWS)


def test_a_model_that_nobody_told_of_is_not_served() -> None:
    """States that leave a model out say that it is not there; with none at all the drawn one is kept, with a reason of
    its own."""
    policy = policy_of(fast={**CANARY, "fallback": ["backup"]})
    route = policy.routes["fast"]
    assert choose(policy, route, SHARED, READY, 0).reason is ChoiceReason.WEIGHT
    gone = choose(policy, route, SHARED, {"backup": ModelState.READY}, 0)
    assert (gone.model, gone.reason) == ("backup", ChoiceReason.UNREADY)
    none = choose(policy, route, SHARED, {}, 0)
    assert (none.model, none.reason) == ("mini", ChoiceReason.NONE_READY)


def test_a_route_for_busy_times_alone_waits_for_a_model_that_starts() -> None:
    """Where ``unready`` is not among the conditions the chosen model is kept, and counts as such."""
    policy = policy_of(fast={**CANARY, "fallback": ["backup"], "fall_back_when": ["busy"]})
    route = policy.routes["fast"]
    kept = choose(policy, route, SHARED, {"backup": ModelState.READY}, 0)
    assert (kept.model, kept.reason) == ("mini", ChoiceReason.NONE_READY)
    moved = choose(policy, route, SHARED, {**READY, "mini": ModelState.BUSY}, 0)
    assert (moved.model, moved.reason) == ("backup", ChoiceReason.BUSY)


def test_a_sleeping_model_is_passed_over_where_the_route_says_so() -> None:
    """With the condition a fallback that serves is chosen, and the choice names the sleeping model; without one that
    serves the sleeping model is kept, by the rule. Without the condition (the control) sleep is as good as ready."""
    sleeping, busy = {**READY, "mini": ModelState.ASLEEP}, {**READY, "backup": ModelState.BUSY}
    asleep = policy_of(fast={**CANARY, "fallback": ["backup"], "fall_back_when": ["asleep"]})
    route = asleep.routes["fast"]
    passed = RouteChoice("backup", ChoiceReason.ASLEEP, "mini")
    assert choose(asleep, route, SHARED, sleeping, 0) == passed
    assert choose(asleep, route, SHARED, busy | {"mini": ModelState.ASLEEP}, 0) == passed
    kept = choose(asleep, route, SHARED, {"mini": ModelState.ASLEEP, "backup": ModelState.ASLEEP}, 0)
    assert kept == RouteChoice("mini", ChoiceReason.WEIGHT)
    usual = policy_of(fast={**CANARY, "fallback": ["backup"]})
    assert choose(usual, usual.routes["fast"], SHARED, sleeping, 0) == RouteChoice("mini", ChoiceReason.WEIGHT)


def test_a_canary_may_fall_back_to_the_other_target() -> None:
    """The main model can be the fallback of the canary; when itself is drawn it is not tried twice."""
    policy = policy_of(fast={**CANARY, "fallback": ["mini"]})
    route = policy.routes["fast"]
    assert candidates(policy, route, SHARED, DRAWS - 1) == ["next", "mini"]
    assert candidates(policy, route, SHARED, 0) == ["mini"]
    assert choose(policy, route, SHARED, {"mini": ModelState.READY}, DRAWS - 1).model == "mini"


@pytest.mark.parametrize("isolation_class", IsolationClass)
def test_class_strict_sees_no_busy_model(isolation_class: IsolationClass) -> None:
    """Whatever is busy, its choice is that of an idle machine; other classes (control) move."""
    policy = policy_of(fast={**CANARY, "fallback": ["backup"], "fall_back_when": ["unready", "busy"]})
    route = policy.routes["fast"]
    busy = choose(policy, route, isolation_class, {**READY, "mini": ModelState.BUSY}, 0)
    idle = choose(policy, route, isolation_class, READY, 0)
    assert (busy == idle) is (isolation_class is IsolationClass.STRICT)


def test_shares_and_the_likeliest() -> None:
    """Parts of 1, and the model to replay with."""
    policy = policy_of(fast={"to": [{"model": "next", "weight": 1}, {"model": "mini", "weight": 3}]})
    route = policy.routes["fast"]
    assert shares(route.to) == [("next", 0.25), ("mini", 0.75)]
    assert likeliest(policy, route, SHARED) == "mini"


def test_a_name_leads_to_what_it_says() -> None:
    """A model by its own name unless a route has it; an alias to the models of its route, fallback included."""
    policy = policy_of(fast={**CANARY, "fallback": ["backup"]})
    tenant = policy.tenants["alpha"]
    assert leads(policy, tenant, "mini", "")
    led = [leads(policy, tenant, name, "fast") for name in ("mini", "next", "backup", "other")]
    assert led == [True, True, True, False]
    assert not leads(policy, tenant, "fast", ""), "the name is the route's, not a model's"
    assert not leads(policy, tenant, "mini", "former")
    assert not leads(policy, tenant, "fast", "fast")


def files(*parts: dict[str, Any]) -> list[Source]:
    """Files with these routes, prices and the like; the first has the tenant."""
    tenants: list[dict[str, Any]] = [{"alpha": {"credentials": ["key:a"], "models": ["*"]}}]
    tenants += [{} for _ in parts[1:]]
    texts = [json.dumps({"version": 1, "tenants": own, **part}) for own, part in zip(tenants, parts, strict=True)]
    return [Source(f"{number}.yaml", text) for number, text in enumerate(texts)]


PARTS = (
    {"routes": {"fast": CANARY}},
    {"routes": {"cheap": {"to": [{"model": "mini"}, {"model": "next"}], "choose": "cheapest"}}},
    {"prices": {"currency": "EUR", "rules": [{"models": ["*"], "input": 1, "output": 1}]}},
)


def test_the_order_of_files_does_not_matter() -> None:
    """Routes of several files are one policy, with one digest, in whichever file the prices stand."""
    found = {load_policy(files(*order)).digest for order in permutations(PARTS)}
    assert len(found) == 1
    assert set(load_policy(files(*PARTS)).routes) == {"fast", "cheap"}


def test_routes_of_several_files_are_held_against_each_other() -> None:
    """A route twice, and a target that another file makes a route, are problems with their file and place."""
    with pytest.raises(PolicySchemaError) as twice:
        load_policy(files({"routes": {"fast": CANARY}}, {"routes": {"fast": CANARY}}))
    assert str(twice.value).endswith("routes.fast: route 'fast' stands in 0.yaml already")
    assert str(twice.value).startswith("1.yaml:1:")
    with pytest.raises(PolicySchemaError, match=r"^0\.yaml:.*'mini' is a route"):
        load_policy(files({"routes": {"fast": CANARY}}, {"routes": {"mini": {"to": [{"model": "m"}]}}}))


def test_the_bound_holds_for_all_files_together() -> None:
    """As many routes as may be in two files are loaded; one more is refused, once, where it stands."""

    def some(first: int, count: int) -> dict[str, Any]:
        return {"routes": {f"r{number:03}": {"to": [{"model": "m"}]} for number in range(first, first + count)}}

    most = load_policy(files(some(0, MAX_ROUTES - 1), some(MAX_ROUTES - 1, 1)))
    assert len(most.routes) == MAX_ROUTES
    with pytest.raises(PolicySchemaError) as refused:
        load_policy(files(some(0, MAX_ROUTES), some(MAX_ROUTES, 3)))
    assert str(refused.value).count(f"more than {MAX_ROUTES} routes together") == 1
    assert "routes.r256" in str(refused.value)
    with pytest.raises(PolicyError, match="routes: must have at most 256"):
        load_policy(files(some(0, MAX_ROUTES + 1)))


def test_the_digest_sees_what_changes_a_choice_and_nothing_else() -> None:
    """Order of routes and of conditions change nothing; order of targets, a weight and a fallback do."""

    def digest(**routes: Any) -> str:
        return policy_of(**routes).digest

    both = ["unready", "busy"]
    one = {**CANARY, "fallback": ["backup"], "fall_back_when": both}
    assert digest(a=one, b=CANARY) == digest(b=CANARY, a=one)
    assert digest(a=one) == digest(a={**one, "fall_back_when": both[::-1]})
    assert digest(a={"to": [{"model": "m"}]}) == digest(a={"to": [{"model": "m", "weight": 1}]}), "a default"
    others = [
        {**one, "to": CANARY["to"][::-1]},
        {**one, "to": [{"model": "mini", "weight": 94}, {"model": "next", "weight": 5}]},
        {**one, "fallback": []} | {"fall_back_when": ["unready"]},
        {**one, "fallback": ["other"]},
    ]
    with pytest.raises(PolicyError):
        digest(a={**one, "fallback": []})
    del others[2]["fall_back_when"]
    assert len({digest(a=one), *(digest(a=other) for other in others)}) == 5


@settings(max_examples=150, deadline=None)
@given(documents, questions, loads)
def test_an_answer_names_a_model_that_the_route_leads_to(document: dict, question: dict, load: dict) -> None:
    """Whatever policy, question and states: a route gives one of its models, ready ones before others; the decision is
    the one about that model by that alias; and without a route the name stays what it was."""
    policy = loaded(document)
    asked, use = Question(**question), Load(**load)
    choice = chosen(policy, asked, use)
    route = visible_route(policy, policy.tenants.get(asked.tenant or ""), asked.model)
    decision = decide(policy, asked, use)
    assert decision.reason.value != "route_changed" or (asked.model in policy.routes and route is None)
    if route is None:
        assert choice is None
        return
    assert choice is not None
    assert choice.model in route.models
    assert leads(policy, policy.tenants[asked.tenant or ""], choice.model, asked.model)
    ready = {name for name in route.models if name not in use.unready}
    if choice.reason in (ChoiceReason.UNREADY, ChoiceReason.BUSY, ChoiceReason.ASLEEP):
        assert choice.model in ready
    assert (choice.asleep in use.asleep) is (choice.reason is ChoiceReason.ASLEEP)


@settings(max_examples=150, deadline=None)
@given(documents, st.sampled_from(TENANTS))
def test_what_is_reachable_is_what_some_name_is_allowed_for(document: dict, tenant: str) -> None:
    """Sandboxes and KV are set up for exactly those models that a request of the tenant can be served by."""
    policy = loaded(document)
    known = policy.tenants.get(tenant)
    if known is None:
        return
    models = (*MODELS, "gone")
    names = {*models, *policy.routes}
    expected = {
        model
        for name in names
        for model in models
        if visible_models(policy, tenant, (name,))
        and leads(policy, policy.tenants[tenant], model, name if name in policy.routes else "")
        and (name in policy.routes or name == model)
    }
    assert set(reachable(policy.routes, known.models, known.adapters, models)) == expected


def test_a_model_is_reachable_with_an_adapter_alone() -> None:
    """By the adapter's name, and by a route that leads to an adapter which the tenant has. A route is no way for one
    that lacks one of its adapters, not even to its plain models. Without an adapter the model serves none of them but
    the last."""
    document = {
        "version": 1,
        "tenants": {
            name: {"credentials": [f"key:{name}"], "models": patterns, "adapters": adapters}
            for name, patterns, adapters in (
                ("by-name", ["other"], ["mini:a"]),
                ("by-alias", ["help"], ["mini:a"]),
                ("lacks-it", ["help", "both"], ["next:b"]),
                ("has-both", ["both"], ["mini:a"]),
            )
        },
        "routes": {
            "help": {"to": [{"model": "mini:a"}]},
            "both": {"to": [{"model": "backup"}, {"model": "mini:a"}], "fallback": ["mini"]},
        },
    }
    policy, models = loaded(document), ("mini", "next", "other", "backup")
    ways = {name: (policy.routes, one.models, one.adapters, models) for name, one in policy.tenants.items()}
    assert {name: reachable(*way) for name, way in ways.items()} == {
        "by-name": ("mini", "other"),
        "by-alias": ("mini",),
        "lacks-it": ("next",),
        "has-both": ("mini", "backup"),
    }
    assert {name: reachable_alone(*way) for name, way in ways.items()} == {
        "by-name": ("other",),
        "by-alias": (),
        "lacks-it": (),
        "has-both": ("mini", "backup"),
    }


def test_a_public_prefix_is_for_none_that_has_adapters_alone() -> None:
    """What is computed with an adapter begins with no public prefix, so such a tenant is not among all, and is refused
    by name. Control: one that may use the model."""
    tenants = {"adapted": ["other"], "plain": ["mini"]}
    document = {
        "version": 1,
        "tenants": {
            name: {"credentials": [f"key:{name}"], "models": models, "adapters": ["mini:a"]}
            for name, models in tenants.items()
        },
        "public_prefixes": {"style": {"model": "mini", "tenants": "all", "text": "You are brief."}},
    }
    assert loaded(document).public["style"].tenants == ("plain",)
    document["public_prefixes"]["style"]["tenants"] = ["adapted"]
    with pytest.raises(PolicyError, match="may not use the model 'mini'"):
        loaded(document)


def test_a_public_prefix_for_all_is_for_those_who_come_by_an_alias_too() -> None:
    """The prefix belongs to the model; a tenant that the alias leads there may begin with it, and another may not."""
    document = {
        "version": 1,
        "tenants": {
            name: {"credentials": [f"key:{name}"], "models": [pattern]}
            for name, pattern in (("by-alias", "fast"), ("by-name", "mini"), ("neither", "next"))
        },
        "routes": {"fast": {"to": [{"model": "mini"}]}},
        "public_prefixes": {"style": {"model": "mini", "tenants": "all", "text": "You are brief."}},
    }
    assert loaded(document).public["style"].tenants == ("by-alias", "by-name")
    document["public_prefixes"]["style"]["tenants"] = ["neither"]
    with pytest.raises(PolicyError, match="may not use the model 'mini'"):
        loaded(document)
