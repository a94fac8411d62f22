"""End users of a tenant: who is named over each API, what each may use, and how much of it is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from appliance.common.errors import ApplianceError, InvalidRequestError, RateLimitedError
from appliance.gateway.front.end_user import MAX_END_USER_CHARS, end_user
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Operation
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.message_mapping import to_embed_request, to_request
from appliance.gateway.http import openai, openai_embeddings
from appliance.gateway.http.messages_request import parse_message
from appliance.gateway.http.responses_request import parse_response
from appliance.gateway.request.end_users import OTHERS, EndUsers
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from appliance.gateway.request.session import Session
from policy.decision import Decision
from policy.loader import Source, load_policy
from policy.model import PolicySet
from tests.appliance.gateway.request.test_session import Stage, collect

STAMP = Stamp("r", seed=1)
CHAT = [{"role": "user", "content": "hi"}]


class Clock:
    """A clock that stands until it is set."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def policy(rules: str, others: str = "") -> PolicySet:
    """A policy of one tenant with these limits of end users."""
    text = "version: 1\ntenants: {a: {credentials: ['key:a'], models: ['*'], end_users: {%s}%s}}\n"
    return load_policy([Source("p.yaml", text % (rules, others))])


def ledger(rules: str, clock: Clock | None = None) -> Ledger:
    """Accounts of that tenant."""
    return Ledger(policy(rules), {"a": b"k" * 32}, clock or Clock())


def admit(of: Ledger, name: str, choices: int = 1) -> Reservation:
    """Admit a request for an end user."""
    found = of.try_admit(replace(first_access("a", "m", 10, choices, None), end_user=name))
    assert not isinstance(found, Decision)
    return found


def refused(of: Ledger, name: str) -> ApplianceError:
    """The error of a request that is not admitted."""
    with pytest.raises(ApplianceError) as error:
        admit(of, name)
    return error.value


def document(**fields: Any) -> bytes:
    """A body."""
    return json.dumps({"model": "m", **fields}).encode()


NAMED = {
    "user": lambda name: openai.parse(Operation.CHAT, document(messages=CHAT, user=name), STAMP).request,
    "safety_identifier": lambda name: (
        openai.parse(
            Operation.TEXT_COMPLETION, document(prompt="x", safety_identifier=name, user="other"), STAMP
        ).request
    ),
    "metadata.user_id": lambda name: (
        parse_message(document(messages=CHAT, max_tokens=1, metadata={"user_id": name}), STAMP).request
    ),
    "responses": lambda name: parse_response(document(input="x", safety_identifier=name), STAMP).request,
    "vectors": lambda name: openai_embeddings.parse(document(input="x", user=name), STAMP).request,
    "grpc": lambda name: to_request(pb.GenerateRequest(model="m", text="x", end_user=name), STAMP),
    "grpc vectors": lambda name: to_embed_request(
        pb.EmbedRequest(model="m", inputs=[pb.EmbedInput(text="x")], end_user=name), STAMP
    ),
}


@pytest.mark.parametrize("api", NAMED)
def test_each_api_names_the_end_user(api: str) -> None:
    """One name is one pseudonym over every API, another one another; the name itself is not kept; one that is too long
    is an error at its field. Control: without a name there is none."""
    request = NAMED[api]("ann")
    assert request.end_user == end_user("ann", "user") != end_user("bob", "user")
    assert "ann" not in repr(request)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_END_USER_CHARS} characters") as error:
        NAMED[api]("x" * (MAX_END_USER_CHARS + 1))
    assert error.value.param in (api, "safety_identifier", "user", "end_user")
    assert NAMED[api]("").end_user in ("", end_user("other", "user"))


def test_each_end_user_has_its_own_requests() -> None:
    """One that has used its rate is refused with the time to wait, by the rule's name; another one is served; requests
    without a name are one end user's; after the wait the first is served again."""
    clock = Clock()
    accounts = ledger("requests_per_minute: 2", clock)
    for name in ("ann", "ann", "bob", "", ""):
        admit(accounts, name).settle(0, 0)
    for name in ("ann", ""):
        error = refused(accounts, name)
        assert (error.rule, error.retry_after_s) == ("tenants.a.end_users.requests_per_minute", 30.0)
        assert isinstance(error, RateLimitedError)
    admit(accounts, "bob")
    clock.now += 30
    admit(accounts, "ann")


def test_each_end_user_has_its_own_requests_at_once() -> None:
    """Choices count each, a request that ends makes room, and one that is settled twice does so once."""
    accounts = ledger("concurrency: 2")
    first = admit(accounts, "ann", choices=2)
    assert refused(accounts, "ann").rule == "tenants.a.end_users.concurrency"
    admit(accounts, "bob")
    first.settle(0, 0)
    first.settle(0, 0)
    admit(accounts, "ann")
    admit(accounts, "ann")
    assert refused(accounts, "ann").rule == "tenants.a.end_users.concurrency"


def test_output_is_reserved_and_settled() -> None:
    """What a request may use is taken, what it did not use comes back, and what is not there is refused."""
    accounts = ledger("output_tokens_per_minute: 100")
    one, two = admit(accounts, "ann"), admit(accounts, "ann")
    one.reserve(5, 80, 1_000)
    with pytest.raises(RateLimitedError) as error:
        two.reserve(5, 30, 1_000)
    assert (error.value.rule, error.value.retry_after_s) == ("tenants.a.end_users.output_tokens_per_minute", 6.0)
    admit(accounts, "bob").reserve(5, 100, 1_000)
    one.settle(5, 20)
    two.reserve(5, 80, 1_000)


def test_a_refused_request_takes_nothing() -> None:
    """A request that the tenant's own limit refuses costs its end user none of its rate."""
    accounts = Ledger(
        policy("requests_per_minute: 1", ", limits: {concurrency: 1}"), {"a": b"k" * 32}, clock := Clock()
    )
    running = admit(accounts, "bob")
    assert refused(accounts, "ann").rule == "tenants.a.limits.concurrency"
    running.settle(0, 0)
    admit(accounts, "ann")
    assert clock.now == Clock.now


def test_a_reload_lifts_and_narrows() -> None:
    """Limits that go let everybody pass, a running request settles with the account that it had, and narrower ones hold
    at once for those who have used more."""
    accounts = ledger("concurrency: 1")
    running = admit(accounts, "ann")
    accounts.replace(policy(""), {"a": b"k" * 32})
    admit(accounts, "ann").settle(0, 0)
    running.settle(0, 0)
    accounts.replace(policy("requests_per_minute: 10"), {"a": b"k" * 32})
    for _ in range(5):
        admit(accounts, "ann")
    accounts.replace(policy("requests_per_minute: 2"), {"a": b"k" * 32})
    admit(accounts, "ann")
    admit(accounts, "ann")
    assert refused(accounts, "ann").rule == "tenants.a.end_users.requests_per_minute"


def test_invented_names_neither_grow_the_table_nor_lift_a_limit() -> None:
    """Ten thousand names of one tenant: as many accounts as it may have and one that the others share, each of which
    gives its limit and no more. Names that rested make place, and then have accounts of their own again."""
    tenant = policy("requests_per_minute: 1").tenants["a"]
    users, now = EndUsers(of_tenant=100, of_all=1_000), 0.0
    served = 0
    for number in range(10_000):
        account = users.find(tenant, f"n{number}", now)
        assert account is not None
        if account.requests is None or account.requests.level >= 1:
            account.take_request(1, now)
            account.settle(0, 0, 1, now)
            served += 1
    assert (served, len(users)) == (101, 101)
    shared = users.find(tenant, OTHERS, now)
    assert users.find(tenant, "another", now) is shared
    own = users.find(tenant, "another", now + 61)
    assert own is not shared
    assert len(users) <= 101


def test_a_running_request_keeps_its_account() -> None:
    """An account with a request that runs makes no place, so what it holds is never forgotten."""
    tenant = policy("concurrency: 1").tenants["a"]
    users = EndUsers(of_tenant=2, of_all=10)
    held = [users.find(tenant, name, 0.0) for name in ("ann", "bob")]
    for account in held:
        assert account is not None
        account.take_request(1, 0.0)
    users.find(tenant, "eve", 1e9)
    assert [users.find(tenant, name, 1e9) for name in ("ann", "bob")] == held


def test_all_tenants_together_are_bounded() -> None:
    """A second tenant finds no room where the first took all, and its end users share one account, with their limit;
    tenants that have no limits for end users have no accounts."""
    text = "version: 1\ntenants:\n" + "".join(
        f"  {name}: {{credentials: ['key:{name}'], models: ['*'], end_users: {{{rules}}}}}\n"
        for name, rules in (("a", "concurrency: 1"), ("b", "concurrency: 1"), ("c", ""))
    )
    tenants = load_policy([Source("p.yaml", text)]).tenants
    users = EndUsers(of_tenant=10, of_all=10)
    for number in range(10):
        account = users.find(tenants["a"], str(number), 0.0)
        assert account is not None
        account.take_request(1, 0.0)
    shared = users.find(tenants["b"], "x", 0.0)
    assert shared is not None
    shared.take_request(1, 0.0)
    assert users.find(tenants["b"], "y", 0.0) is shared
    assert users.find(tenants["c"], "x", 0.0) is None
    users.keep({"c": tenants["c"]})
    assert len(users) == 0


async def test_a_denial_reaches_the_caller(stage: Stage) -> None:
    """Through a real lifecycle: the second request of one end user is refused, that of another is admitted, and both
    have the namespace of their tenant."""
    stage.grant("end_users: {requests_per_minute: 1}")

    def asks(name: str) -> Any:
        return openai.parse(Operation.CHAT, document(messages=CHAT, user=name), STAMP).request

    first = await stage.life(asks("ann")).admit(1)
    with pytest.raises(RateLimitedError, match="this end user may send 1 request a minute") as error:
        await collect(Session(stage.life(asks("ann")), asks("ann")))
    assert error.value.rule == "tenants.alpha.end_users.requests_per_minute"
    other = await stage.life(asks("bob")).admit(1)
    assert (first.namespace, first.group) == (other.namespace, other.group)
