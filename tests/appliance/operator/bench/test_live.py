"""What is told of a model of a running appliance: bounds, memory, and levels that cannot be measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from appliance.operator.bench import live
from appliance.operator.bench.client import Client
from appliance.operator.bench.errors import TargetError
from appliance.operator.bench.workload import Planned, Shape
from appliance.operator.speed import most_tokens_per_s, read_speed

SCRAPE = """\
# TYPE athanor_sandbox_memory_bytes gauge
athanor_sandbox_memory_bytes{athanor_role="engine",gen_ai_request_model="llama"} 3.0e+08
athanor_sandbox_memory_bytes{athanor_role="text",gen_ai_request_model="llama"} 9.0e+08
athanor_sandbox_memory_bytes{athanor_role="engine",gen_ai_request_model="other"} 8.0e+08
athanor_sandbox_memory_limit_bytes{athanor_role="engine",gen_ai_request_model="llama"} 4.0e+09
athanor_sandbox_last_away_seconds{athanor_role="engine",gen_ai_request_model="llama"} 5.5
"""


def test_a_scrape_tells_the_engine_s_memory() -> None:
    """The largest value seen of the model's engine, not of its text sandbox or of another model; an empty scrape
    changes nothing."""
    memory = live.EngineMemory()
    live.look(memory, "llama", SCRAPE)
    live.look(memory, "llama", SCRAPE.replace("3.0e+08", "2.0e+08"))
    live.look(memory, "llama", "")
    assert (memory.most, memory.limit, memory.loaded_s) == (300_000_000, 4_000_000_000, 5.5)
    live.look(memory, "llama", SCRAPE.replace("3.0e+08", "5.0e+08"))
    assert memory.most == 500_000_000


def test_the_bound_is_memory_over_weights(tmp_path: Path) -> None:
    """By the speed of the machine's card, for all streams together; without a usable card there is none."""
    card = tmp_path / "card"
    assert read_speed(card) is None
    for value in ({}, [], {"memory_read_gb_s_all_cores": None}, {"memory_read_gb_s_all_cores": True}):
        card.write_text(json.dumps(value))
        assert read_speed(card) is None
    card.write_text('{"memory_read_gb_s_all_cores": 20.5}')
    speed = read_speed(card)
    assert speed == 20.5e9
    assert most_tokens_per_s(1_000_000_000, speed) == 20.5
    assert most_tokens_per_s(1_000_000_000, speed, 4) == 82.0
    assert most_tokens_per_s(0, speed) is None
    assert most_tokens_per_s(1, None) is None


def test_requests_ask_for_low_priority() -> None:
    """Each request of the measurement names the tier; those of ``athanor bench`` name none."""
    planned = Planned(0, 0, (8, 9), 4)
    assert b'"service_tier":"flex"' in Client("http://127.0.0.1:1", "m", ("k",), tier=live.LOW).render(planned)
    assert b"service_tier" not in Client("http://127.0.0.1:1", "m", ("k",)).render(planned)


def test_nobody_there_is_told() -> None:
    """A level of which no request succeeds ends the measurement with the kinds of failure."""
    client = Client("http://127.0.0.1:1", "m", ("k",))
    with pytest.raises(TargetError, match="no request succeeded: connect"):
        asyncio.run(live.measure(client, Shape(4, 4), lambda _: None, lambda _: None))


def test_a_level_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes requests and never answers: the level ends at its limit, with the reason."""
    monkeypatch.setattr(live, "LEVEL_S", 0.2)

    async def run() -> None:
        async def ignore(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await reader.read()

        server = await asyncio.start_server(ignore, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", "m", ("k",))
        with pytest.raises(TargetError, match=r"1 streams gave no 4 answers in 0\.2 s"):
            await live.measure(client, Shape(4, 4), lambda _: None, lambda _: None)
        client.close()
        server.close()

    asyncio.run(run())
