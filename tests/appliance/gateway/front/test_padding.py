"""Padded answers over HTTP: what an observer of the connection sees is the same whatever the answer says."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from dataclasses import dataclass

import openai
import pytest

from appliance.common.errors import InvalidRequestError, UnavailableError
from appliance.gateway.front.padding import Padding, cut, fill_events, merged
from appliance.gateway.generate_request import CallDelta, Delta, Finished, FinishReason, Started, TokenLogprob
from tests.appliance.gateway.front.support import Running, Step, logprob_script, post, serving, text_script

QUICK = Padding(tick_s=0.02, record_bytes=512, first_records=4, growth=4, first_bytes=1_024)
CHAT = {"model": "athanor-mini", "messages": [{"role": "user", "content": "x"}]}


@dataclass
class Seen:
    """What came over a connection: pieces with their moments."""

    pieces: list[tuple[float, bytes]]

    @property
    def head(self) -> bytes:
        """Status line and headers."""
        return self.whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    @property
    def whole(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def chunks(self) -> list[bytes]:
        """The body's chunks (RFC 9112, section 7.1), the last, empty one left out."""
        rest, found = self.whole[len(self.head) :], []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        assert found.pop() == b""
        return found

    @property
    def data(self) -> list[str]:
        """The events' data, by the rules of the event stream format."""
        lines = b"".join(self.chunks).decode().split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def text(self) -> str:
        """The answer's text."""
        parsed = [json.loads(data) for data in self.data if data != "[DONE]"]
        return "".join(choice["delta"].get("content", "") for one in parsed for choice in one.get("choices", ()))


async def capture(running: Running, script: list[Step], **fields: object) -> Seen:
    """One request and all that comes back, piece by piece."""
    running.service.script = script
    body = json.dumps(CHAT | {"stream": True} | fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.front_ends.http_port)
    writer.write(post("/v1/chat/completions", body, running.authorization))
    pieces = []
    async with asyncio.timeout(20):
        while piece := await reader.read(1 << 20):
            pieces.append((time.monotonic(), piece))
    writer.close()
    return Seen(pieces)


@pytest.fixture
async def padded() -> object:
    """Front ends whose tenant acme has padded answers, with short ticks."""
    async with serving(padding=QUICK) as running:
        running.service.padded = {"acme"}
        yield running


SHORT = text_script("yes")
LONG = [Started(700, 320), *(Delta(f"word{n} ", (n,)) for n in range(40)), Finished(FinishReason.LENGTH, 700, 320, 40)]
SLOW = [Started(7, 3), Delta("a", (1,)), 0.03, Delta("b" * 30, (2,)), 0.02, Finished(FinishReason.STOP, 7, 3, 2)]


async def test_streams_of_any_content_look_alike(padded: Running) -> None:
    """One word, forty words and slow ones: the same size of head, the same number of records, each of the same size;
    and the text is whole."""
    seen = [await capture(padded, script, stream_options={"include_usage": True}) for script in (SHORT, LONG, SLOW)]
    assert [len(one.head) for one in seen] == [len(seen[0].head)] * 3
    assert [[len(chunk) for chunk in one.chunks] for one in seen] == [[512] * 4, [512] * 4, [512] * 4]
    assert [one.text for one in seen] == ["yes", "".join(f"word{n} " for n in range(40)), "a" + "b" * 30]
    assert all(one.data[-1] == "[DONE]" for one in seen)


async def test_without_the_class_they_do_not(padded: Running) -> None:
    """Control: the other tenant's streams differ in every respect."""
    padded.service.padded = {"globex"}
    short, long, slow = [await capture(padded, script) for script in (SHORT, LONG, SLOW)]
    assert len(short.chunks) != len(long.chunks)
    assert len({len(chunk) for chunk in slow.chunks}) > 1


async def test_records_leave_at_ticks(padded: Running) -> None:
    """Records do not leave within half a tick, whether the tokens come at once or not at all for a while."""
    pause: list[Step] = [Started(7, 3), 0.1, *LONG[1:20], 0.1, LONG[-1]]
    seen = await capture(padded, pause)
    assert len(seen.chunks) == 16
    moments = [moment for moment, _ in seen.pieces]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert sum(gap < QUICK.tick_s / 2 for gap in gaps) <= 5  # a busy machine may hold some back until the next


async def test_the_end_is_told_at_the_end(padded: Running) -> None:
    """Text is there early; reason, usage and end mark come with the last records: nobody acts on them before."""
    seen = await capture(padded, SHORT, stream_options={"include_usage": True})
    early, late = b"".join(seen.chunks[:2]), b"".join(seen.chunks[2:])
    assert b"yes" in early
    for word in (b'"finish_reason":"stop"', b'"completion_tokens"', b"[DONE]"):
        assert word not in early
        assert word in late


async def test_more_than_a_record_waits_for_the_next_and_the_number_is_one_of_few(padded: Running) -> None:
    """Text of several records comes through whole; their number is the next that is allowed."""
    script = [Started(7, 3), Delta("x" * 3_000, (1,)), Finished(FinishReason.STOP, 7, 3, 1)]
    seen = await capture(padded, script)
    assert [len(chunk) for chunk in seen.chunks] == [512] * 16
    assert seen.text == "x" * 3_000


async def test_an_error_in_the_middle_looks_like_an_end(padded: Running) -> None:
    """A session that fails while it streams: as many records as of one that does not, the error in the last, no end
    mark."""
    fails: list[Step] = [Started(7, 3), Delta("part", (1,)), UnavailableError("the engine ended", retry_after_s=1.0)]
    seen, good = await capture(padded, fails), await capture(padded, SHORT)
    assert [len(chunk) for chunk in seen.chunks] == [len(chunk) for chunk in good.chunks]
    assert len(seen.head) == len(good.head)
    assert json.loads(seen.data[-1])["error"]["code"] == "server_is_overloaded"
    assert "[DONE]" not in seen.data


async def test_answers_that_are_not_streamed_have_few_sizes_and_moments(padded: Running) -> None:
    """Collected answers are filled up to one of a few sizes and leave at one of a few moments; refusals are filled up
    too; the JSON is what it was."""
    began = time.monotonic()
    seen = [await capture(padded, script, stream=False) for script in (SHORT, LONG)]
    assert time.monotonic() - began >= 2 * 4 * QUICK.tick_s
    bodies = [one.whole.partition(b"\r\n\r\n")[2] for one in seen]
    assert [len(one.whole) for one in seen] == [len(seen[0].whole)] * 2
    assert [len(body) for body in bodies] == [1_024, 1_024]
    assert json.loads(bodies[0])["choices"][0]["message"]["content"] == "yes"
    refused = await capture(padded, [InvalidRequestError("no such thing", param="model")], stream=False)
    assert len(refused.whole.partition(b"\r\n\r\n")[2]) == 1_024


async def test_the_official_client_reads_a_padded_stream(padded: Running) -> None:
    """Padding is no event to OpenAI's client: the same chunks in the same order, log-probabilities too."""
    client = openai.AsyncOpenAI(base_url=padded.base_url + "/v1", api_key=padded.key, max_retries=0)
    async with client:
        padded.service.script = logprob_script()
        stream = await client.chat.completions.create(**CHAT, stream=True, logprobs=True, top_logprobs=2)
        chunks = [chunk async for chunk in stream]
    scored = [choice.logprobs for one in chunks for choice in one.choices if choice.logprobs]
    assert [entry.bytes for one in scored for entry in one.content] == [[97], [0xC3], [0xA9]]
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "a\u00e9"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_deadline_ends_the_padding(padded: Running) -> None:
    """An answer that is complete is told by the caller's deadline, however many records are still to come."""
    padded.service.script = SHORT
    body = json.dumps(CHAT | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", padded.front_ends.http_port)
    writer.write(post("/v1/chat/completions", body, padded.authorization, "x-request-timeout-ms: 60"))
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert b"[DONE]" in answer
    assert len(re.findall(rb"\r\n200\r\n", answer)) < 4


async def test_a_drain_keeps_nobody_waiting_for_padding() -> None:
    """An appliance that stops ends padded streams as soon as their answers are complete."""
    slow = Padding(tick_s=0.02, record_bytes=512, first_records=4_000)
    async with serving(padding=slow) as running:
        running.service.padded = {"acme"}
        asked = asyncio.ensure_future(capture(running, SHORT))
        await running.service.closed.wait()
        began = time.monotonic()
        await running.front_ends.stop(10.0)
        assert "[DONE]" in (await asked).data
        assert time.monotonic() - began < 5


async def test_who_leaves_is_not_padded_on(padded: Running) -> None:
    """A client that goes away in the middle ends its session, and nothing is written on."""
    padded.service.script = [Started(7, 3), Delta("a", (1,)), asyncio.Event()]
    body = json.dumps(CHAT | {"stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", padded.front_ends.http_port)
    writer.write(post("/v1/chat/completions", body, padded.authorization))
    await reader.read(100)
    writer.close()
    async with asyncio.timeout(20):
        await padded.service.closed.wait()


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4, 100])
def test_a_record_is_filled_to_the_byte(left: int) -> None:
    """However many bytes are missing, the record has its size and ends so that an event may follow."""
    event = b'data: {"a":1}\n\n'
    filled = fill_events(event, len(event) + left)
    assert len(filled) == len(event) + left
    assert filled.startswith(event)
    assert filled.endswith(b"\n")


def test_deltas_are_joined_by_choice_and_cut_to_fit() -> None:
    """What several steps said is said once; what is too long is said in parts that say the same."""
    entry = TokenLogprob(1, b"a", -1.0)
    deltas = [Delta("ab", (1, 2), (entry, entry), 1), Delta("x", (9,), (), 0), Delta("c", (3,), (entry,), 1)]
    joined = merged(deltas)
    assert joined == [Delta("abc", (1, 2, 3), (entry,) * 3, 1), Delta("x", (9,), (), 0)]
    parts = list(cut(joined[0], lambda one: len(one.token_ids) <= 1 and len(one.text) <= 1))
    assert len(parts) > 1
    assert "".join(part.text for part in parts) == "abc"
    assert [token for part in parts for token in part.token_ids] == [1, 2, 3]
    assert sum(len(part.logprobs) for part in parts) == 3


def test_sizes_grow_by_the_rule() -> None:
    """Numbers of records and sizes of answers are few, and never less than what is needed."""
    padding = Padding()
    assert [padding.records(needed) for needed in (0, 32, 33, 128, 129)] == [32, 32, 128, 128, 512]
    assert [padding.answer_bytes(needed) for needed in (1, 4_096, 4_097)] == [4_096, 4_096, 16_384]
    assert padding.size(choices=16, scored=True) == 64 << 10


def test_calls_and_reasoning_are_joined_and_cut_to_fit() -> None:
    """Whatever the size, the parts fit, and together they say what the delta said; what fits is not cut."""
    delta = Delta(
        "",
        reasoning="thought" * 9,
        calls=(
            CallDelta(0, arguments='{"city": ' + '"Paris"' * 9),
            CallDelta(0, refused=True),
            CallDelta(1, "now", "call_b", "{}"),
        ),
    )

    def said(deltas: list[Delta]) -> list[object]:
        whole = merged(deltas)
        return [[(one.reasoning, one.calls) for one in whole]]

    def size(one: Delta) -> int:
        return len(one.reasoning) + sum(len(call.arguments) for call in one.calls)

    for most in (1, 3, 20, 200):
        parts = list(
            cut(delta, lambda one: len(one.reasoning) + sum(len(call.arguments) for call in one.calls) <= most)
        )
        assert said(parts) == said([delta])
        assert (len(parts) == 1) == (most == 200)
    (only,) = cut(Delta("", calls=delta.calls[2:]), lambda _: True)
    assert only.calls == delta.calls[2:]
