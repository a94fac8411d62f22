"""A shadow policy: it decides on every request and changes nothing; its differences are counted."""

from __future__ import annotations

import pytest

from appliance.common.errors import ApplianceError, DeadlineExceededError
from appliance.gateway.generate_request import Principal
from appliance.gateway.request import shadow as module
from appliance.gateway.request.ledger import Ledger, first_access
from appliance.gateway.request.shadow import Shadow, Verdict
from appliance.gateway.request.spend import Spends
from policy.loader import Source, load_policy
from policy.model import PolicySet

REAL = """
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["small"], limits: {requests_per_minute: 100, max_output_tokens: 500}}
  beta: {credentials: ["key:b"], models: ["small", "big"]}
"""


def policy(text: str) -> PolicySet:
    """The policy of a text."""
    return load_policy((Source("policy.yaml", text),))


class Both:
    """The policy in force and a shadow, with the verdicts that the metrics were told."""

    def __init__(self, shadow: str) -> None:
        self.ledger = Ledger(policy(REAL), {"alpha": b"", "beta": b""})
        self.told: list[Verdict] = []
        self.shadow = Shadow(policy(shadow), Spends(), self.told.append)

    def ask(self, tenant: str = "alpha", model: str = "small", tokens: int = 100, alias: str = "") -> str:
        """Run one request under both, and give how the shadow differs."""
        access = first_access(tenant, model, tokens, 1, None, alias)
        one = self.shadow.request(Principal(tenant, f"key:{tenant[0]}"), "192.0.2.7")
        try:
            with one.admission(access):
                real = self.ledger.admit(tenant, model, tokens, 1)
            with one.reserving(10, tokens, 4_000, None):
                real.reserve(10, tokens, 4_000)
            real.settle(10, tokens)
        except ApplianceError:
            pass
        return one.end(10, tokens)

    def rows(self) -> list[tuple[str, str, str, int]]:
        """The differences."""
        return [(row.tenant, row.verdict, row.rule, row.requests) for row in self.shadow.status("f").rows]


def test_an_equal_policy_agrees_on_everything() -> None:
    """Served and refused requests alike: no row, and each request counted once."""
    both = Both(REAL)
    assert [both.ask(), both.ask(model="big"), both.ask(tokens=501)] == ["", "", ""]
    assert both.told == [Verdict.AGREES] * 3
    status = both.shadow.status("policy.shadow.yaml")
    assert (status.rows, status.verdicts["agrees"], status.file) == ((), 3, "policy.shadow.yaml")


def test_what_it_would_refuse_is_told_with_its_rule_and_served_all_the_same() -> None:
    """A model, a number of tokens, a credential, a network: each by the shadow's rule. Of the real account nothing is
    missing, and the real decision stands."""
    both = Both(
        REAL.replace("max_output_tokens: 500", "max_output_tokens: 50").replace('["small", "big"]', '["small"]')
    )
    assert both.ask() == "refuses tenants.alpha.limits.max_output_tokens"
    assert both.ask("beta", "big") == "refuses tenants.beta.models"
    assert both.ask("beta") == ""
    assert (both.ledger.concurrency("alpha"), both.shadow.ledger.concurrency("beta")) == (0, 0)
    nobody = Both(REAL.replace("key:a", "key:z"))
    assert nobody.ask() == "refuses credentials"
    elsewhere = Both(REAL.replace('models: ["small"],', 'models: ["small"], networks: ["198.51.100.0/24"],'))
    assert elsewhere.ask() == "refuses tenants.alpha.networks"
    assert elsewhere.ask("beta") == ""


def test_its_rates_are_its_own() -> None:
    """Of five requests a rate of three lets three pass, whatever the real one holds; what it refused it does not
    charge."""
    both = Both(REAL.replace("requests_per_minute: 100", "requests_per_minute: 3"))
    assert [both.ask() for _ in range(5)] == ["", "", "", *["refuses tenants.alpha.limits.requests_per_minute"] * 2]
    assert both.rows() == [("alpha", "refuses", "tenants.alpha.limits.requests_per_minute", 2)]


def test_what_it_would_serve_is_told() -> None:
    """A refused model and a refused length, each allowed by the shadow; a refusal by both agrees (control)."""
    both = Both(REAL.replace('models: ["small"]', 'models: ["*"]').replace("tokens: 500", "tokens: 600"))
    assert [both.ask(model="big"), both.ask(tokens=600), both.ask(tokens=700)] == ["serves", "serves", ""]


def test_a_wait_and_another_model_are_told() -> None:
    """A rate that would have the request wait, and a route that leads elsewhere."""
    waits = Both(REAL.replace("requests_per_minute: 100", "requests_per_minute: {rate: 60, burst: 1, exceeded: queue}"))
    assert [waits.ask(), waits.ask()] == ["", "waits tenants.alpha.limits.requests_per_minute"]
    routed = Both(REAL.replace('["small"]', '["small", "fast"]') + "routes: {fast: {to: [{model: big}]}}\n")
    access = first_access("alpha", "small", 10, 1, None, "fast")
    one = routed.shadow.request(Principal("alpha", "key:a"), "")
    with one.admission(access):
        pass
    assert one.end(0, 0) == "other_model routes.fast"


def test_what_no_rule_refused_is_not_counted() -> None:
    """A deadline, and a client that left before the first decision: neither policy said anything."""
    both = Both(REAL)
    one = both.shadow.request(Principal("alpha", "key:a"), "")
    with pytest.raises(DeadlineExceededError), one.admission(first_access("alpha", "small", 10, 1, None)):
        raise DeadlineExceededError("too late")
    assert one.end(0, 0) == ""
    assert both.shadow.request(Principal("alpha", "key:a"), "").end(0, 0) == ""
    assert both.told == []


def test_rows_are_bounded_and_sums_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a new row is not kept, a known one goes on, and the sums have all."""
    monkeypatch.setattr(module, "MAX_ROWS", 1)
    both = Both(REAL)
    for tenant in ("alpha", "beta", "alpha"):
        both.shadow.add(tenant, Verdict.REFUSES, "rule")
    assert both.rows() == [("alpha", "refuses", "rule", 2)]
    assert both.shadow.status("f").verdicts["refuses"] == 3
