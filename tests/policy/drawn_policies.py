"""Policies drawn by hypothesis: small, valid, and alike enough that two of them differ in little."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from policy.content import ROLES
from policy.errors import PolicyError
from policy.feature import Feature
from policy.loader import Source, load_policy
from policy.model import PolicySet
from policy.request import Content

TENANTS = ("alpha", "beta", "gamma")
MODELS = ("m", "m-large", "other", "fast")

exceeded = st.sampled_from(["refuse", "queue", "downgrade"])
limits = st.fixed_dictionaries(
    {},
    optional={
        "requests_per_minute": st.sampled_from([1, 60, 600, {"rate": 60, "burst": 2}, {"rate": 60, "burst": 600}])
        | st.fixed_dictionaries({"rate": st.just(60), "exceeded": exceeded}),
        "tokens_per_minute": st.sampled_from([100, 6_000, 200_000, {"rate": 100, "burst": 6_000}])
        | st.fixed_dictionaries({"rate": st.just(6_000), "exceeded": exceeded}),
        "input_tokens_per_minute": st.sampled_from([50, 6_000, {"rate": 50, "burst": 3_000, "exceeded": "queue"}]),
        "output_tokens_per_minute": st.sampled_from([50, 6_000, {"rate": 50, "burst": 100, "exceeded": "downgrade"}]),
        "concurrency": st.sampled_from([1, 4, 64])
        | st.fixed_dictionaries({"at_once": st.just(4), "exceeded": exceeded}),
        "kv_tokens": st.sampled_from([60, 5_000])
        | st.fixed_dictionaries({"at_once": st.just(500), "exceeded": exceeded}),
        "max_queued_requests": st.sampled_from([1, 64]),
        "max_queue_s": st.sampled_from([1, 30]),
        "max_context_tokens": st.sampled_from([50, 400, 4_096]),
        "max_output_tokens": st.sampled_from([10, 100, 1_024]),
    },
)
features = st.fixed_dictionaries(
    {}, optional={name: st.booleans() for name in ("structured_output", "tokenize", "tools", "reasoning")}
)
content = st.fixed_dictionaries(
    {},
    optional={
        "max_request_bytes": st.sampled_from([10, 1_000]),
        "denied_fields": st.lists(st.sampled_from(["seed", "tools", "n"]), max_size=2),
        "roles": st.lists(st.sampled_from(ROLES), max_size=2),
    },
)
end_users = st.fixed_dictionaries(
    {},
    optional={
        "requests_per_minute": st.sampled_from([1, 60]),
        "output_tokens_per_minute": st.sampled_from([50, 5_000]),
        "concurrency": st.sampled_from([1, 4]),
    },
)
kv = st.fixed_dictionaries(
    {}, optional={"reservation": st.sampled_from(["0%", "10%", "20%"]), "cap": st.sampled_from(["20%", "50%"])}
)
tenant = st.fixed_dictionaries(
    {"models": st.lists(st.sampled_from(["*", "m", "m-*", "*large", "other"]), min_size=1, max_size=3)},
    optional={
        "limits": limits,
        "features": features,
        "content": content,
        "end_users": end_users,
        "kv": kv,
        "class": st.sampled_from(["shared", "strict", "dedicated"]),
        "retention": st.sampled_from(["standard", "none"]),
        "weight": st.sampled_from([1, 5]),
        "priority": st.sampled_from(["high", "normal", "low"]),
        "deterministic": st.sampled_from(["never", "allowed", "always"]),
        "kv_export": st.booleans(),
        "kv_fleet": st.booleans(),
        "freeze_idle": st.booleans(),
        "external": st.sampled_from(["by_class", "allow", "refuse"]),
        "regions": st.sampled_from([[], ["eu"], ["eu", "us-east"]]),
        "model_regions": st.sampled_from([[], [{"models": ["m-*"], "regions": ["eu"]}]]),
        "namespace": st.sampled_from(["tenant", "user"]),
    },
)


prices = st.lists(
    st.fixed_dictionaries(
        {"models": st.sampled_from([["*"], ["m"]]), "input": st.sampled_from([0, 1, 1000]), "output": st.just(2)},
        optional={"class": st.sampled_from(["shared", "strict"]), "cached_input": st.just(0.5)},
    ),
    min_size=1,
    max_size=3,
)
spend = st.fixed_dictionaries(
    {}, optional={"spend_per_day": st.sampled_from([0, 0.01, 5]), "spend_per_month": st.sampled_from([0.5, 100])}
)


routes = st.dictionaries(
    st.sampled_from(["fast", "m-fast", "other"]),
    st.fixed_dictionaries(
        {
            "to": st.lists(
                st.fixed_dictionaries(
                    {"model": st.sampled_from(["m", "m-large", "gone"])},
                    optional={"weight": st.sampled_from([1, 95, 1_000])},
                ),
                min_size=1,
                max_size=3,
                unique_by=lambda target: target["model"],
            )
        },
        optional={
            "choose": st.sampled_from(["weight", "cheapest"]),
            "fallback": st.lists(st.sampled_from(["m", "m-large", "gone"]), max_size=2, unique=True),
            "fall_back_when": st.sampled_from([["busy"], ["unready", "busy"], ["busy", "asleep"], ["asleep"]]),
        },
    ),
    max_size=2,
)


@st.composite
def _candidates(draw) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=3, unique=True))
    spare = draw(st.sampled_from(names))
    found = {}
    for name in names:
        keys = [f"key:{name}-1"] + (["key:spare"] if name == spare and draw(st.booleans()) else [])
        found[name] = {"credentials": keys, **draw(tenant)}
    document: dict[str, Any] = {"version": 1, "tenants": found}
    if len(names) > 1 and draw(st.booleans()):
        document["sharing_groups"] = {"lab": {"tenants": names[:2]}}
    if draw(st.booleans()):
        text = draw(st.sampled_from(["You are brief.", "You are kind."]))
        document["public_prefixes"] = {"style": {"model": "m", "tenants": "all", "text": text}}
    if draw(st.booleans()):
        document["prices"] = {"currency": draw(st.sampled_from(["EUR", "USD"])), "rules": draw(prices)}
        found[spare]["limits"] = {**found[spare].get("limits", {}), **draw(spend)}
    if draw(st.booleans()):
        document["routes"] = draw(routes)
    return document


def is_valid(document: dict[str, Any]) -> bool:
    """Return whether the loader takes it."""
    try:
        loaded(document)
    except PolicyError:
        return False
    return True


def loaded(document: dict[str, Any]) -> PolicySet:
    """Load one document."""
    return load_policy([Source("p.yaml", json.dumps(document))])


documents = _candidates().filter(is_valid)
"""Contents of valid policy files of one to three tenants, perhaps with a group, a public prefix and routes."""

questions = st.fixed_dictionaries(
    {"tenant": st.sampled_from([*TENANTS, "stranger"]), "model": st.sampled_from(MODELS)},
    optional={
        "input_tokens": st.integers(1, 5_000),
        "max_tokens": st.integers(0, 1_200),
        "choices": st.integers(1, 5),
        "feature": st.sampled_from(list(Feature)),
        "content": st.builds(
            Content,
            bytes=st.sampled_from([5, 50, 5_000]),
            fields=st.frozensets(st.sampled_from(["seed", "tools", "n", "stop"])),
            roles=st.frozensets(st.sampled_from(ROLES)),
        ),
        "draw": st.sampled_from([0.0, 0.5, 0.99]),
        "region": st.sampled_from(["", "eu", "asia"]),
    },
)
"""Keyword arguments of ``policy.simulate.Question``."""

loads = st.fixed_dictionaries(
    {},
    optional={
        "running": st.integers(0, 70),
        "requests_left": st.integers(-5, 1),
        "tokens_left": st.integers(-500, 100),
        "input_tokens_left": st.integers(-100, 100),
        "output_tokens_left": st.integers(-100, 100),
        "queued": st.integers(0, 2),
        "kv_tokens_held": st.sampled_from([0, 40, 450, 6_000]),
        "end_user_running": st.integers(0, 5),
        "end_user_requests_left": st.integers(-1, 1),
        "end_user_output_tokens_left": st.integers(-50, 50),
        "spent_today": st.sampled_from([0.0, 0.005, 4.5]),
        "spent_this_month": st.sampled_from([0.0, 0.4, 200.0]),
        "unready": st.sampled_from([(), ("m",), ("m", "m-large", "gone")]),
        "busy": st.sampled_from([(), ("m",), ("m-large",)]),
        "asleep": st.sampled_from([(), (), ("m",)]),
    },
)
"""Keyword arguments of ``policy.simulate.Load``."""
