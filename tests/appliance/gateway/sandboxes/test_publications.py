"""Public prefixes between policy and engine: what is published of a text, what is refused, and which one is named."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest

from appliance.common.errors import InvalidRequestError
from appliance.common.kv_shares import public_account, shown
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.publications import Publications, tokenize
from appliance.gateway.sandboxes.text_link import TextLink
from isolation.ipc.messages import Failed, FailureCode, Role
from isolation.ipc.public import PublicPrefixes, PublicState, PublicUsage, PublicUse, common_length
from isolation.ipc.text import Encode, Encoded, SourceKind
from policy.loader import Source, load_policy
from policy.model import PolicySet
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair

READY = replace(ENGINE_READY, publishes=True)
HEAD = 'version: 1\ntenants:\n  a: {credentials: ["key:a"], models: ["m"]}\npublic_prefixes:\n'
TEXT = "the rules of this house are these and no others"


def published(*lines: str) -> PolicySet:
    """A policy with these prefixes."""
    return load_policy([Source("p.yaml", HEAD + "".join(f"  {line}\n" for line in lines))])


class Stage:
    """Rooms with a scripted engine and a text worker of one id a character, refusing turns of some roles."""

    def __init__(self, next_id: Callable[[], int], refused: tuple[str, ...] = ()) -> None:
        self.model = ModelSandboxes("m")
        self.publications = Publications({"m": self.model}, next_id)
        self.refused = refused
        self.shift = 0
        """What is added to each token id."""
        self.asked: list[Encode] = []
        self.text, self.engine = make_pair(Role.TEXT, TEXT_READY), make_pair(Role.ENGINE, READY)
        self.model.set_text(TextLink(self.text.host, TEXT_READY, 1, lambda *_: None))
        self.model.set_engine(EngineLink(self.engine.host, READY, 1, lambda *_: None))
        self.worker = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            for message in self.text.guest.receive():
                assert isinstance(message, Encode)
                self.asked.append(message)
                self.text.guest.send(self._encoded(message))
            await asyncio.sleep(0.001)

    def _encoded(self, message: Encode) -> Encoded | Failed:
        text = message.source.decode()
        if message.kind is SourceKind.CHAT:
            turns = json.loads(text)["messages"]
            if turns[-1]["role"] in self.refused:
                return Failed(message.request, FailureCode.INVALID, "no such turn here")
            text = "".join(f"<{turn['role']}>{turn['content']}" for turn in turns)
        # As a tokenizer that joins a space to the word behind it.
        ids = [ord(mark) % 500 + self.shift for mark in text.replace("s the", "$")]
        return Encoded(message.request, array("I", ids))

    async def hear(self) -> PublicPrefixes:
        """The next table at the engine."""
        async with asyncio.timeout(20):
            while True:
                for message in self.engine.guest.receive(1):
                    if isinstance(message, PublicPrefixes):
                        return message
                await asyncio.sleep(0.002)

    async def close(self) -> None:
        """Let everything go."""
        self.worker.cancel()
        for link in (self.model.engine, self.model.text):
            if link is not None:
                link.close()
        for pair in (self.text, self.engine):
            Pair.close(pair)


@pytest.fixture
async def stage(counter: Callable[[], int]) -> AsyncGenerator[Stage]:
    """A stage."""
    made = Stage(counter)
    yield made
    await made.close()


async def test_what_all_continuations_have_in_common_is_published(stage: Stage) -> None:
    """Of a text all but what a tokenizer joins to what follows; of a conversation up to a user's content, or, where no
    such turn is taken, up to another role's; where none is, it is refused."""
    policy = published(
        f"one: {{model: m, tenants: all, text: {TEXT}}}",
        "two: {model: m, tenants: all, messages: [{role: system, content: be kind}]}",
    )
    ids = await tokenize(policy.public["one"], stage.model, stage.publications.next_id)
    assert "".join(map(chr, ids)) == TEXT[:-1]
    ids = await tokenize(policy.public["two"], stage.model, stage.publications.next_id)
    assert "".join(map(chr, ids)) == "<system>be kind<user>"
    stage.refused = ("user",)
    ids = await tokenize(policy.public["two"], stage.model, stage.publications.next_id)
    assert "".join(map(chr, ids)) == "<system>be kind<assistant>"
    stage.refused = ("user", "assistant", "tool")
    with pytest.raises(InvalidRequestError, match="no such turn"):
        await tokenize(policy.public["two"], stage.model, stage.publications.next_id)


async def test_the_engine_hears_of_it_and_requests_of_what_is_resident(stage: Stage) -> None:
    """A prefix is named to the engine only after it has called it resident, only for names that the policy grants, and
    of several the one with the most in common. An engine that comes anew is told again."""
    lines = (f"{name}: {{model: m, tenants: all, text: {text}}}" for name, text in (("one", TEXT), ("two", TEXT[:24])))
    policy = published(*lines)
    keys = {public_account(prefix): bytes([number]) * 32 for number, prefix in enumerate(policy.public.values(), 1)}
    assert await stage.publications.prepare(policy) == []
    stage.publications.apply(policy, keys)
    table = await stage.hear()
    assert [prefix.key for prefix in table.prefixes] == list(keys.values())
    engine = stage.model.engine
    assert engine is not None
    prompt = array("I", [ord(mark) for mark in TEXT + " and more"])
    assert stage.publications.choose(("one", "two"), prompt, engine) == b""
    stage.engine.guest.send(PublicUsage(tuple(PublicUse(key, PublicState.RESIDENT, 2, 7) for key in keys.values())))
    async with asyncio.timeout(20):
        while not engine.public:
            await asyncio.sleep(0.002)
    one, two = keys.values()
    assert stage.publications.choose(("one", "two"), prompt, engine) == one
    assert stage.publications.choose(("two",), prompt, engine) == two
    assert stage.publications.choose(("one", "gone"), prompt[:15], engine) == b"", "less than a block"
    assert stage.publications.choose((), prompt, engine) == b""
    assert [(view.id, view.state, view.hits) for view in stage.publications.views()] == [
        ("one", "resident", 7),
        ("two", "resident", 7),
    ]
    again = make_pair(Role.ENGINE, READY)
    stage.model.set_engine(EngineLink(again.host, READY, 2, lambda *_: None))
    stage.engine = again
    assert await stage.hear() == table
    stage.publications.apply(load_policy([Source("p.yaml", HEAD.partition("public")[0])]), {})
    assert await stage.hear() == PublicPrefixes()


async def test_what_does_not_fit_is_refused_before_it_is_in_force(stage: Stage) -> None:
    """By name, with the numbers: less than a block, more than half of the pool, another model, an engine that
    keeps none."""

    async def problem_of(text: str, model: str = "m") -> str:
        line = f"one: {{model: {model}, tenants: all, text: {text}}}"
        (problem,) = await stage.publications.prepare(published(line))
        return problem

    assert await problem_of("short") == (
        "public_prefixes.one: it has 5 tokens, and a block of the KV pool has 16: there is nothing to share"
    )
    assert "there is no model 'n'" in await problem_of(TEXT, "n")
    stage.model.capacity = replace(READY, num_blocks=5)
    assert "of the 5 blocks of the KV pool" in await problem_of(TEXT * 2)
    stage.model.capacity = replace(READY, publishes=False)
    assert "keeps no public prefixes" in await problem_of(TEXT)


async def test_a_prefix_of_a_sleeping_model_is_named_as_unchecked(stage: Stage) -> None:
    """A model that sleeps cannot be asked for the tokens of what is published for it: that is told, until it has been
    asked once. One that is awake (the control) is asked at once."""
    policy = published(f"one: {{model: m, tenants: all, text: {TEXT}}}")
    assert stage.publications.unchecked(policy) == []
    text = stage.model.text
    stage.model.text = None
    stage.model.sleep_state.fall_asleep("", 0.0)
    assert await stage.publications.prepare(policy) == []
    assert stage.publications.unchecked(policy) == [
        "public_prefixes.one: its model m sleeps; whether it can be published is known once it wakes"
    ]
    stage.model.text = text
    assert await stage.publications.prepare(policy) == []
    assert stage.publications.unchecked(policy) == []


async def test_a_model_that_has_come_is_asked_for_its_tokens_again(stage: Stage) -> None:
    """Another model of the name may have another tokenizer: nothing of the ids of the one before is published."""
    policy = published(f"one: {{model: m, tenants: all, text: {TEXT}}}")
    account = public_account(policy.public["one"])
    assert await stage.publications.prepare(policy) == []
    stage.publications.apply(policy, {account: bytes(32)})
    (before,) = (await stage.hear()).prefixes
    stage.shift = 1
    task = asyncio.create_task(stage.publications.run())
    stage.publications.model_came("other")
    stage.publications.model_came("m")
    (after,) = (await stage.hear()).prefixes
    task.cancel()
    assert after.token_ids == array("I", [one + 1 for one in before.token_ids])


async def test_tokens_of_a_model_that_went_meanwhile_are_not_kept(stage: Stage) -> None:
    """A model that is replaced while its prefix is tokenized has not tokenized it."""
    policy = published(f"one: {{model: m, tenants: all, text: {TEXT}}}")
    models = dict(stage.publications.models)
    stage.publications.models = models
    task = asyncio.create_task(stage.publications.prepare(policy))
    async with asyncio.timeout(20):
        while not stage.asked:
            await asyncio.sleep(0.001)
    models["m"] = ModelSandboxes("m")
    assert await task == []
    stage.publications.apply(policy, dict.fromkeys(map(public_account, policy.public.values()), bytes(32)))
    assert [view.num_tokens for view in stage.publications.views()] == [0]
    models["m"] = stage.model
    await stage.publications.prepare(policy)
    assert [view.num_tokens for view in stage.publications.views()] == [len(TEXT) - 1], "control"


async def test_another_text_has_another_account(stage: Stage) -> None:
    """And so another key: no block of the old text is found under the new one's. People see the name alone."""
    policies = [published(f"one: {{model: m, tenants: all, text: {text}}}") for text in (TEXT, TEXT + "x")]
    one, two = (policy.public["one"] for policy in policies)
    assert public_account(one) != public_account(two)
    assert shown(public_account(one)) == "public/one"
    assert shown("alpha") == "alpha"
    assert stage.publications.views() == []


@pytest.mark.parametrize(("same", "most"), [(0, 5), (1, 5), (3, 5), (5, 5), (7, 5)])
def test_a_common_length_is_the_first_difference(same: int, most: int) -> None:
    """At the start, inside, and past the end of either."""
    first, second = array("I", range(most)), array("I", [*range(same), 99])
    assert common_length(first, second) == common_length(second, first) == min(same, most)
