"""Requests for routes over real channels to scripted sandboxes: the model that gets them, and what is told of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from appliance.common.errors import (
    ApplianceError,
    InvalidRequestError,
    ModelNotFoundError,
    PolicyChangedError,
    UnavailableError,
)
from appliance.gateway.generate_request import (
    CallContext,
    EmbedRequest,
    GenerateRequest,
    Operation,
    Principal,
    TextPrompt,
    TokenizerOperation,
    TokenizerRequest,
    TokenPrompt,
)
from appliance.gateway.request import routing as module
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes import model_sandboxes as rooms
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.model_states import BUSY_LIVE, BUSY_QUEUE, model_state
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from appliance.gateway.telemetry.names import POLICY_DIGEST, POLICY_RULE, REQUEST_MODEL, RESPONSE_MODEL
from appliance.gateway.telemetry.store import StoredSpan
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Finish, Role
from isolation.ipc.sampling import Sampling
from isolation.ipc.text import Encode, Encoded
from policy.loader import Source, load_policy
from policy.model import IsolationClass, ModelState, PolicySet, Route, Tenant
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair
from tests.appliance.gateway.request.test_service import Supervisor
from tests.appliance.gateway.request.test_session import hear, say

CALL = CallContext("POST /v1/completions", "http")
BY_ALIAS, BY_NAME, BY_STAR = (Principal(name, f"key:{name}") for name in ("by-alias", "by-name", "by-star"))

POLICY = """\
version: 1
tenants:
  by-alias: {credentials: ["key:by-alias"], models: ["fast", "embedding", "half"]}
  by-name: {credentials: ["key:by-name"], models: ["mini"]}
  by-star: {credentials: ["key:by-star"], models: ["*"]}
  strict-one: {credentials: ["key:strict"], models: ["fast"], class: strict, kv: {reservation: 10%}}
routes:
  fast: {to: [{model: mini}], fallback: [next], fall_back_when: [unready, busy]}
  half: {to: [{model: mini}, {model: next}]}
  embedding: {to: [{model: vectors}]}
  nowhere: {to: [{model: never-served}]}
  hidden: {to: [{model: next}]}
"""


class House:
    """Three models, of which none is there before ``boot``, and the service over them."""

    def __init__(self) -> None:
        runners = {"mini": "model", "next": "model", "vectors": "embed"}
        self.models = {name: ModelSandboxes(name, runner) for name, runner in runners.items()}
        self.engines: dict[str, Pair] = {}
        self.texts: dict[str, Pair] = {}
        self.pairs: list[Pair] = []
        self.supervisor = Supervisor()
        self.feed = AuditFeed(self.supervisor.send)
        keys = {name: name.encode().ljust(32, b"k") for name in ("by-alias", "by-name", "by-star", "strict-one")}
        ledger = Ledger(load_policy([Source("p.yaml", POLICY)]), keys)
        self.telemetry = open_telemetry(TelemetrySettings(version="0"))
        self.service = GatewayService(self.models, ledger, self.telemetry, self.feed)

    def reload(self, old: str, new: str) -> None:
        """Put a policy in force in which this text stands in the place of that."""
        assert old in POLICY
        policy = load_policy([Source("p.yaml", POLICY.replace(old, new))])
        self.service.ledger.replace(policy, dict(self.service.ledger.namespaces))

    def decided(self, request_id: str) -> list[tuple[object, object]]:
        """Return rule and policy digest of the generation spans of a request, the newest first."""
        spans = self.generations(request_id)
        return [(span.attributes.get(POLICY_RULE), span.attributes.get(POLICY_DIGEST)) for span in spans]

    def generations(self, request_id: str) -> list[StoredSpan]:
        """Return the generation spans of a request, the newest first."""
        spans = [span for found in self.telemetry.store.find(request_id) for span in found.spans]
        return [span for span in spans if REQUEST_MODEL in span.attributes]

    def boot(self, name: str) -> None:
        """Have a model's sandboxes there."""
        model = self.models[name]
        self.engines[name], self.texts[name] = make_pair(Role.ENGINE, ENGINE_READY), make_pair(Role.TEXT, TEXT_READY)
        self.pairs += (self.engines[name], self.texts[name])
        model.table = VocabularyTable(tuple(b"%d " % index for index in range(512)), False)
        text = TextLink(self.texts[name].host, TEXT_READY, 1, lambda *_: None)
        text.table = model.table
        model.set_text(text)
        model.set_engine(EngineLink(self.engines[name].host, ENGINE_READY, 1, lambda *_: model.set_engine(None)))

    def close(self) -> None:
        """End all sandboxes, those that were replaced included, and the telemetry."""
        for model in self.models.values():
            model.close_links()
        for pair in self.pairs:
            pair.guest.close()
            pair.host.close()
        self.telemetry.close()

    async def tokenised(self, name: str) -> None:
        """Give the ids of a prompt that a model is sent."""
        job = await hear(self.texts[name], Encode)
        self.texts[name].guest.send(Encoded(job.request, array("I", [1, 2, 3])))

    async def answered(self, name: str) -> None:
        """Serve one request of two tokens by a model."""
        await self.tokenised(name)
        submit = await hear(self.engines[name], Submit)
        say(self.engines[name], submit.request, 5, started=True)
        say(self.engines[name], submit.request, 6, finish=Finish.LENGTH)

    def choices(self) -> dict[tuple[str, str, str], int]:
        """Counts of the metric, by route, model and reason."""
        _, body = self.telemetry.metrics.render()
        found = {}
        for line in body.decode().splitlines():
            if line.startswith("athanor_route_choices_total{"):
                labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
                words = (
                    labels[name].strip('"') for name in ("athanor_route", "gen_ai_request_model", "athanor_reason")
                )
                found[tuple(words)] = int(float(line.rpartition(" ")[2]))
        return found


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One whose models are there, but for ``vectors``."""
    made = House()
    made.telemetry.metrics.know(models=made.models)
    made.boot("mini")
    made.boot("next")
    yield made
    made.close()


def request(model: str = "fast", **options: Any) -> GenerateRequest:
    """A completion."""
    return GenerateRequest(
        request_id="req_1",
        operation=Operation.TEXT_COMPLETION,
        model=model,
        prompt=TextPrompt("hello"),
        sampling=Sampling(temperature=0.0),
        max_tokens=2,
        **options,
    )


async def served(house: House, by: str, who: Principal, asked: GenerateRequest) -> None:
    """Run a request to its end in a model."""
    events = house.service.generate(who, asked, CALL)
    done = asyncio.ensure_future(_all(events))
    await house.answered(by)
    await done


async def _all(events: Any) -> list[Any]:
    return [event async for event in events]


async def test_a_request_for_a_route_is_given_its_model_once(house: House) -> None:
    """The front end gets the request with both names; asked again, or by the service, it stays where it is."""
    routed = house.service.routed(BY_ALIAS, request())
    assert (routed.model, routed.alias) == ("mini", "fast")
    assert house.service.routed(BY_ALIAS, routed) is routed
    assert house.choices() == {("fast", "mini", "weight"): 1}
    await served(house, "mini", BY_ALIAS, routed)
    assert sum(house.choices().values()) == 1, "not chosen a second time"
    plain = request("mini")
    assert house.service.routed(BY_NAME, plain) is plain


async def test_a_front_end_that_forgets_to_ask_is_served_all_the_same(house: House) -> None:
    """The service chooses for itself."""
    await served(house, "mini", BY_ALIAS, request())


async def test_both_names_are_kept_and_the_served_one_is_charged(house: House) -> None:
    """The audit entry has both, the spans too; counts by model are those of the model that served."""
    await served(house, "mini", BY_ALIAS, house.service.routed(BY_ALIAS, request()))
    house.feed.flush()
    (entry,) = house.supervisor.entries("request")
    assert (entry.fields["model"], entry.fields["alias"], entry.fields["rule"]) == (
        "mini",
        "fast",
        "tenants.by-alias.models[0]",
    )
    (stored,) = house.telemetry.store.find("req_1")
    spans = [span.attributes for span in stored.spans if REQUEST_MODEL in span.attributes]
    assert [(found[REQUEST_MODEL], found[RESPONSE_MODEL]) for found in spans] == [("fast", "mini")]
    assert stored.summary.model == "mini"
    assert {key[1] for key in house.service.tenant_counts.moved()} == {"mini"}


async def test_the_fallback_serves_while_a_model_is_away(house: House) -> None:
    """Dead, hung or never there: the next one answers; once it is back it is chosen again."""
    engine = house.models["mini"].engine
    house.models["mini"].set_engine(None)
    assert house.service.routed(BY_ALIAS, request()).model == "next"
    house.models["mini"].set_engine(engine)
    assert house.service.routed(BY_ALIAS, request()).model == "mini"
    text = house.models["mini"].text
    house.models["mini"].set_text(None)
    assert house.service.routed(BY_ALIAS, request()).model == "next"
    house.models["mini"].set_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineLink, "hang", property(lambda link: "hangs" if link is engine else ""))
        assert house.service.routed(BY_ALIAS, request()).model == "next"
    house.models["mini"].begin_drain()
    assert house.service.routed(BY_ALIAS, request()).model == "next"
    assert house.choices()["fast", "next", "unready"] == 4


async def test_a_busy_model_is_passed_over_except_for_class_strict(house: House) -> None:
    """With as many requests that wait as the bound says, or with one and no free block, the next model is chosen. One
    less, a queue that is told of and cannot be, and free blocks (controls) leave it. A tenant of class strict, whose
    choice would show how many others there are, stays."""
    link = house.models["mini"].engine
    assert link is not None

    def chosen(who: Principal = BY_ALIAS, **stats: int) -> str:
        link.stats = replace(link.stats, **stats)
        return house.service.routed(who, request()).model

    assert chosen(waiting=1_000, free_blocks=0) == "mini", "nothing of ours is in it"
    for number in range(1, BUSY_QUEUE + 1):
        link.submit(Submit(number, b"k" * 32, array("I", [1]), 1, Sampling()), b"")
    assert chosen(waiting=BUSY_QUEUE - 1, free_blocks=9) == "mini"
    assert chosen(waiting=BUSY_QUEUE) == "next"
    assert chosen(Principal("strict-one", "key:strict")) == "mini"
    assert chosen(waiting=1) == "mini"
    assert chosen(free_blocks=0) == "next", "its KV is full"
    assert chosen(waiting=0) == "mini", "its KV is full, and nothing waits for it"


async def test_an_engine_that_denies_its_queue_is_busy_all_the_same(house: House) -> None:
    """What the gateway has sent it counts, whatever it says."""
    link = house.models["mini"].engine
    assert link is not None
    link._live = dict.fromkeys(range(BUSY_LIVE - 1))
    assert house.service.routed(BY_ALIAS, request()).model == "mini"
    link._live = dict.fromkeys(range(BUSY_LIVE))
    assert house.service.routed(BY_ALIAS, request()).model == "next"
    link._live = {}


@pytest.mark.parametrize("isolation_class", IsolationClass)
async def test_sandboxes_of_a_tenant_s_own(house: House, isolation_class: IsolationClass) -> None:
    """Those that are not asked for yet come with the request, and are no reason to go elsewhere; those that boot are.
    What a class shares counts as it is."""
    shared, own = house.models["mini"], ModelSandboxes("mini", tenant="x")
    assert model_state(None, None, isolation_class) is ModelState.UNREADY
    assert model_state(shared, None, isolation_class) is ModelState.READY
    booting = ModelState.READY if isolation_class is IsolationClass.SHARED else ModelState.UNREADY
    assert model_state(shared, own, isolation_class) is booting
    own.set_text(shared.text)
    strict = ModelState.UNREADY if isolation_class is IsolationClass.DEDICATED else ModelState.READY
    assert model_state(shared, own, isolation_class) is strict
    own.set_engine(shared.engine)
    assert model_state(shared, own, isolation_class) is ModelState.READY
    shared.set_engine(None)
    alone = ModelState.READY if isolation_class is IsolationClass.DEDICATED else ModelState.UNREADY
    assert model_state(shared, own, isolation_class) is alone


async def test_a_cache_key_keeps_requests_together(house: House) -> None:
    """Requests with one key go to one model; without a key each is drawn for itself. Over many keys both are used."""

    def drawn(number: int, key: str) -> str:
        asked = replace(request("half", cache_key=key), request_id=f"req_{number}")
        return house.service.routed(BY_ALIAS, asked).model

    for key in ("chat-1", "chat-2", "chat-3"):
        assert len({drawn(number, key) for number in range(20)}) == 1
    assert {drawn(number, "") for number in range(40)} == {"mini", "next"}
    assert {drawn(0, f"chat-{number}") for number in range(40)} == {"mini", "next"}


async def test_a_route_without_a_model_that_is_there(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of a model that starts, retryable, and names the route and not where it leads; so is that of a
    route to a model that nobody serves."""
    monkeypatch.setattr(rooms, "BOOT_WAIT_S", 0.05)
    for name in ("mini", "next"):
        house.models[name].set_engine(None)
        house.models[name].set_text(None)
    plain = await refusal(house, BY_NAME, request("mini"))
    routed = await refusal(house, BY_ALIAS, house.service.routed(BY_ALIAS, request()))
    assert type(plain) is type(routed) is UnavailableError
    assert plain.message.replace("mini", "fast") == routed.message
    assert plain.retry_after_s == routed.retry_after_s
    nowhere = await refusal(house, BY_STAR, house.service.routed(BY_STAR, request("nowhere")))
    assert type(nowhere) is UnavailableError
    assert "never-served" not in nowhere.message
    assert "nowhere" in nowhere.message
    assert house.choices()["nowhere", "other", "none_ready"] == 1


async def refusal(house: House, who: Principal, asked: GenerateRequest) -> ApplianceError:
    """The error of a request."""
    with pytest.raises(ApplianceError) as caught:
        await anext(house.service.generate(who, asked, CALL))
    return caught.value


async def test_a_kind_of_request_that_no_model_of_the_route_takes(house: House) -> None:
    """A chat by a route to vectors, and vectors by a route to chats: a typed error that names the route alone."""
    wrong = await refusal(house, BY_ALIAS, house.service.routed(BY_ALIAS, request("embedding")))
    assert isinstance(wrong, InvalidRequestError)
    assert "embedding gives embeddings" in wrong.message
    embed = EmbedRequest(request_id="req_2", model="fast", inputs=(TextPrompt("x"),))
    with pytest.raises(InvalidRequestError, match="the model fast generates text"):
        await house.service.embed(BY_ALIAS, embed, CALL)


async def test_a_target_of_another_kind_is_passed_over(house: House) -> None:
    """Where a route mixes models of text and of vectors, a request goes to one that takes it."""
    house.reload("fast: {to: [{model: mini}]", "fast: {to: [{model: vectors}]")
    assert house.service.routed(BY_ALIAS, request()).model == "next"


async def test_a_reload_between_the_two_decisions(house: House) -> None:
    """A route that leads elsewhere while the prompt is tokenised ends the request with a typed, retryable error; one
    that still leads to the model, with other shares, does not move it."""
    asked = asyncio.ensure_future(_all(house.service.generate(BY_ALIAS, request(), CALL)))
    job = await hear(house.texts["mini"], Encode)
    house.reload("{to: [{model: mini}], fallback", "{to: [{model: next, weight: 9}, {model: mini}], fallback")
    house.texts["mini"].guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(house.engines["mini"], Submit)
    say(house.engines["mini"], submit.request, 5, started=True)
    say(house.engines["mini"], submit.request, 6, finish=Finish.LENGTH)
    await asked
    house.reload("version: 1", "version: 1")
    asked = asyncio.ensure_future(_all(house.service.generate(BY_ALIAS, request(), CALL)))
    job = await hear(house.texts["mini"], Encode)
    house.reload("{to: [{model: mini}], fallback: [next]", "{to: [{model: next}], fallback: [other]")
    house.texts["mini"].guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    with pytest.raises(PolicyChangedError, match="may be sent again") as refused:
        await asked
    house.feed.flush()
    (denied,) = house.supervisor.entries("denied")
    assert (denied.fields["model"], denied.fields["alias"], denied.fields["rule"]) == ("mini", "fast", "routes.fast")
    digest = house.service.ledger.policy.digest
    assert denied.fields["policy"] == digest
    assert refused.value.details == {"rule": "routes.fast", "policy": digest}
    assert house.decided("req_1")[0] == ("routes.fast", digest)


async def test_span_and_entry_have_the_policy_of_the_last_decision(house: House) -> None:
    """Where a reload comes between the two decisions, the span and the audit entry of the request name the later
    policy. Control: they name the earlier one where no reload comes."""
    for reloads in (False, True):
        before = house.service.ledger.policy.digest
        asked = asyncio.ensure_future(_all(house.service.generate(BY_ALIAS, request(), CALL)))
        job = await hear(house.texts["mini"], Encode)
        if reloads:
            house.reload("{to: [{model: mini}], fallback", "{to: [{model: next}, {model: mini}], fallback")
        after = house.service.ledger.policy.digest
        assert (after != before) is reloads
        house.texts["mini"].guest.send(Encoded(job.request, array("I", [1, 2, 3])))
        submit = await hear(house.engines["mini"], Submit)
        say(house.engines["mini"], submit.request, 6, started=True, finish=Finish.LENGTH)
        await asked
        house.feed.flush()
        assert house.supervisor.entries("request")[-1].fields["policy"] == after
        assert house.decided("req_1")[0] == ("tenants.by-alias.models[0]", after)


async def test_a_denial_before_the_prompt_is_counted_names_rule_and_policy(house: House) -> None:
    """The error, the span and the audit entry of a request that the first decision denies name its rule and the digest
    of the policy; the caller is told the rule without its tenant's name."""
    house.reload("tenants:", "defaults: {limits: {max_output_tokens: 3}}\ntenants:")
    with pytest.raises(InvalidRequestError) as refused:
        await _all(house.service.generate(BY_ALIAS, replace(request(), max_tokens=9), CALL))
    digest, rule = house.service.ledger.policy.digest, "limits.max_output_tokens"
    assert (refused.value.details["rule"], refused.value.details["policy"]) == (rule, digest)
    house.feed.flush()
    (denied,) = house.supervisor.entries("denied")
    assert (denied.fields["rule"], denied.fields["policy"]) == (f"tenants.by-alias.{rule}", digest)
    assert house.decided("req_1") == [(f"tenants.by-alias.{rule}", digest)]


CHANGES = {
    "the alias is taken away": ('models: ["fast", "embedding', 'models: ["vectors', "tenants.by-alias.models"),
    "the model is taken out of the route": ("fast: {to: [{model: mini}]", "fast: {to: [{model: other}]", "routes.fast"),
    "the route is gone": ("  fast: {", "  fast-2: {", "routes.fast"),
    "another fallback": ("fallback: [next]", "fallback: [third]", ""),
    "another route": ("  hidden: {", "  more-hidden: {", ""),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_running_answer_ends_when_its_name_leads_there_no_more(house: House, name: str) -> None:
    """What was granted by the alias is withdrawn with it; other changes of routes leave it running. Entry and span of
    what was withdrawn name rules and digests of both policies, of one that runs on the first alone (control)."""
    old, new, rule = CHANGES[name]
    before = house.service.ledger.policy.digest
    running = asyncio.ensure_future(_all(house.service.generate(BY_ALIAS, request(), CALL)))
    await house.tokenised("mini")
    submit = await hear(house.engines["mini"], Submit)
    say(house.engines["mini"], submit.request, 5, started=True)
    house.reload(old, new)
    house.service.end_withdrawn(lambda _: True)
    if rule:
        with pytest.raises(ApplianceError) as caught:
            await running
        assert caught.value.wire.reason == ("PERMISSION_DENIED" if rule.endswith("models") else "POLICY_CHANGED")
        assert caught.value.details["rule"] == rule.removeprefix("tenants.by-alias.")
        assert "mini" not in caught.value.message
    else:
        say(house.engines["mini"], submit.request, 6, finish=Finish.LENGTH)
        await running
    house.feed.flush()
    (entry,) = house.supervisor.entries("request")
    cut = house.service.ledger.policy.digest if rule else ""
    assert (entry.fields["policy"], entry.fields["cut_rule"], entry.fields["cut_policy"]) == (before, rule, cut)
    (span,) = house.generations("req_1")
    told = [span.attributes.get(f"athanor.policy.{word}", "") for word in ("digest", "cut_rule", "cut_digest")]
    assert told == [before, rule, cut] and span.attributes[POLICY_RULE] == entry.fields["rule"] != rule


async def test_what_models_are_listed(house: House) -> None:
    """Aliases are listed with the models that a tenant may use, and nothing of others; a route has the least context
    of its models and no kind of its own."""
    listed = {who.tenant: house.service.models(who) for who in (BY_ALIAS, BY_NAME, BY_STAR)}
    assert [card.name for card in listed["by-alias"]] == ["embedding", "fast", "half"]
    assert [card.name for card in listed["by-name"]] == ["mini"]
    assert [card.name for card in listed["by-star"]] == sorted(
        ["fast", "half", "hidden", "mini", "next", "nowhere", "vectors", "embedding"]
    )
    cards = {card.name: card for card in listed["by-star"]}
    assert (cards["fast"].max_context, cards["fast"].runner) == (ENGINE_READY.max_context, "model")
    assert cards["embedding"].runner == "embed"
    assert cards["nowhere"].max_context == 0


async def test_a_model_whose_name_a_route_has_is_that_route(house: House) -> None:
    """The route wins: the name is listed once, and leads where the route does."""
    house.reload(POLICY[POLICY.index("routes:") :], "routes:\n  mini: {to: [{model: next}]}\n")
    assert [card.name for card in house.service.models(BY_NAME)] == ["mini"]
    routed = house.service.routed(BY_NAME, request("mini"))
    assert (routed.model, routed.alias) == ("next", "mini")


def hiding_requests() -> Iterator[tuple[str, Any]]:
    """A request of each kind, without its model."""
    yield "generate", request()
    yield "embed", EmbedRequest(request_id="req_2", model="", inputs=(TextPrompt("x"),))
    for operation, prompt in (
        (TokenizerOperation.TOKENIZE, TextPrompt("x")),
        (TokenizerOperation.DETOKENIZE, TokenPrompt(array("I", [1]))),
    ):
        yield operation.value, TokenizerRequest(request_id="r", operation=operation, model="", prompt=prompt)


async def test_names_that_are_not_for_a_tenant_are_alike(house: House) -> None:
    """A target by its own name, a route of others, a model of others and a name that nobody has are refused by one
    error, word for word but for the name; the log, which the operator reads, has the rule. Control: a name of its own
    is not refused so."""
    for kind, asked in hiding_requests():
        told = set()
        for name in ("next", "hidden", "vectors", "nothing", "mini"):
            named = house.service.routed(BY_ALIAS, replace(asked, model=name))
            with pytest.raises(ModelNotFoundError) as refused:
                await call(house, kind, named)
            error = refused.value
            told.add((error.message.replace(name, "?"), error.param, error.retry_after_s, tuple(error.details)))
        assert len(told) == 1, kind
    house.feed.flush()
    denied = {
        (one.fields["model"], one.fields["alias"], one.fields["rule"]) for one in house.supervisor.entries("denied")
    }
    rule = "tenants.by-alias.models"
    assert denied == {("next", "", rule), ("vectors", "", rule), ("mini", "", rule), ("", "hidden", rule), ("", "", "")}


async def call(house: House, kind: str, asked: Any) -> None:
    """Send a request of one kind."""
    service = house.service
    if kind == "generate":
        await anext(service.generate(BY_ALIAS, asked, CALL))
    else:
        await {"embed": service.embed, "tokenize": service.tokenize, "detokenize": service.detokenize}[kind](
            BY_ALIAS, asked, CALL
        )


async def test_a_list_of_models_takes_no_longer_for_routes_of_others(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are compared once for each policy; a second list compares none, however many routes there are. Control:
    after a reload they are compared again."""
    compared = []
    whole = module.visible_route

    def counting(policy: PolicySet, tenant: Tenant | None, name: str) -> Route | None:
        compared.append(name)
        return whole(policy, tenant, name)

    monkeypatch.setattr(module, "visible_route", counting)
    first = house.service.models(BY_ALIAS)
    assert compared == ["fast", "half", "embedding", "nowhere", "hidden"]
    compared.clear()
    assert house.service.models(BY_ALIAS) == first
    assert compared == []
    house.reload("  hidden: {", "  more-hidden: {")
    house.service.models(BY_ALIAS)
    assert len(compared) == 5


async def test_the_counter_s_labels_are_bounded(house: House) -> None:
    """However many names policies bring one after the other, there are as many series as places, and one more."""
    for number in range(400):
        house.telemetry.count("athanor.route_choices", route=f"r{number}", model="mini", reason="weight")
    assert len({route for route, _, _ in house.choices()}) == 257
