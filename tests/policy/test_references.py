"""policy.references: names in a policy that lead nowhere."""

from __future__ import annotations

from policy.loader import Source, load_policy
from policy.references import dangling, located

TEXT = """\
version: 1
tenants:
  alpha:
    credentials: ["key:a", "spiffe://athanor.local/tenant/alpha"]
    models: ["chat-*"]
public_prefixes:
  help: {model: chat-1, tenants: [alpha], text: hello}
"""


def test_everything_leads_somewhere() -> None:
    """Control: served models and keys in force give nothing to say; a client certificate is in no table."""
    assert dangling(load_policy([Source("p.yaml", TEXT)]), ["chat-1"], ["a"]) == []


def test_loose_ends_have_their_place() -> None:
    """A pattern without a model, a prefix of none, a key that is not there: each at its line; a key of nobody is told
    of the table, and not where the policy is only a part."""
    source = Source("p.yaml", TEXT)
    policy = load_policy([source])
    told = [str(one) for one in located(dangling(policy, ["other"], ["b"]), [source], "keys.json")]
    assert told == [
        "p.yaml:5:14: tenants.alpha.models[0]: no model is named 'chat-*'; served: other",
        "p.yaml:7:17: public_prefixes.help.model: no model is named 'chat-1'; served: other",
        "p.yaml:4:19: tenants.alpha.credentials[0]: no key in force has the id 'a'",
        "keys.json:0:0: key 'b' belongs to no tenant: calls with it are refused",
    ]
    assert len(dangling(policy, ["chat-1"], ["a", "b"], whole=False)) == 0
    assert dangling(policy, ["chat-1"], None) == []


def test_tokens_of_an_unknown_issuer() -> None:
    """A credential of an issuer that the configuration does not have is told at its line, with those that it has; one
    that it has (control) is not, nor any where the issuers are not known."""
    source = Source("p.yaml", TEXT.replace('"key:a"', '"key:a", "oidc:corp:team-a", "oidc:cort:team-a"'))
    policy = load_policy([source])
    assert [str(one) for one in located(dangling(policy, ["chat-1"], ["a"], issuers=["corp"]), [source], "k")] == [
        "p.yaml:4:48: tenants.alpha.credentials[2]: no issuer of tokens is named 'cort'; known: corp"
    ]
    without = dangling(policy, ["chat-1"], ["a"], issuers=[])
    assert len(without) == 2 and all("no section `tokens`" in one.message for one in without)
    assert dangling(policy, ["chat-1"], ["a"]) == []


ROUTES = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["fast", "slow"]}
routes:
  fast:
    to: [{model: chat-1}, {model: chat-9}]
    fallback: [chat-1, chat-8]
"""


def test_routes_that_lead_nowhere() -> None:
    """A target and a fallback that no model serves, each at its place; a pattern that matches an alias is not loose."""
    source = Source("p.yaml", ROUTES)
    policy = load_policy([source])
    assert [str(one) for one in located(dangling(policy, ["chat-1"], ["a"]), [source], "keys.json")] == [
        "p.yaml:3:52: tenants.alpha.models[1]: no model is named 'slow'; served: chat-1",
        "p.yaml:6:35: routes.fast.to[1].model: no model is named 'chat-9'; served: chat-1",
        "p.yaml:7:24: routes.fast.fallback[1]: no model is named 'chat-8'; served: chat-1",
    ]
    assert dangling(policy, ["chat-1", "chat-8", "chat-9", "slow"], ["a"]) == []


def test_a_name_that_is_a_route_and_a_model() -> None:
    """The model of that name is served for nothing: it is told, at the route."""
    source = Source("p.yaml", ROUTES)
    found = dangling(load_policy([source]), ["chat-1", "chat-8", "chat-9", "slow", "fast"], ["a"])
    assert [str(one) for one in located(found, [source], "keys.json")] == [
        "p.yaml:6:5: routes.fast: a model of this name is served too: requests for it go where the route leads, and "
        "none to it"
    ]
