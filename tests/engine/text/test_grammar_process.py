"""Grammars in the text worker's own processes, over the real wire: masks, refusals, bombs, bounds and deaths."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from engine.text.grammar_child import MEMORY_BYTES
from engine.text.grammar_keeper import TENANT_GRAMMARS
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.grammar import Advance, CloseGrammar, GrammarKind, Masks, MaskState, OpenGrammar
from isolation.ipc.messages import Failed, FailureCode, TextReady
from isolation.ipc.text import Encode, Encoded, SourceKind
from tests.engine.text.test_process import configured, next_message, started

ALPHA, BETA = bytes(16), bytes([1]) * 16

BOMBS = {
    "size": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {"pattern": "a{9}b"} for i in range(9_000)}}),
    ),
    "regex": (GrammarKind.REGEX, "a?" * 20_000 + "a" * 20_000),
    "nesting": (GrammarKind.LARK, "start: " + "(" * 5_000 + '"a"' + ")" * 5_000),
    "recursion": (GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#"})),
    "doubling": (
        GrammarKind.LARK,
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "x"\n',
    ),
}
"""Grammars that nobody may be kept waiting for."""


def opened(request: int, source: str, *, kind: GrammarKind = GrammarKind.REGEX, tenant: bytes = ALPHA) -> OpenGrammar:
    """A grammar for a request."""
    return OpenGrammar(request, tenant, kind, source.encode())


def allowed(masks: Masks, row: int = 0) -> list[int]:
    """Ids of one row of masks."""
    words = np.frombuffer(masks.words, dtype=np.uint8)[row * masks.width : (row + 1) * masks.width]
    return np.unpackbits(words, bitorder="little").nonzero()[0].tolist()


def advanced(channel: Channel, request: int, token_id: int) -> Masks:
    """The row after one token."""
    channel.send(Advance(array("Q", [request]), array("I", [token_id])))
    answer = next_message(channel)
    assert isinstance(answer, Masks)
    return answer


def walk(channel: Channel, masks: Message, request: int, entries, rng: random.Random, most: int = 200) -> bytes:
    """Follow a request by random allowed tokens until its grammar lets it end."""
    text = b""
    for position in range(most):
        assert isinstance(masks, Masks)
        assert (list(masks.requests), list(masks.positions)) == ([request], [position])
        ids = allowed(masks)
        if masks.states[0] == MaskState.ACCEPTING:
            return text
        token_id = rng.choice(ids)
        text += entries[token_id]
        masks = advanced(channel, request, token_id)
    raise AssertionError("the output does not come to an end")


def test_masks_lead_to_what_the_grammar_says(tmp_path, root, mini_dir, mini) -> None:
    """Random tokens under the masks of each kind of grammar give outputs that it admits, and different ones."""
    cases = {
        (GrammarKind.REGEX, "[0-9]{3}-[a-f]{4}"): lambda text: len(text) == 8 and text[3] == "-",
        (GrammarKind.CHOICE, '["yes", "no", "it\\"s"]'): lambda text: text in ("yes", "no", 'it"s'),
        (GrammarKind.LARK, 'start: "(" N ("," N){0,2} ")"\nN: /[0-9]{1,3}/'): lambda text: text.startswith("("),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}',
        ): json.loads,
    }
    rng = random.Random(5)
    with started(tmp_path, root) as (channel, _process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        for base, ((kind, source), admits) in enumerate(cases.items()):
            texts = set()
            for request in range(10 * base, 10 * base + 6):
                channel.send(opened(request, source, kind=kind))
                text = walk(channel, next_message(channel), request, mini._vocabulary.entries, rng).decode()
                assert admits(text), text
                texts.add(text)
                channel.send(CloseGrammar(request))
            assert len(texts) > 1


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_fails_its_own_request(name: str, tmp_path, root, mini_dir) -> None:
    """A grammar that takes too much is refused; prompts and other tenants' masks are answered meanwhile and after."""
    kind, source = BOMBS[name]
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.send(opened(1, "[ab]*", tenant=BETA))
        assert isinstance(next_message(channel), Masks)
        channel.send(opened(2, source[: 256 << 10], kind=kind))
        between = 0
        for number in range(10_000):
            channel.send(Advance(array("Q", [1]), array("I", [97 - 33])))
            channel.send(Encode(100 + number, SourceKind.TEXT, b"hello", 64))
            answers = [next_message(channel), next_message(channel)]
            failed = [answer for answer in answers if isinstance(answer, Failed)]
            between += sum(isinstance(answer, Masks | Encoded) for answer in answers)
            if failed:
                break
        [failure] = failed
        # A crowded machine does not get so far that it could say more than that it had no time.
        assert failure.request == 2
        assert failure.code in (FailureCode.INVALID, FailureCode.TOO_LONG, FailureCode.DEADLINE)
        assert between >= 1
        assert process.poll() is None
        channel.send(opened(3, "[xy]", tenant=BETA))
        # Behind those to the last questions of the loop.
        rest = (next_message(channel) for _ in range(4))
        assert any(isinstance(answer, Masks) and 3 in answer.requests for answer in rest)


def test_a_grammar_that_gets_too_complex_breaks_its_own_row(tmp_path, root, mini_dir) -> None:
    """A grammar that compiles, and explodes when it is followed, ends as a broken row with an empty mask."""
    with started(tmp_path, root) as (channel, _process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.send(opened(1, "(" * 60 + "a" + "{1,99})" * 60))
        masks = next_message(channel)
        for _ in range(20):
            assert isinstance(masks, Masks)
            if masks.states[0] == MaskState.BROKEN:
                break
            masks = advanced(channel, 1, allowed(masks)[0])
        assert masks.states[0] == MaskState.BROKEN
        assert not allowed(masks)


def test_a_grammar_is_compiled_once_a_tenant(tmp_path, root, mini_dir) -> None:
    """The same source serves a tenant's next request from the process there is; another tenant gets its own."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        forker = forker_of(process.pid)
        for request, tenant in ((1, ALPHA), (2, ALPHA), (3, BETA)):
            channel.send(opened(request, "[ab]+", tenant=tenant))
            assert isinstance(next_message(channel), Masks)
            wait_children(forker, 3 if tenant == BETA else 2)


def test_a_tenant_has_so_many_grammars(tmp_path, root, mini_dir) -> None:
    """One grammar more than a tenant may use at once is refused; when one ends, its place is taken."""
    with started(tmp_path, root) as (channel, _process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        for request in range(TENANT_GRAMMARS):
            channel.send(opened(request, f"a{{{request + 1}}}"))
            assert isinstance(next_message(channel), Masks)
        channel.send(opened(50, "b"))
        refused = next_message(channel)
        assert isinstance(refused, Failed)
        assert refused.code is FailureCode.OVERLOADED
        channel.send(opened(51, "b", tenant=BETA))
        assert isinstance(next_message(channel), Masks)
        channel.send(CloseGrammar(0))
        channel.send(opened(52, "b"))
        assert isinstance(next_message(channel), Masks)


def test_a_dead_grammar_breaks_its_own_rows(tmp_path, root, mini_dir) -> None:
    """When a grammar's process ends, the requests that follow it are told so, and others go on."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.send(opened(1, "[ab]+"))
        first = next_message(channel)
        forker = forker_of(process.pid)
        victim = min(children(forker))
        channel.send(opened(2, "[ab]+", tenant=BETA))
        second = next_message(channel)
        os.kill(victim, signal.SIGKILL)
        broken = next_message(channel)
        assert isinstance(broken, Masks)
        assert (list(broken.requests), list(broken.states)) == ([1], [MaskState.BROKEN])
        assert isinstance(first, Masks)
        assert isinstance(second, Masks)
        assert advanced(channel, 2, allowed(second)[0]).states[0] == MaskState.ACCEPTING


def test_its_address_space_has_a_bounded_room(tmp_path, root, mini_dir) -> None:
    """A grammar's process may take what its forker has and ``MEMORY_BYTES``; its forker is not bound so."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.send(opened(1, "[ab]+"))
        assert isinstance(next_message(channel), Masks)
        forker = forker_of(process.pid)
        held = int(Path(f"/proc/{forker}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits = resource.prlimit(min(children(forker)), resource.RLIMIT_AS)
        assert limits == (held + MEMORY_BYTES, held + MEMORY_BYTES)
        assert resource.prlimit(forker, resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY


def test_no_process_is_left_when_the_host_goes(tmp_path, root, mini_dir) -> None:
    """The keeper and the grammars' processes end with the worker."""
    with started(tmp_path, root) as (channel, process):
        assert isinstance(configured(channel, mini_dir), TextReady)
        channel.send(opened(1, "[ab]+"))
        assert isinstance(next_message(channel), Masks)
        forker = forker_of(process.pid)
        watched = [os.pidfd_open(pid) for pid in (*children(process.pid), forker, *children(forker))]
        channel.close()
        process.wait(60)
        import select

        for fd in watched:
            assert select.select([fd], [], [], 60)[0]
            os.close(fd)


def forker_of(worker: int) -> int:
    """The process that forks for a text worker's keeper, once it is there."""
    [keeper] = children(worker)
    wait_children(keeper, 1)
    return children(keeper)[0]


def wait_children(pid: int, count: int) -> None:
    """Until a process has so many children: the grammars' processes there are, and the spare one."""
    deadline = time.monotonic() + 30
    while len(children(pid)) != count:
        assert time.monotonic() < deadline, children(pid)
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
