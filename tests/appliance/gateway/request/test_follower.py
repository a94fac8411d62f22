"""An answer written straight into a sink: the same text and account as its events, and the reader's pace is his own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from appliance.common.errors import DeadlineExceededError, UnavailableError
from appliance.gateway.generate_request import Delta, Event, Finished, FinishReason, Sink, Started
from appliance.gateway.request.follower import Follower, Outcome, restored_of
from appliance.gateway.sandboxes import engine_link
from isolation.ipc.engine import Abort, Submit
from isolation.ipc.engine import Started as WireStarted
from isolation.ipc.messages import Finish
from tests.appliance.gateway.request.test_session import Stage, hear, say


class Basket:
    """A sink that keeps what it is given, and may be closed."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.open = True
        self.call: Callable[[], None] | None = None
        self.error: Exception | None = None

    @property
    def ready(self) -> bool:
        """As told."""
        return self.open

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Remember it."""
        self.call = call

    def delta(self, delta: Delta) -> None:
        """Keep it, or fail."""
        if self.error is not None:
            raise self.error
        self.deltas.append(delta)

    def reopen(self) -> None:
        """There is room again."""
        self.open = True
        assert self.call is not None
        self.call()

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(delta.text for delta in self.deltas)


async def run(session: object, sink: Sink) -> list[Event]:
    """The events beside the sink."""
    return [event async for event in session.run(sink)]  # type: ignore[attr-defined]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def test_deltas_go_into_the_sink_and_the_rest_are_events(stage: Stage) -> None:
    """Start and end are events, the text between them is written; counts are those of the tokens."""
    pair, basket = stage.boot(), Basket()
    session = stage.session(max_tokens=4)
    running = asyncio.ensure_future(run(session, basket))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 10, 11, started=True)
    await until(lambda: basket.text == "10 11 ")
    say(pair, submit.request, 12, 13, finish=Finish.LENGTH)
    started, finished = await running
    assert started == Started(3, 0)
    assert finished == Finished(FinishReason.LENGTH, 3, 0, 4)
    assert basket.text == "10 11 12 13 "
    assert [token for delta in basket.deltas for token in delta.token_ids] == [10, 11, 12, 13]
    assert basket.call is None, "nothing is called back after the end"


async def test_a_reader_who_pauses_gets_everything_when_he_goes_on(stage: Stage) -> None:
    """Nothing is written while the sink is not ready; what came meanwhile, the end included, follows in one piece."""
    pair, basket = stage.boot(), Basket()
    running = asyncio.ensure_future(run(stage.session(max_tokens=4), basket))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 10, started=True)
    await until(lambda: basket.text == "10 ")
    basket.open = False
    say(pair, submit.request, 11, 12, 13, finish=Finish.LENGTH)
    link = stage.model.engine
    assert link is not None
    await until(lambda: not link.live)
    await asyncio.sleep(0.02)
    assert basket.text == "10 " and not running.done()
    basket.reopen()
    assert isinstance((await running)[-1], Finished)
    assert basket.text == "10 11 12 13 "


async def test_a_reader_who_never_goes_on_loses_his_request_only(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the bound of unread tokens his request is aborted; his neighbour's answer is complete."""
    monkeypatch.setattr(engine_link, "MAX_UNREAD_TOKENS", 4)
    pair, stuck, other = stage.boot(), Basket(), Basket()
    first = asyncio.ensure_future(run(stage.session(max_tokens=50), stuck))
    slow = await hear(pair, Submit)
    second = asyncio.ensure_future(run(stage.session(max_tokens=2), other))
    quick = await hear(pair, Submit)
    say(pair, slow.request, 10, started=True)
    await until(lambda: stuck.text == "10 ")
    stuck.open = False
    say(pair, slow.request, *range(20, 30))
    say(pair, quick.request, 40, 41, started=True, finish=Finish.LENGTH)
    with pytest.raises(UnavailableError, match="not read fast enough"):
        await first
    assert isinstance((await second)[-1], Finished) and other.text == "40 41 "
    assert (await hear(pair, Abort)).request == slow.request


async def test_the_deadline_ends_a_reader_who_pauses(stage: Stage) -> None:
    """A sink that is never ready again does not keep a request alive beyond its deadline."""
    pair, basket = stage.boot(), Basket()
    loop_now = asyncio.get_running_loop().time()
    running = asyncio.ensure_future(run(stage.session(max_tokens=50, deadline=loop_now + 0.3), basket))
    submit = await hear(pair, Submit)
    basket.open = False
    say(pair, submit.request, 10, started=True)
    with pytest.raises(DeadlineExceededError):
        await running


async def test_a_stop_string_ends_the_answer_inside_a_batch(stage: Stage) -> None:
    """Tokens behind it are neither written nor charged, and the engine is told to stop."""
    pair, basket = stage.boot(), Basket()
    session = stage.session(max_tokens=50, stop=("12",))
    running = asyncio.ensure_future(run(session, basket))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 10, 11, 12, 13, 14, started=True)
    finished = (await running)[-1]
    assert finished == Finished(FinishReason.STOP, 3, 0, 3, "12")
    assert basket.text == "10 11 "
    assert (await hear(pair, Abort)).request == submit.request


async def test_what_came_before_a_death_is_written_first(stage: Stage) -> None:
    """Tokens that the engine had sent reach the reader; then he hears that it is gone."""
    pair, basket = stage.boot(), Basket()
    running = asyncio.ensure_future(run(stage.session(max_tokens=50), basket))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 10, started=True)
    await until(lambda: basket.text == "10 ")
    say(pair, submit.request, 11, 12)
    pair.guest.close()
    with pytest.raises(UnavailableError, match="may be sent again"):
        await running
    assert basket.text == "10 11 12 "


async def test_a_death_in_the_moment_of_the_first_token_is_told(stage: Stage) -> None:
    """First tokens and the engine's end that are read in one go wake the request once; it tells both, and does not wait
    for a second call that never comes."""
    pair, basket = stage.boot(), Basket()
    running = asyncio.ensure_future(run(stage.session(max_tokens=50), basket))
    submit = await hear(pair, Submit)
    say(pair, submit.request, 10, 11, started=True)
    pair.guest.close()
    # What a bell does that finds the pipe closed: an engine that will be looked at soon rings for nothing else.
    assert stage.model.engine is not None
    stage.model.engine._link._drain_last()
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError, match="may be sent again"):
            await running
    assert basket.text == "10 11 "


async def test_a_defect_of_one_sink_is_its_request_s_alone(stage: Stage) -> None:
    """An exception while writing ends that request and no other stream of the same pass."""
    pair, broken, whole = stage.boot(), Basket(), Basket()
    broken.error = RuntimeError("a defect")
    first = asyncio.ensure_future(run(stage.session(max_tokens=2), broken))
    one = await hear(pair, Submit)
    second = asyncio.ensure_future(run(stage.session(max_tokens=2), whole))
    two = await hear(pair, Submit)
    say(pair, one.request, 10, started=True)
    say(pair, two.request, 20, 21, started=True, finish=Finish.LENGTH)
    with pytest.raises(RuntimeError, match="a defect"):
        await first
    assert isinstance((await second)[-1], Finished) and whole.text == "20 21 "


@pytest.mark.parametrize(
    ("told", "cached", "found"),
    [((0, 16, 32), 64, (0, 16, 32)), ((16, 16, 1 << 31), 48, (16, 16, 16)), ((9, 9, 9), 0, (0, 0, 0))],
    ids=["honest", "too many", "nothing cached"],
)
def test_restored_tokens_are_part_of_the_cached(
    told: tuple[int, int, int], cached: int, found: tuple[int, ...]
) -> None:
    """What an engine says came back from each tier is cut to what it says is cached; the control is taken as it is."""
    assert restored_of(WireStarted(1, cached, 0, *told), cached) == found


def test_a_start_that_nobody_read_counts_what_came_back() -> None:
    """A caller who left before he read anything: what the engine said of the prompt is counted with the tokens that
    came, those from each tier too."""
    outcome = Outcome(input_tokens=64)
    stream = SimpleNamespace(engine_gone=None, received=3, started=WireStarted(1, 48, 0, 16, 0, 32))
    text = SimpleNamespace(reasoning_tokens=0)
    Follower([stream], [text], outcome, SimpleNamespace(), lambda _: None).charge()  # type: ignore[list-item, arg-type]
    assert (outcome.started, outcome.cached_tokens, outcome.output_tokens) == (True, 48, 3)
    assert outcome.restored_tokens == (16, 0, 32)
