"""What a tenant, a listed host, a host that stalls and a name server may cost the others of a split."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from appliance.common.audit.entry import entry
from appliance.common.split_config import PrefillHost, SplitConfig
from appliance.gateway.fleet import prefill_asking, prefill_call, prefill_choice, prefill_service, served_entries
from appliance.gateway.fleet.host_addresses import HostAddresses
from appliance.gateway.front.allowance import Rate
from appliance.gateway.generate_request import TokenPrompt
from appliance.gateway.request.splitting import SplitPrompt
from appliance.gateway.telemetry import split_names as names
from isolation.ipc.engine import RequestFailure, StepOutput, Submit
from isolation.ipc.messages import FailureCode, Finish
from tests.appliance.gateway.fleet.test_split import Prefilling, answered, patient, prefilling, submitted, until
from tests.appliance.gateway.request.test_session import Stage, hear, say, stage

__all__ = ["patient", "prefilling", "stage"]


async def test_a_tenant_leaves_places_to_others(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has half of the places, whichever hosts ask for it: its next prompt is told so though there is room for
    another tenant's, which this policy refuses and not the count (control)."""
    monkeypatch.setattr(prefill_service, "MAX_RUNS", 2)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    first = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    submit = await hear(pair, Submit)
    assert await asking.compute(prefilling.prompt()) == "busy"
    assert await asking.compute(prefilling.prompt(tenant="beta")) == "refused"
    say(pair, submit.request, 7, finish=Finish.LENGTH, started=True)
    assert await first == "computed"
    assert prefilling.service._of_tenants == {}


async def test_refused_calls_do_not_fill_the_audit_log(prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listed host that sends what is refused, on and on, gets an entry for each up to a burst, and one entry with a
    count for the rest; a computed prompt has its own entry meanwhile (control)."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    bad = prefilling.prompt(policy_digest="0" * 64)
    burst, more = 4, 6
    monkeypatch.setattr(served_entries, "OTHER_RATE", Rate(burst, 0.01))
    for _ in range(burst + more):
        assert await asking.compute(bad) == "refused"
    assert (await answered(pair, asking.compute(prefilling.prompt())))[0] == "computed"
    await until(lambda: prefilling.service.running == 0)
    own, summed = prefilling.audit.entries, prefilling.audit.summed
    assert sum(one["outcome"] == "refused" for one in own) == burst
    assert sum(one["outcome"] == "computed" for one in own) == 1
    assert len(summed) == 1 and sum(summed.values()) + len(own) == burst + more + 1
    entry("prefill", **dict(next(iter(summed))), count=1)


async def test_a_host_that_stalls_is_not_waited_for_again_and_again(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill host that says that it works, and computes nothing, costs one prompt its wait; the next one asks
    nobody. Control: after its rest it is asked again."""
    monkeypatch.setattr(prefill_choice, "REST_S", 0.2)
    monkeypatch.setattr(prefill_asking, "ASK_S", 0.5)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    assert await asking.compute(prefilling.prompt()) == "late"
    assert await asking.compute(prefilling.prompt()) == "busy"
    await asyncio.sleep(0.6)
    assert submitted(pair) != []
    monkeypatch.setattr(prefill_asking, "ASK_S", 10)
    assert (await answered(pair, asking.compute(prefilling.prompt())))[0] == "computed"


@pytest.mark.parametrize(("came", "gap"), [(0, True), (0, False), (16, True)])
async def test_a_host_that_gives_nothing_is_not_asked_again_and_again(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch, came: int, gap: bool
) -> None:
    """A host that says that it has computed a prompt, of which the local engine finds nothing, is not asked for the
    tenant's next one: its rest is logged and counted as such, with its cause. So it is where the store does not
    answer, or gives one block, which could else have each prompt computed twice. Controls: it is asked again after its
    rest, and at once where something came, and where the engine had the prompt itself."""
    monkeypatch.setattr(prefill_choice, "REST_S", 0.3)
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    prompt = prefilling.prompt()
    many = asking.least_blocks
    with capture_logs() as lines:
        for store_tokens, recomputed, lacks in ((512, 1, True), (0, 0, True), (came, many, gap)):
            assert not any("tenant" in one for one in lines)
            assert (await answered(pair, asking.compute(prompt)))[0] == "computed"
            asking.taken(prompt, store_tokens, recomputed, gap=lacks)
    (line,) = (one for one in lines if "tenant" in one)  # Files that are read anew are told too.
    told = line["log_level"], line["host"], line["tenant"], line["seconds"]
    assert told == ("warning", "p", "alpha", prefill_choice.REST_S)
    assert ("has not got" in line["cause"]) == gap
    assert await asking.compute(prefilling.prompt()) == "empty"
    assert prefilling.asked[f"{names.SPLIT_ASKED}:empty"] == 1
    await asyncio.sleep(0.4)
    assert (await answered(pair, asking.compute(prefilling.prompt())))[0] == "computed"


async def test_a_name_server_that_does_not_answer_costs_a_quarter_second(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host named by a name that nobody looks up is silent after its time, and the threads that everything else uses
    stay free. Control: a name that is found is called."""
    monkeypatch.setattr(prefill_call, "SILENCE_S", 0.3)
    ends, loop = threading.Event(), asyncio.get_running_loop()

    def look_up(name: str) -> list[str]:
        if name == "good":
            return ["127.0.0.1"]
        ends.wait(30)
        raise OSError("no answer")

    asking = replace(prefilling.asking(), addresses=HostAddresses(look_up))
    asking.config = asking.config.model_copy(update={"prefill_hosts": _named(asking.config, "bad")})
    asking.__post_init__()
    began = time.monotonic()
    assert await asking.compute(prefilling.prompt()) == "silent"
    assert time.monotonic() - began < 5
    async with asyncio.timeout(5):
        await loop.run_in_executor(None, time.monotonic)
    ends.set()
    monkeypatch.setattr(prefill_call, "SILENCE_S", 10.0)
    asking.config = asking.config.model_copy(update={"prefill_hosts": _named(asking.config, "good")})
    asking.__post_init__()
    assert (await answered(prefilling.stage.boot(), asking.compute(prefilling.prompt())))[0] == "computed"


def _named(config: SplitConfig, name: str) -> tuple[PrefillHost, ...]:
    (host,) = config.prefill_hosts
    return (host.model_copy(update={"address": f"{name}:{host.address.partition(':')[2]}"}),)


async def test_what_a_host_cannot_compute_for_one_tenant_it_computes_for_another(prefilling: Prefilling) -> None:
    """The engine of a tenant's model is full, so that the host says that it cannot compute the prompt: it is not asked
    for that tenant for a while, and for another one it is, whose prompt this policy refuses. Control: a host that
    cannot be reached is asked for nobody."""
    pair, asking = prefilling.stage.boot(), prefilling.asking()
    task = asyncio.ensure_future(asking.compute(prefilling.prompt()))
    submit = await hear(pair, Submit)
    pair.guest.send(StepOutput(failures=(RequestFailure(submit.request, FailureCode.OVERLOADED),)))
    assert await task == "away"
    assert await asking.compute(prefilling.prompt()) == "busy"
    assert await asking.compute(prefilling.prompt(tenant="beta")) == "refused"
    gone = prefilling.asking(port=1)
    assert [await gone.compute(prefilling.prompt(tenant=one)) for one in ("alpha", "beta")] == ["away", "busy"]


async def test_what_came_of_a_prompt_is_told_when_its_request_starts(prefilling: Prefilling, stage: Stage) -> None:
    """A prompt that another host says to have computed, and of which the local engine has nothing: that is told once,
    as soon as the engine has taken the request up, while the answer is still written. Before, nothing is (control)."""
    told = list[object]()

    class Elsewhere:
        """Says that each prompt is computed."""

        def wants(self, _prompt: SplitPrompt) -> bool:
            """All are long."""
            return True

        async def compute(self, _prompt: SplitPrompt, begun: Callable[[], None]) -> str:
            """Compute nothing."""
            begun()
            return "computed"

        def learn(self, prompt: SplitPrompt) -> None:
            """Note the prompt's length."""
            told.append(len(prompt.token_ids))

        def taken(self, _prompt: SplitPrompt, store_tokens: int, recomputed_blocks: int, *, gap: bool) -> None:
            """Note what came."""
            told.append((store_tokens, recomputed_blocks, gap))

    stage.dependencies.prefiller = Elsewhere()
    pair = stage.boot()

    async def events() -> list[Any]:
        prompt = TokenPrompt(array("I", [3] * 160))
        return [one async for one in stage.session(prompt=prompt, max_tokens=2).run()]

    task = asyncio.ensure_future(events())
    submit = await hear(pair, Submit)
    assert submit.coming and told == []
    say(pair, submit.request, 7, started=True)
    await until(lambda: told == [160, (0, 10, False)])
    assert not task.done()
    say(pair, submit.request, 8, finish=Finish.LENGTH)
    await task
    assert len(told) == 2
