"""What structured output costs: masks, opening a grammar, bombs beside other streams, the keeper's process.

    python bench/masks.py [--tokenizer FILE] [--ids N] [--sandbox]

``--tokenizer`` is a tokenizer.json (default: the embedded model's); ``--sandbox`` runs the text worker in gVisor.
Masks are measured by processor time of this process, the rest as seen over the wire, in wall time beside a control.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.backends.common.masks import MaskedLogits
from engine.config import TextConfig
from engine.core.scheduler.plan import RowMask
from engine.text.files import read_text_files
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.token_bytes import Words, build_tokenizer
from engine.text.worker import TextWorker
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.spec import Limits, Mount, SandboxSpec
from isolation.image.python_rootfs import python_rootfs
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.grammar import Advance, CloseGrammar, GrammarKind, Masks, MaskState, OpenGrammar
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, Failed, Role, TextReady
from isolation.ipc.segment import standard_layout
from isolation.ipc.text import Encode, Encoded, SourceKind

ROOT = Path(__file__).resolve().parents[1]
SCHEMAS = ROOT / "tests" / "engine" / "text" / "schemas"
ALPHA, BETA = bytes(16), bytes([1]) * 16
PATIENCE_S = 60.0
STEPS = 60

BOMBS = {
    "256 KiB of schema": (
        GrammarKind.JSON_SCHEMA,
        json.dumps({"properties": {f"p{i}": {"type": "string", "pattern": f"a{{{i % 50}}}b"} for i in range(4_500)}}),
    ),
    "catastrophic regex": (GrammarKind.REGEX, "a?" * 20_000 + "a" * 20_000),
    "recursive schema": (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    "doubling Lark": (
        GrammarKind.LARK,
        "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(60)) + 'T60: "x"\n',
    ),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "images/mini/athanor-mini/tokenizer.json")
    parser.add_argument("--ids", type=int, default=128_000, help="ids of the vocabulary at most, for the masks alone")
    parser.add_argument("--sandbox", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ath-", dir="/tmp") as folder:
        model = Path(folder) / "model"
        model.mkdir(mode=0o755)
        Path(folder).chmod(0o755)
        (model / "tokenizer.json").write_bytes(options.tokenizer.read_bytes())
        (model / "tokenizer.json").chmod(0o644)
        mask_costs(TextWorker(read_text_files(model), TextConfig(model_dir=str(model))), options.ids)
        with worker(model, sandboxed=options.sandbox) as channel:
            over_the_wire(channel)
    return 0


def mask_costs(worker: TextWorker, most_ids: int) -> None:
    """Processor time of a mask in a grammar's process, and of applying it in the engine."""
    words = worker.words()
    assert words is not None
    words = Words(words.entries[:most_ids], lambda _text: [])
    began = time.process_time()
    tokenizer = build_tokenizer(words)
    print(f"vocabulary {len(words.entries):,} ids; building the tokenizer {time.process_time() - began:.2f} s")
    drawn: list[float] = []
    written: list[float] = []
    opens = []
    for path in sorted(SCHEMAS.glob("*.json")):
        began = time.process_time()
        grammar = CompiledGrammar(tokenizer, GrammarKind.JSON_SCHEMA, path.read_bytes(), words.mask_bytes)
        opens.append(time.process_time() - began)
        text = walked(grammar, words, random.Random(path.stem), drawn)
        ids = tokenizer.greedy_tokenize(text.decode("utf-8", "ignore"))
        grammar.open(2)
        for token_id in ids:
            began = time.process_time()
            grammar.advance(2, token_id)
            written.append(1e6 * (time.process_time() - began))
    print(f"masks, tokens drawn from all that are allowed: {spread(drawn)}")
    print(f"masks, the same answers in their longest tokens: {spread(written)}")
    print(f"compiling: mean {1e3 * statistics.fmean(opens):.1f} ms, most {1e3 * max(opens):.1f}")
    apply_costs(len(words.entries), words.mask_bytes)


def walked(grammar: CompiledGrammar, words: Words, rng: random.Random, costs: list[float]) -> bytes:
    """The text of a random answer, and what each of its masks cost."""
    row = grammar.open(1)
    text = b""
    for _ in range(STEPS):
        ids = np.unpackbits(np.frombuffer(row.words, dtype=np.uint8), bitorder="little").nonzero()[0]
        if row.state is not MaskState.OPEN or not len(ids):
            break
        token_id = int(rng.choice(ids))
        text += words.entries[token_id]
        began = time.process_time()
        following = grammar.advance(1, token_id)
        costs.append(1e6 * (time.process_time() - began))
        assert following is not None
        row = following
    return text


def spread(costs: list[float]) -> str:
    """Microseconds in words."""
    ordered = sorted(costs)
    return (
        f"{len(ordered)} tokens, mean {statistics.fmean(ordered):.0f} us, p50 {ordered[len(ordered) // 2]:.0f}, "
        f"p99 {ordered[int(0.99 * len(ordered))]:.0f}, most {ordered[-1]:.0f}"
    )


def apply_costs(vocab_size: int, mask_bytes: int) -> None:
    """Processor time of applying masks to the logits of 16 rows, bits mixed as badly as can be."""
    torch.set_num_threads(1)
    logits = torch.randn(16, vocab_size)
    masked = MaskedLogits(frozenset({2}))
    table = {row: RowMask(os.urandom(mask_bytes), accepting=False) for row in range(16)}
    began = time.process_time()
    for _ in range(20):
        masked.apply(logits, list(range(16)), table)
    print(f"applying a mask in the engine: {1e6 * (time.process_time() - began) / 320:.0f} us a row")


def over_the_wire(channel: Channel) -> None:
    """Opening grammars, one step's masks, and bombs beside another tenant's stream and prompts."""
    print(f"first grammar of a sandbox: {1e3 * opened(channel, 1, BETA, GrammarKind.REGEX, '[ab]*'):.0f} ms")
    fresh = [opened(channel, 10 + n, ALPHA, GrammarKind.REGEX, f"[ab]{{{n + 1}}}") for n in range(6)]
    known = [opened(channel, 20 + n, ALPHA, GrammarKind.REGEX, "[ab]{1}") for n in range(6)]
    new, again = 1e3 * statistics.median(fresh), 1e3 * statistics.median(known)
    print(f"opening a new grammar {new:.1f} ms, a known one {again:.2f}")
    for request in (*range(10, 16), *range(20, 26)):
        channel.send(CloseGrammar(request))
    token = token_of(channel)
    alone = rounds(channel, token, seconds=1.0)
    print(f"a token's mask and a prompt's ids, one after the other: {gaps(alone)}")
    for number, (name, (kind, source)) in enumerate(BOMBS.items()):
        channel.send(OpenGrammar(1_000 + number, ALPHA, kind, source.encode()[: 256 << 10]))
        began = time.monotonic()
        beside, failed = [], None
        while failed is None:
            took, failed = one_round(channel, token)
            beside.append(took)
        print(f"{name}: refused after {time.monotonic() - began:.2f} s ({failed.code.name}); beside it {gaps(beside)}")


def gaps(seconds: list[float]) -> str:
    """Rounds in words."""
    ordered = sorted(seconds)
    return (
        f"{len(ordered)} rounds, p50 {1e3 * ordered[len(ordered) // 2]:.2f} ms, "
        f"p99 {1e3 * ordered[int(0.99 * len(ordered))]:.1f}, most {1e3 * ordered[-1]:.1f}"
    )


def rounds(channel: Channel, token: int, *, seconds: float) -> list[float]:
    """As many rounds as fit."""
    until = time.monotonic() + seconds
    took = []
    while time.monotonic() < until:
        took.append(one_round(channel, token)[0])
    return took


def one_round(channel: Channel, token: int) -> tuple[float, Failed | None]:
    """One token's mask and one prompt's ids; gives the seconds, and what failed meanwhile."""
    began = time.monotonic()
    channel.send(Advance(array("Q", [1]), array("I", [token])))
    channel.send(Encode(2, SourceKind.TEXT, b"How do I add a tenant?", 64))
    failed, owed = None, 2
    while owed:
        answer = next_message(channel)
        if isinstance(answer, Masks | Encoded):
            owed -= 1
        elif isinstance(answer, Failed):
            failed = answer
    return time.monotonic() - began, failed


def token_of(channel: Channel) -> int:
    """The id of the letter a."""
    channel.send(Encode(3, SourceKind.TEXT, b"a", 8))
    answer = next_message(channel)
    assert isinstance(answer, Encoded)
    return answer.token_ids[-1]


def opened(channel: Channel, request: int, tenant: bytes, kind: GrammarKind, source: str) -> float:
    """Seconds from asking for a grammar to its first mask."""
    began = time.monotonic()
    channel.send(OpenGrammar(request, tenant, kind, source.encode()))
    answer = next_message(channel)
    assert isinstance(answer, Masks), answer
    return time.monotonic() - began


def next_message(channel: Channel) -> Message:
    """The next message of the guest."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        for message in channel.receive(1):
            return message
        channel.wait(1.0)
    raise TimeoutError("the guest says nothing")


@contextlib.contextmanager
def worker(model: Path, *, sandboxed: bool) -> Iterator[Channel]:
    """A text worker, bare or in gVisor, configured and ready."""
    with tempfile.TemporaryDirectory(prefix="ath-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)
        socket = Path(folder) / "ipc" / "host.sock"
        socket.parent.mkdir(mode=0o755)
        socket.parent.chmod(0o755)
        listener = stack.enter_context(Listener(str(socket)))
        began = time.monotonic()
        if sandboxed:
            (Path(folder) / "state").mkdir()
            runtime = GvisorRuntime(find_runsc(), Path(folder) / "state")
            stack.callback(runtime.close)
            rootfs = python_rootfs("text")
            mounts = (Mount(socket.parent, "/ipc"), Mount(model, "/model"))
            argv = rootfs.argv("engine.text", "/ipc/host.sock")
            spec = SandboxSpec("text", argv, guest_environment(threads=1), rootfs, mounts, Limits(2 << 30))
            sandbox = runtime.boot(spec)
            stack.callback(sandbox.delete)
            pids, where = sandbox.peer_pids, "/model"
        else:
            process = subprocess.Popen([sys.executable, "-m", "engine.text", str(socket)], cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            pids, where = {process.pid}, str(model)
        channel = listener.accept(pids, PATIENCE_S, standard_layout(), Role.TEXT)
        stack.callback(channel.close)
        next_message(channel)
        channel.send(Configure(TextConfig(model_dir=where).to_json()))
        assert isinstance(next_message(channel), TextReady)
        print(f"text worker ready after {time.monotonic() - began:.2f} s")
        yield channel


if __name__ == "__main__":
    sys.exit(main())
