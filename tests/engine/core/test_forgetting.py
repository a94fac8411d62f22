"""What an engine keeps of a request's tokens once it is over: nothing."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable

import pytest

from appliance.selftest.small_engine import small_engine, tenant_key
from engine.core.engine import Engine
from engine.core.token_ids import TokenIds
from engine.serve import _take
from isolation.ipc.codec import decode, encode
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling
from isolation.ipc.wiping import wipe

GREEDY = Sampling(temperature=0.0)
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.3)


def tokens(count: int, seed: int) -> array[int]:
    """Ids, none of them 0."""
    draw = random.Random(seed)
    return array("I", [draw.randrange(1, 97) for _ in range(count)])


def submitted(engine: Engine, submit: Submit) -> list[object]:
    """Have an engine take a message as its loop does; gives every list of the request's tokens there is then."""
    message = decode(encode(submit))
    assert isinstance(message, Submit)
    _take(engine, message, draining=False)
    return [message.token_ids, engine.scheduler._live.by_id[submit.request].token_ids]


def kept_of_rows(engine: Engine) -> list[object]:
    """What the runner keeps of its rows just now."""
    runner = engine.runner
    penalised = runner._sampler._penalties._rows.values()
    return [known for known in runner.batches._known if len(known)] + [row._ids for row in penalised]


def to_end(engine: Engine) -> None:
    """Run until all requests have ended."""
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("finish", ["end", "abort", "late"])
def test_ids_are_overwritten_at_the_end(retain: bool, finish: str) -> None:
    """However a request ends: its message, its tokens, the runner's row and the step's buffer hold zeros; while it
    runs all but the message and the buffer hold its ids."""
    now = [0]
    engine = small_engine()
    engine._clock_ns = lambda: now[0]
    submit = Submit(5, tenant_key(0), tokens(40, 1), 20, PENALISED, ignore_eos=True, retain=retain, deadline_us=1_000)
    message, known = submitted(engine, submit)
    for _ in range(3):
        engine.step()
    kept = kept_of_rows(engine)
    assert not any(message)
    assert list(known[:40]) == list(submit.token_ids)
    assert len(kept) == 2
    assert all(part.any() for part in kept)
    if finish == "abort":
        engine.abort(5)
    elif finish == "late":
        now[0] = 10_000_000
        engine.step()
    else:
        to_end(engine)
    assert not any(known)
    assert not any(part.any() for part in kept)
    assert not kept_of_rows(engine)
    assert not engine.runner.batches._token_ids.any()
    assert not engine.runner.batches._last.any()


def test_a_preempted_row_is_overwritten() -> None:
    """A request that is sent back leaves nothing in its row, and still gives what it gives alone."""
    alone = small_engine()
    submit = Submit(1, tenant_key(0), tokens(40, 2), 12, GREEDY, ignore_eos=True)
    expected = answers_of(alone, submit, lambda _: None)
    preempted = small_engine()
    seen: list[object] = []

    def send_back(engine: Engine) -> None:
        running = engine.scheduler._live.by_id[1]
        seen.extend(kept_of_rows(engine))
        engine.scheduler._live.preempt(running, running)

    assert answers_of(preempted, submit, send_back) == expected
    assert seen
    assert not any(part.any() for part in seen)


def answers_of(engine: Engine, submit: Submit, meddle: Callable[[Engine], None]) -> list[int]:
    """The tokens of a request; ``meddle`` is called once, after some steps."""
    engine.add(submit)
    found: list[int] = []
    for number in range(200):
        output = engine.step() if engine.has_work else None
        found += output.token_ids if output is not None else []
        if number == 5:
            meddle(engine)
    return found


def test_a_list_that_grows_is_the_list() -> None:
    """It holds what was appended, at any length, and its slices are plain arrays."""
    ids, expected = TokenIds.copy_of(array("I", [3, 4])), [3, 4]
    for number in range(1, 2_000):
        ids.append(number)
        expected.append(number)
    assert ids.tolist() == expected
    assert type(ids[1:4]) is array


@pytest.mark.parametrize("make", [TokenIds.copy_of, lambda ids: ids[:]])
def test_a_list_that_grows_leaves_nothing_behind(make: Callable[[array[int]], array[int]]) -> None:
    """The places that it grew out of hold none of its content; those of a plain array, which is the control, do."""
    ids = make(tokens(5_000, 3))
    wanted = ids[2_000:2_016].tobytes()
    left = []
    others = []
    for number in range(40_000):
        address, length = ids.buffer_info()
        before = address, 4 * length
        ids.append(number % 97 + 1)
        if ids.buffer_info()[0] != address:
            left.append(ctypes.string_at(*before).count(wanted))
        others.append(bytes(48))  # so that it cannot always grow in its place
    assert left, "it never moved"
    assert bool(sum(left)) is (type(ids) is array)


def test_wiping_keeps_the_length() -> None:
    """Any buffer, also one longer than the longest frame, is zeros of the same length."""
    for buffer in (array("I", [7] * 3_000_000), bytearray(b"x" * 17), array("I")):
        length = len(buffer)
        wipe(buffer)
        assert len(buffer) == length
        assert not any(memoryview(buffer).cast("B"))
