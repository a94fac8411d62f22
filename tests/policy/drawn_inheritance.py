"""Policies with tenant groups and defaults drawn by hypothesis, and what they are written out for each tenant."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from policy.loader import Source
from tests.policy.drawn_policies import TENANTS, content, end_users, features, kv, limits, prices, spend

GROUPS = ("staff", "interns", "night", "guests")
FILES = ("10.yaml", "20.yaml", "30.yaml")

_models = st.lists(st.sampled_from(["*", "m", "m-*", "*large", "other"]), min_size=1, max_size=2)
_limits = st.builds(lambda one, two: one | two, limits, st.one_of(st.just({}), spend, st.just({"spend_per_day": None})))
_kv = st.builds(lambda one, two: one | two, kv, st.sampled_from([{}, {}, {}, {"borrow": True}, {"cap": None}]))
_settings: dict[str, st.SearchStrategy[Any]] = {
    "limits": _limits,
    "features": features,
    "content": content,
    "end_users": end_users,
    "kv": _kv,
    "class": st.sampled_from(["shared", "shared", "strict", "dedicated"]),
    "retention": st.sampled_from(["standard", "none"]),
    "weight": st.sampled_from([1, 5]),
    "priority": st.sampled_from(["high", "normal", "low"]),
    "deterministic": st.sampled_from(["never", "allowed", "always"]),
    "kv_export": st.booleans(),
    "kv_fleet": st.booleans(),
    "freeze_idle": st.booleans(),
    "external": st.sampled_from(["by_class", "allow", "refuse"]),
    "regions": st.sampled_from([[], ["eu"], ["us-east", "eu"]]),
    "model_regions": st.sampled_from([[], [{"models": ["m*"], "regions": ["eu"]}]]),
    "namespace": st.sampled_from(["tenant", "user"]),
}
_defaults = st.fixed_dictionaries({}, optional=_settings)
_layer = st.fixed_dictionaries({}, optional=_settings | {"models": _models})


@st.composite
def policies(draw) -> dict[str, Any]:
    """Draw the content of a policy of one to three tenants with up to four groups and perhaps defaults; it need not be
    valid as a whole: classes and shares may contradict each other."""
    names = draw(st.lists(st.sampled_from(GROUPS), max_size=4, unique=True))
    groups: dict[str, Any] = {}
    for place, name in enumerate(names):
        above = draw(st.sampled_from(["", *names[:place]]))
        groups[name] = draw(_layer) | ({"inherits": above} if above else {})
    tenants = {}
    for name in draw(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=3, unique=True)):
        own = draw(_layer) | {"credentials": [f"key:{name}-1"]}
        group = draw(st.sampled_from(["", *names]))
        if group:
            own["inherits"] = group
        elif "models" not in own:
            own["models"] = ["*"]
        tenants[name] = own
    document: dict[str, Any] = {"version": 1, "tenants": tenants, "tenant_groups": groups}
    if draw(st.booleans()):
        document["defaults"] = draw(_defaults)
    if draw(st.integers(0, 3)):
        document["prices"] = {"currency": "EUR", "rules": draw(prices)}
    if len(tenants) > 1 and draw(st.booleans()):
        document["sharing_groups"] = {"lab": {"tenants": list(tenants)[:2]}}
    if draw(st.booleans()):
        document["public_prefixes"] = {"style": {"model": "m", "tenants": "all", "text": "Be brief."}}
    return document


def expanded(document: dict[str, Any]) -> dict[str, Any]:
    """Return the policy with all that its tenants inherit written out, without groups and defaults."""
    groups, defaults = document["tenant_groups"], document.get("defaults", {})
    tenants = {}
    for name, own in document["tenants"].items():
        layers = [own]
        while above := layers[-1].get("inherits"):
            layers.append(groups[above])
        tenant: dict[str, Any] = {}
        for layer in (defaults, *reversed(layers)):
            for key, value in layer.items():
                tenant[key] = {**tenant.get(key, {}), **value} if isinstance(value, dict) else value
        tenants[name] = {key: value for key, value in tenant.items() if key != "inherits"}
    return {key: value for key, value in document.items() if key not in ("tenant_groups", "defaults")} | {
        "tenants": tenants
    }


@st.composite
def in_files(draw, document: dict[str, Any]) -> list[Source]:
    """Draw a way to write a policy in three files: each tenant, group and other section in one of them."""
    files: dict[str, dict[str, Any]] = {name: {"version": 1, "tenants": {}} for name in FILES}
    for section, written in document.items():
        if section in ("tenants", "tenant_groups"):
            for name, value in written.items():
                files[draw(st.sampled_from(FILES))].setdefault(section, {})[name] = value
        elif section != "version":
            files[draw(st.sampled_from(FILES))][section] = written
    return [Source(name, json.dumps(files[name])) for name in draw(st.permutations(FILES))]
