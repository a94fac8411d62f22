"""Loads: their words, what they plan, and the bound of prefix reuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from appliance.operator.bench.errors import LoadSpecError
from appliance.operator.bench.workload import TOKEN_IDS, Planned, Shape, parse_load, plan, warm_up
from tests.appliance.operator.bench.prefix_bound import prefix_bound

SHAPE = Shape(prompt_tokens=20, output_tokens=4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "closed",
        "closed:0",
        "closed:x",
        "closed:1001",
        "open:0",
        "open:-1",
        "open:nan",
        "open:",
        "trace:",
        "race:1",
        "closed:4,requests=0",
        "closed:4,requests=x",
        "closed:4,colour=2",
        "trace:f,speed=-1",
        "engine:x",
        "engine:0",
    ],
)
def test_words_that_are_no_load(text: str) -> None:
    """Each is refused with the words quoted."""
    with pytest.raises(LoadSpecError) as raised:
        parse_load(text)
    assert repr(text) in str(raised.value)


def test_words_of_a_load() -> None:
    """Kinds, numbers and options; a trace's name is short in tables."""
    assert parse_load("closed:16").streams == 16
    assert parse_load("open:2.5").rate == 2.5
    assert parse_load("engine:1,8").batches == (1, 8)
    assert parse_load("engine").batches == (1, 4, 16, 64)
    trace = parse_load("trace:a/b/c.csv,speed=20,requests=10")
    assert (trace.name, trace.path) == ("trace:c.csv,speed=20,requests=10", Path("a/b/c.csv"))
    assert trace.option("speed", 1) == 20 and trace.option("prompt", 1) == 1


def test_long_names_have_a_label() -> None:
    """What a table of 80 columns has room for, with the speed of a trace, which is what differs between its rows."""
    assert parse_load("closed:16,requests=9").label == "closed:16,requests=9"
    labels = {parse_load(f"trace:a/mooncake_conversation_trace.jsonl,speed={speed}").label for speed in (2.5, 40)}
    assert labels == {"trace:mooncake_conv.. x2.5", "trace:mooncake_conve.. x40"} and set(map(len, labels)) == {26}
    assert parse_load("closed:1000,requests=16000000").label == "closed:1000,requests=160.."


def test_plans_are_the_same_for_the_same_seed() -> None:
    """Lengths are exact, tenants take turns, another seed gives other prompts, warm-up shares no prefix."""
    load = parse_load("closed:4")
    plans = plan(load, SHAPE, tenants=3, seed=1)
    assert plans == plan(load, SHAPE, tenants=3, seed=1) != plan(load, SHAPE, tenants=3, seed=2)
    assert len(plans) == 32 and [one.tenant for one in plans[:4]] == [0, 1, 2, 0]
    assert {len(one.prompt) for one in plans} == {20}
    assert all(token in TOKEN_IDS for one in plans for token in one.prompt)
    assert prefix_bound(plans, 2) < 10
    warm = warm_up(load, SHAPE, tenants=3, seed=1)
    assert len(warm) == 8 and not {one.prompt[:8] for one in warm} & {one.prompt[:8] for one in plans}


def test_arrivals_of_an_open_loop_have_the_rate_asked_for() -> None:
    """Two thousand of 50 a second take 40 seconds, give or take the deviation of a Poisson process."""
    plans = plan(parse_load("open:50,requests=2000"), SHAPE, tenants=1, seed=0)
    gaps = [later.at_s - one.at_s for one, later in itertools.pairwise(plans)]
    assert plans[-1].at_s == pytest.approx(40, rel=0.07)
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


def test_equal_hash_ids_become_equal_tokens(tmp_path: Path) -> None:
    """A trace's shared prefix is a shared prefix of tokens, for every tenant alike, and what follows differs."""
    rows = [
        {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 1_000, "input_length": 23, "output_length": 3, "hash_ids": [7, 8, 5]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    first, second = plan(parse_load(f"trace:{path},speed=4"), SHAPE, tenants=2, seed=0)
    assert first.prompt[:16] == second.prompt[:16] and first.prompt[16:] != second.prompt[16:20]
    assert (len(first.prompt), len(second.prompt), second.at_s) == (20, 23, 0.25)
    with pytest.raises(LoadSpecError, match="context"):
        plan(parse_load(f"trace:{path},context=10"), SHAPE, tenants=1, seed=0)


def test_the_bound_counts_whole_blocks_of_one_tenant_only() -> None:
    """By hand: a second equal prompt finds its whole blocks but never the last token; another tenant finds none."""
    prompt = tuple(range(10))
    ask = [Planned(0, 0, prompt, 1), Planned(1, 0, prompt, 1), Planned(2, 1, prompt, 1)]
    assert prefix_bound(ask, 4) == 8
    assert prefix_bound(ask, 5) == 5
    assert prefix_bound(ask, 4, keep=[1]) == 0
    assert prefix_bound([Planned(0, 0, prompt, 1), Planned(1, 0, (*prompt[:4], 99, *prompt[5:]), 1)], 4) == 4


def test_the_bound_of_the_real_trace(shared_data: Path) -> None:
    """In blocks of 8 the scaled trace repeats 19.7 % of its tokens, which is the published figure; in 16 far less."""
    path = shared_data / "traces" / "mooncake_conv_scaled64_600.jsonl"
    plans = plan(parse_load(f"trace:{path}"), SHAPE, tenants=1, seed=0)
    total = sum(len(one.prompt) for one in plans)
    assert 100 * prefix_bound(plans, 8) / total == pytest.approx(19.7, abs=0.05)
    assert 100 * prefix_bound(plans, 16) / total == pytest.approx(14.6, abs=0.05)
