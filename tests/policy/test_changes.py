"""policy.changes: what changes for whom, in words; nothing is left out and nothing is told without cause."""

from __future__ import annotations

import copy
import typing
from dataclasses import fields, is_dataclass

import pytest

from policy import changes as module
from policy.change_wording import IDENTITIES, WORDINGS
from policy.changes import DERIVED, PRICED, SECTIONS, changes
from policy.model import (
    Features,
    KvShare,
    Limits,
    PolicySet,
    Price,
    PriceRule,
    PublicPrefix,
    Route,
    SharingGroup,
    Target,
    Tenant,
)
from policy.told import Direction, listed
from tests.policy.drawn_policies import loaded

ALLOWED = "may use models outside of the appliance, where nothing that its class promises holds"

W, N, X = Direction.WIDER, Direction.NARROWER, Direction.OTHER

BASE = {
    "version": 1,
    "tenants": {
        "alpha": {"credentials": ["key:alpha-1", "key:alpha-2"], "models": ["athanor-mini", "qwen3-*"]},
        "beta": {"credentials": ["key:beta-1"], "models": ["*"]},
    },
}

STRICT = {"class": "strict", "kv": {"reservation": "10%"}}


def edited(**values) -> dict:
    """BASE with other values of alpha."""
    document = copy.deepcopy(BASE)
    document["tenants"]["alpha"] |= values
    return document


def told(old: dict, new: dict) -> list[tuple[Direction, str, str]]:
    """Direction, sentence and path of each change."""
    return [(one.direction, one.sentence, one.path) for one in changes(loaded(old), loaded(new))]


def types_below(value_type: type) -> set[type]:
    """A class of values and every such class among its fields."""
    found = {value_type}
    for hint in typing.get_type_hints(value_type).values():
        for one in (hint, *typing.get_args(hint)):
            if is_dataclass(one) and one not in found:
                found |= types_below(one)
    return found


def test_every_field_has_a_wording() -> None:
    """A field that is added to a policy's values is noticed here until its change has words; every section of the
    policy is compared. Control: the classes that are known to be there are found."""
    assert set(SECTIONS) | DERIVED | set(PRICED) == {field.name for field in fields(PolicySet)}
    sections = types_below(PolicySet) - {PolicySet}
    assert sections >= {Tenant, Limits, Features, KvShare, SharingGroup, PublicPrefix, PriceRule, Price, Route, Target}
    for one in sections:
        hints = typing.get_type_hints(one)
        told = {field.name for field in fields(one)} - {name for name, hint in hints.items() if is_dataclass(hint)}
        assert told - IDENTITIES.get(one, frozenset()) == set(WORDINGS[one]), one.__name__


LIMITS = "tenants.alpha.limits"

SINGLE = [
    (
        {"limits": {"requests_per_minute": 100}},
        N,
        "may send 100 requests a minute instead of 600",
        "limits.requests_per_minute",
    ),
    (
        {"limits": {"requests_per_minute": 601}},
        W,
        "may send 601 requests a minute instead of 600",
        "limits.requests_per_minute",
    ),
    (
        {"limits": {"tokens_per_minute": 1}},
        N,
        "may use 1 token a minute instead of 200,000",
        "limits.tokens_per_minute",
    ),
    ({"limits": {"concurrency": 65}}, W, "may have 65 requests running at once instead of 64", "limits.concurrency"),
    (
        {"limits": {"max_context_tokens": 2_048}},
        N,
        "may use 2,048 tokens a request, prompt and output together, instead of 4,096",
        "limits.max_context_tokens",
    ),
    (
        {"limits": {"max_output_tokens": 9}},
        N,
        "may ask for 9 output tokens a request instead of 1,024",
        "limits.max_output_tokens",
    ),
    (
        {"limits": {"requests_per_minute": {"rate": 600, "burst": 1_200}}},
        W,
        "may send 1,200 requests at once instead of 600",
        "limits.requests_per_minute.burst",
    ),
    (
        {"limits": {"tokens_per_minute": {"rate": 200_000, "burst": 10}}},
        N,
        "may use 10 tokens at once instead of 200,000",
        "limits.tokens_per_minute.burst",
    ),
    (
        {"limits": {"input_tokens_per_minute": 1_000}},
        N,
        "may use 1,000 input tokens a minute instead of any number",
        "limits.input_tokens_per_minute",
    ),
    (
        {"limits": {"output_tokens_per_minute": 1}},
        N,
        "may use 1 output token a minute instead of any number",
        "limits.output_tokens_per_minute",
    ),
    (
        {"limits": {"requests_per_minute": {"rate": 600, "exceeded": "queue"}}},
        W,
        "waits beyond its rate of requests instead of being refused",
        "limits.requests_per_minute.exceeded",
    ),
    (
        {"limits": {"concurrency": {"at_once": 64, "exceeded": "downgrade"}}},
        W,
        "is served with low priority beyond its requests at once instead of being refused",
        "limits.concurrency.exceeded",
    ),
    (
        {"limits": {"kv_tokens": 9_000}},
        N,
        "may need KV of 9,000 tokens at once instead of any number",
        "limits.kv_tokens",
    ),
    (
        {"limits": {"max_queued_requests": 1}},
        N,
        "may have 1 request waiting at once instead of 64",
        "limits.max_queued_requests",
    ),
    ({"limits": {"max_queue_s": 60}}, W, "may have a request wait 60 seconds instead of 30", "limits.max_queue_s"),
    ({"features": {"tools": False}}, N, "may no longer use tools", "features.tools"),
    ({"features": {"tokenize": False}}, N, "may no longer use the tokenizer alone", "features.tokenize"),
    ({"features": {"embeddings": False}}, N, "may no longer have texts embedded", "features.embeddings"),
    ({"features": {"rerank": False}}, N, "may no longer rerank and classify", "features.rerank"),
    ({"features": {"wake": False}}, N, "may no longer wake models", "features.wake"),
    (
        {"features": {"structured_output": False}},
        N,
        "may no longer use structured output",
        "features.structured_output",
    ),
    ({"features": {"reasoning": False}}, N, "is no longer shown the model's reasoning", "features.reasoning"),
    (
        {"content": {"max_request_bytes": 1_000}},
        N,
        "may send 1,000 bytes of content a request instead of any number",
        "content.max_request_bytes",
    ),
    ({"content": {"denied_fields": ["seed"]}}, N, "may no longer use the field seed", "content.denied_fields"),
    (
        {"content": {"denied_fields": ["seed", "n"]}},
        N,
        "may no longer use the fields n and seed",
        "content.denied_fields",
    ),
    (
        {"content": {"roles": ["user", "assistant"]}},
        N,
        "sends messages of role assistant and user alone, where it was any",
        "content.roles",
    ),
    (
        {"end_users": {"requests_per_minute": 5}},
        N,
        "may send 5 requests a minute for one end user instead of any number",
        "end_users.requests_per_minute",
    ),
    (
        {"end_users": {"output_tokens_per_minute": 500}},
        N,
        "may use 500 output tokens a minute for one end user instead of any number",
        "end_users.output_tokens_per_minute",
    ),
    (
        {"end_users": {"concurrency": 1}},
        N,
        "may have 1 request of one end user running at once instead of any number",
        "end_users.concurrency",
    ),
    ({"retention": "none"}, N, "has retention none instead of standard: nothing is kept for it", "retention"),
    (
        {"namespace": "user"},
        N,
        "has namespace user instead of tenant: its cached prefixes are found by each end user's own requests",
        "namespace",
    ),
    ({"regions": ["eu"]}, N, "is served in eu alone, where it was any region", "regions"),
    (
        {"model_regions": [{"models": ["qwen3-*"], "regions": ["eu", "us"]}]},
        N,
        "has models named qwen3-* served in eu and us alone",
        "model_regions",
    ),
    ({"weight": 3}, W, "has a weight of 3 parts in fair service instead of 1", "weight"),
    ({"priority": "high"}, W, "is served with high priority instead of normal", "priority"),
    ({"priority": "low"}, N, "is served with low priority instead of normal", "priority"),
    ({"deterministic": "allowed"}, W, "may ask for deterministic results, instead of never", "deterministic"),
    ({"external": "allow"}, W, f"{ALLOWED}, instead of by_class", "external"),
    ({"external": "refuse"}, N, "may use no model outside of the appliance, instead of by_class", "external"),
    ({"kv_export": True}, W, "may have sealed KV leave the machine", "kv_export"),
    ({"kv_fleet": True}, W, "may have its KV used by the whole fleet", "kv_fleet"),
    ({"freeze_idle": True}, W, "may have its idle sandboxes frozen", "freeze_idle"),
    ({"class": "dedicated"}, N, "has class dedicated instead of shared", "class"),
    ({"kv": {"reservation": "12.5%"}}, W, "has 12.5% of the KV pool reserved instead of 0%", "kv.reservation"),
    ({"kv": {"cap": "50%"}}, N, "may fill 50% of the KV pool instead of 100%", "kv.cap"),
    ({"credentials": ["key:alpha-1", "key:alpha-2", "key:new"]}, W, "is called with key:new", "credentials"),
    ({"credentials": ["key:alpha-1"]}, N, "loses key:alpha-2: calls with it are refused", "credentials"),
    ({"models": ["athanor-mini"]}, N, "may no longer use models named qwen3-*", "models"),
    ({"models": ["qwen3-*"]}, N, "may no longer use model athanor-mini", "models"),
    ({"models": ["athanor-mini", "qwen3-*", "*"]}, W, "may use every model", "models"),
    ({"models": ["athanor-mini", "qwen3-*", "qwen3-8b"]}, X, "lists qwen3-8b, which qwen3-* allowed already", "models"),
    (
        {"models": ["athanor-mini", "qwen3-*", "qwen3-*"]},
        X,
        "lists a model another number of times, without effect",
        "models",
    ),
]


@pytest.mark.parametrize(("values", "direction", "predicate", "path"), SINGLE, ids=lambda one: str(one)[:40])
def test_one_change(values: dict, direction: Direction, predicate: str, path: str) -> None:
    """One edited value is one sentence with its direction and the path of its rule; undoing it is told the other way
    round, and nothing is told of the unchanged policy."""
    assert told(BASE, edited(**values)) == [(direction, f"alpha {predicate}", f"tenants.alpha.{path}")]
    (back,) = told(edited(**values), BASE)
    assert back[0] == {W: N, N: W, X: X}[direction]
    assert back[2] == f"tenants.alpha.{path}"
    assert told(BASE, BASE) == []


def test_class_strict_brings_what_it_means() -> None:
    """Strict is a partition with deterministic results: all of it is told, by the values in force."""
    sentences = [sentence for _, sentence, _ in told(BASE, edited(**STRICT))]
    assert sentences == [
        "alpha has class strict instead of shared",
        "alpha always gets deterministic results, instead of never",
        "alpha has 10% of the KV pool reserved instead of 0%",
        "alpha may fill 10% of the KV pool instead of 100%",
        "alpha neither borrows nor lends KV memory",
    ]
    dedicated = edited(**{"class": "dedicated"})
    assert told(dedicated, edited(**STRICT))[0][:2] == (X, "alpha has class strict instead of dedicated")


def test_a_credential_that_moves() -> None:
    """Both sides of a move are told, and a tenant that goes says what becomes of each of its credentials."""
    document = edited(credentials=["key:alpha-1"])
    document["tenants"]["beta"]["credentials"].append("key:alpha-2")
    assert told(BASE, document) == [
        (N, "alpha loses key:alpha-2: it belongs to beta", "tenants.alpha.credentials"),
        (W, "beta takes over key:alpha-2 from alpha", "tenants.beta.credentials"),
    ]
    del document["tenants"]["alpha"]
    assert told(BASE, document) == [
        (N, "alpha is gone: calls with key:alpha-1 are refused; key:alpha-2 belongs to beta", "tenants.alpha"),
        (W, "beta takes over key:alpha-2 from alpha", "tenants.beta.credentials"),
    ]


def test_new_and_gone() -> None:
    """Tenants, sharing groups and public prefixes that come and go are told as such."""
    document = edited()
    document["sharing_groups"] = {"lab": {"tenants": ["alpha", "beta"]}}
    document["public_prefixes"] = {"style": {"model": "athanor-mini", "tenants": ["alpha"], "text": "Be brief."}}
    document["tenants"]["gamma"] = {"credentials": ["key:g-1"], "models": ["*"], "limits": {"requests_per_minute": 1}}
    summary = "models *; 1 request and 200,000 tokens a minute; class shared; called with key:g-1"
    assert told(BASE, document) == [
        (W, "alpha shares cached prefixes in group lab, with 1 other tenant", "sharing_groups.lab.tenants"),
        (W, "alpha may begin with public prefix style", "public_prefixes.style.tenants"),
        (W, "beta shares cached prefixes in group lab, with 1 other tenant", "sharing_groups.lab.tenants"),
        (W, f"gamma is new: {summary}", "tenants.gamma"),
        (W, "sharing group lab is new: alpha and beta", "sharing_groups.lab"),
        (W, "public prefix style is new: a text of 9 bytes for model athanor-mini", "public_prefixes.style"),
    ]
    gone = [sentence for _, sentence, _ in told(document, BASE)]
    assert gone[-2:] == ["sharing group lab is gone", "public prefix style is gone"]
    assert "gamma is gone: calls with key:g-1 are refused" in gone


def test_groups_and_prefixes_that_stay() -> None:
    """Members, content, model and kind of what is on both sides."""
    old = edited()
    old["tenants"] |= {"gamma": {"credentials": ["key:g-1"], "models": ["*"]}}
    old["sharing_groups"] = {"lab": {"tenants": ["alpha", "beta"]}}
    old["public_prefixes"] = {"style": {"model": "athanor-mini", "tenants": ["beta"], "text": "Be brief."}}
    new = copy.deepcopy(old)
    new["sharing_groups"]["lab"] = {"tenants": ["beta", "gamma"], "kv": {"cap": "50%"}}
    new["public_prefixes"]["style"] = {
        "model": "qwen3-8b",
        "tenants": ["beta"],
        "messages": [{"role": "system", "content": "Be kind."}],
    }
    assert told(old, new)[2:] == [
        (W, "sharing group lab has 1 more member: gamma", "sharing_groups.lab.tenants"),
        (N, "sharing group lab has 1 member less: alpha", "sharing_groups.lab.tenants"),
        (N, "sharing group lab may fill 50% of the KV pool instead of 100%", "sharing_groups.lab.kv.cap"),
        (X, "public prefix style is for model qwen3-8b instead of athanor-mini", "public_prefixes.style.model"),
        (X, "public prefix style is a conversation instead of a text", "public_prefixes.style.chat"),
        (X, "public prefix style has other content: 40 bytes instead of 9", "public_prefixes.style.source"),
    ]


ROUTE = {
    "to": [{"model": "athanor-mini", "weight": 95}, {"model": "athanor-next", "weight": 5}],
    "fallback": ["backup"],
}


def test_routes_that_come_and_go() -> None:
    """A route is told with where it leads; of one that is gone, what becomes of its requests."""
    cheap = {"to": [{"model": "small"}, {"model": "big"}], "choose": "cheapest"}
    document = BASE | {"prices": PRICES, "routes": {"fast": ROUTE, "cheap": cheap, "one": {"to": [{"model": "m"}]}}}
    before = BASE | {"prices": PRICES}
    assert told(before, document) == [
        (W, "route cheap is new: requests for it go to the cheapest of small, big", "routes.cheap"),
        (
            W,
            "route fast is new: requests for it go to athanor-mini 95%, athanor-next 5%; when unready to backup",
            "routes.fast",
        ),
        (W, "route one is new: requests for it go to m", "routes.one"),
    ]
    assert told(document, before)[1] == (
        N,
        "route fast is gone: requests for it are refused, unless a model of this name is served",
        "routes.fast",
    )


def test_routes_that_lead_elsewhere() -> None:
    """Shares are told as percentages, all together; a target more is wider, one less is narrower, since the alias is
    what grants it."""

    def route(**values) -> dict:
        return BASE | {"prices": PRICES, "routes": {"fast": ROUTE | values}}

    old = route()
    mini, following = ROUTE["to"]
    both = "athanor-mini 95%, athanor-next 5%"
    cases = [
        ([mini], N, f"sends requests to athanor-mini instead of {both}"),
        (
            [mini, {**following, "weight": 10}],
            X,
            f"sends requests to athanor-mini 90.48%, athanor-next 9.524% instead of {both}",
        ),
        (
            [mini, following, {"model": "third", "weight": 100}],
            W,
            f"sends requests to athanor-mini 47.5%, athanor-next 2.5%, third 50% instead of {both}",
        ),
        ([mini, {"model": "third", "weight": 5}], X, f"sends requests to athanor-mini 95%, third 5% instead of {both}"),
    ]
    for targets, direction, text in cases:
        assert told(old, route(to=targets)) == [(direction, f"route fast {text}", "routes.fast.to")]
    assert told(old, route(fallback=["backup", "last"], fall_back_when=["unready", "busy"])) == [
        (W, "route fast falls back to backup and last instead of backup", "routes.fast.fallback"),
        (X, "route fast falls back when a model is unready or busy, instead of unready", "routes.fast.fall_back_when"),
    ]
    assert told(old, route(fallback=[])) == [
        (N, "route fast falls back to nothing instead of backup", "routes.fast.fallback")
    ]
    plain = [{"model": "athanor-mini"}, {"model": "athanor-next"}]
    assert told(route(to=plain), route(to=plain, choose="cheapest")) == [
        (X, "route fast chooses by price, the cheapest first, instead of by weight", "routes.fast.choose")
    ]


PRICES = {
    "currency": "EUR",
    "rules": [
        {"models": ["big-*"], "class": "dedicated", "input": 20, "output": 60},
        {"models": ["*"], "input": 2, "cached_input": 0.2, "output": 6},
    ],
}


def test_prices_and_limits_of_spend() -> None:
    """Prices that come, go, rise, fall or change places, and limits of spend, with and without one before."""
    old = edited(limits={"spend_per_day": 20}) | {"prices": PRICES}
    assert told(BASE, old) == [
        (N, "alpha may spend 20.00 EUR a day instead of any amount", "tenants.alpha.limits.spend_per_day"),
        (X, "prices are new, in EUR", "prices.currency"),
        (
            X,
            "price of big-* for class dedicated is new: 20.00 EUR for a million prompt tokens, 20.00 cached, 60.00 for "
            "output",
            "prices.rules[0]",
        ),
        (X, "price of * is new: 2.00 EUR for a million prompt tokens, 0.20 cached, 6.00 for output", "prices.rules[1]"),
    ]
    new = copy.deepcopy(old)
    new["tenants"]["alpha"]["limits"] = {"spend_per_day": 25.5, "spend_per_month": 300}
    new["prices"]["rules"].reverse()
    new["prices"]["rules"][0] |= {"input": 1.5, "output": 6.001}
    assert told(old, new) == [
        (W, "alpha may spend 25.50 EUR a day instead of 20.00", "tenants.alpha.limits.spend_per_day"),
        (N, "alpha may spend 300.00 EUR a month instead of any amount", "tenants.alpha.limits.spend_per_month"),
        (W, "price of * is 1.50 EUR for a million prompt tokens instead of 2.00", "prices.rules[0].input"),
        (N, "price of * is 6.001 EUR for a million output tokens instead of 6.00", "prices.rules[0].output"),
        (X, "prices are tried in another order; the first that matches decides", "prices.rules"),
    ]
    back = told(new, BASE)
    assert (
        W,
        "alpha may spend without a limit in a month instead of 300.00 EUR",
        "tenants.alpha.limits.spend_per_month",
    ) in back
    assert [sentence for _, sentence, _ in back][2:] == [
        "prices are gone",
        "price of * is gone",
        "price of big-* for class dedicated is gone",
    ]
    dollars = {**old, "prices": {**PRICES, "currency": "USD"}}
    assert told(old, dollars) == [(X, "prices are in USD instead of EUR", "prices.currency")]


def test_a_field_without_words_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody worded is told by name and values."""
    few = {name: wording for name, wording in WORDINGS[Tenant].items() if name != "weight"}
    monkeypatch.setattr(module, "WORDINGS", {**WORDINGS, Tenant: few})
    assert told(BASE, edited(weight=7)) == [(X, "alpha has weight 7 instead of 1", "tenants.alpha.weight")]


def test_values_for_programs() -> None:
    """Old and new are given for one number, text or truth value, never for lists or a prefix's text."""
    (change,) = changes(loaded(BASE), loaded(edited(limits={"concurrency": 3})))
    assert (change.old, change.new) == (64, 3)
    (change,) = changes(loaded(BASE), loaded(edited(retention="none")))
    assert (change.old, change.new) == ("standard", "none")
    (change,) = changes(loaded(BASE), loaded(edited(models=["athanor-mini"])))
    assert (change.old, change.new) == (None, None)


def test_long_lists_are_counted() -> None:
    """A sentence names a few and counts the rest."""
    assert listed(()) == ""
    assert listed(("a",)) == "a"
    assert listed(("a", "b", "c", "d")) == "a, b, c and d"
    assert listed(tuple("abcdefg")) == "a, b, c and 4 more"
