"""Blocks that leave an engine on a card and come back: right bits, nothing taken, speed, and what a step pays.

``python bench/gpu_spill.py [--budget S]``, from the repository's root, with torch and, on a card, Triton; at most 40
seconds there. Without a card the same runs on the CPU in tiny sizes. One line of JSON for each figure:

* ``right``: drawn requests whose prompts come again after others took their blocks, through the recorded and run-ahead
  loop, against an engine that keeps no prefix: answers that differ (beside those that differ between two sizes of
  batches of the latter), blocks that left twice with different bytes, blocks restored, and memory taken from the driver
  after the warm-up, which has to be 0;
* ``speed``: GB/s of whole blocks out and in, through the buffers;
* ``step``: milliseconds of a decoding step alone, and with as many blocks leaving as one step may send;
* ``order``: descriptors of the card's nodes that the real program has while it waits for its host, where a checkpoint
  is taken (0), and when it is ready (some on a card).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from appliance.operator.calls.spill_host import SpillHost
from bench.gpu_engines import TINY, build_model, save
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.backends.cuda.runtime.staging import DeviceContent
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.model.layers.decoder import Decoder
from engine.startup.load import build_engine
from engine.startup.warmup import warm_up
from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.engine import Submit
from isolation.ipc.listener import Listener
from isolation.ipc.messages import PROTOCOL_VERSION, WAITS_LINE, Configure, EngineReady, Hello, Role
from isolation.ipc.sampling import Sampling
from isolation.ipc.segment import standard_layout

ROOT = Path(__file__).resolve().parents[1]
ON_CARD = torch.cuda.is_available()
PLACE = torch.device("cuda" if ON_CARD else "cpu")

WIDE = {"head_dim": 64, "hidden_size": 256}
"""A width that kernels were written for."""

NAMESPACES = 3
READY_S = 60.0
MOST_STEPS = 20_000
TOGETHER = 20 if ON_CARD else 2
"""Steps of one kind in a row."""


def put(kind: str, **values: Any) -> None:
    """One line, at once."""
    print(json.dumps({"kind": kind, **values}), flush=True)


def spill_channel() -> tuple[Channel, Channel]:
    """Both ends of a spill channel in this process."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, Role.SPILL)
    host = Channel.host(memfd, host_in, host_out, layout, Role.SPILL)
    guest.send(Hello(PROTOCOL_VERSION, Role.SPILL))
    return host, guest


def engine_of(model: Decoder, blocks: int, *, rows: int, context: int, spill: Channel | None) -> Engine:
    """An engine on the device backend, warm, with so many blocks of 16 tokens beside the rows' spare ones."""
    size = 16 * sum(layer.numbers for layer in model.config.kv_layers) * model.dtype.itemsize
    config = EngineConfig(
        model_dir="unused",
        model_digest="00",
        backend="device",
        block_size=16,
        kv_bytes=(blocks + rows + 2) * size,
        max_num_seqs=rows,
        max_num_batched_tokens=256 if ON_CARD else 64,
        max_context=context,
        prefix_caching=spill is not None,
        spill=spill is not None,
    )
    engine = build_engine(config, model, spill)
    assert (engine.spill is not None) == (spill is not None)
    warm_up(engine)
    return engine


def requests(seed: int, count: int, context: int) -> list[Submit]:
    """Drawn prompts of three tenants, greedy, of which each comes twice, some requests apart."""
    draw, made = random.Random(seed), []
    for number in range(1, count + 1):
        ids = array("I", [draw.randrange(int(TINY["vocab_size"])) for _ in range(draw.randint(17, context - 24))])
        key = bytes([1 + number % NAMESPACES]) * 32
        made.append(
            Submit(number, key, ids, draw.randint(1, 20 if ON_CARD else 4), Sampling(temperature=0.0), ignore_eos=True)
        )
    return made + [replace(one, request=one.request + count) for one in made]


def answers_of(engine: Engine, submits: list[Submit], host: SpillHost | None, together: int) -> dict[int, Answer]:
    """All answers, so many requests at a time."""
    answers: dict[int, Answer] = {}
    waiting = list(reversed(submits))
    for _ in range(MOST_STEPS):
        while waiting and engine.scheduler.num_waiting + engine.scheduler.num_running < together:
            submit = waiting.pop()
            engine.add(replace(submit, token_ids=submit.token_ids[:]))
        if host is not None:
            host.serve()
        if engine.has_work:
            collect(engine, answers)
        elif not waiting and not engine.has_live_requests:
            return answers
    raise RuntimeError("the requests do not end")


def right(model: Decoder, rounds: int, deadline: float) -> bool:
    """See the head of this file."""
    rows, context, count = (16, 512, 60) if ON_CARD else (2, 64, 5)
    host_end, guest = spill_channel()
    host = SpillHost(host_end, 1, 0.001)
    plain = engine_of(model, (rows + 1) * context // 16, rows=rows, context=context, spill=None)
    spilling = engine_of(model, max(6, rows // 2 * context // 16), rows=rows, context=context, spill=guest)
    runner, tier = spilling.runner, spilling.spill
    assert isinstance(runner, DeviceRunner)
    assert tier is not None
    differing = natural = compared = 0
    for seed in range(rounds):
        if seed and time.monotonic() > deadline:
            break
        submits = requests(seed, count, context)
        wanted = answers_of(plain, submits[:count], None, rows)
        other = answers_of(plain, submits[:count], None, max(1, rows // 3))
        natural += sum(wanted[number].token_ids != other[number].token_ids for number in wanted)
        found = answers_of(spilling, submits, host, rows)
        for one in submits:
            same = wanted[(one.request - 1) % count + 1].token_ids
            differing += found[one.request].token_ids != same
            compared += 1
    counts = tier.counts
    put(
        "right",
        compared=compared,
        differing=differing,
        differing_by_batch_alone=natural,
        alone_compared=compared // 2,
        changed=host.changed,
        sent=counts.sent,
        restored=counts.restored,
        dropped=counts.dropped,
        late=counts.late,
        forgotten=host.forgotten,
        ahead=runner.num_ahead,
        taken_after_ready=runner.num_taken,
    )
    # Ordinary rows may have other last bits beside other rows, so a few tokens may differ where two are as likely.
    return not host.changed and not runner.num_taken and counts.restored > 0


def speed(content: DeviceContent, block: int) -> None:
    """See the head of this file."""
    turns, out_s, in_s, found = 8, [], [], []
    for _ in range(turns):
        began = time.perf_counter()
        copies = [copy for copy in (content.start(block) for _ in range(len(content._out))) if copy is not None]
        for copy in copies:
            copy._buffer.fence.wait()
        out_s.append((time.perf_counter() - began) / len(copies))
        found = [copy.content() for copy in copies]
        for copy in copies:
            copy.drop()
        began = time.perf_counter()
        for one in found:
            content.write(block, one)
        for buffer in content._writing:
            buffer.fence.wait()
        in_s.append((time.perf_counter() - began) / len(found))
        content.make_room()
    gb = content.size / 1e9
    rates = {"out_gb_s": round(gb / min(out_s), 2), "in_with_filling_gb_s": round(gb / min(in_s), 2)}
    put("speed", block_bytes=content.size, buffers=len(found), equal=len(set(found)) == 1, **rates)


def step(model: Decoder) -> None:
    """See the head of this file."""
    rows, context, steps = (32, 512, 200) if ON_CARD else (2, 64, 4)
    host_end, guest = spill_channel()
    host = SpillHost(host_end, 1, 0.0)
    engine = engine_of(model, rows * context // 16, rows=rows, context=context, spill=guest)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.content is not None
    vocab = int(TINY["vocab_size"])
    for number in range(1, rows + 1):
        ids = array("I", [(number * 31 + place) % vocab for place in range(16)])
        output = context - 40
        engine.add(Submit(number, bytes([1]) * 32, ids, output, Sampling(temperature=0.0), ignore_eos=True))
    for _ in range(rows + 20 if ON_CARD else 3):
        collect(engine, {})
    times: dict[str, list[float]] = {"alone": [], "leaving": []}
    most = max(1, (4 << 20) // runner.content.size)
    for turn in range(2 * steps):
        # Several steps are started at once, so the same number of them is timed together.
        name = ("alone", "leaving")[turn // TOGETHER % 2]
        copies = []
        if name == "leaving":
            copies = [runner.content.start(1 + place % 8) for place in range(most)]
        began = time.perf_counter()
        collect(engine, {})
        times[name].append(time.perf_counter() - began)
        for copy in copies:
            if copy is not None:
                copy.drop()
        host.serve()
    figures = {f"{name}_ms": round(1e3 * statistics.fmean(found), 3) for name, found in times.items()}
    speed(runner.content, 1)
    put("step", rows=rows, blocks=most, **figures, taken_after_ready=runner.num_taken)


def nodes_of(pid: int) -> int:
    """Descriptors of a card's nodes that a process has."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("/dev/nvidia")
    return found


def receive(channel: Channel, timeout_s: float) -> object:
    """The next message."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        for message in channel.receive(1):
            return message
        channel.wait(1.0)
    raise TimeoutError("the program says nothing")


def order(model: Decoder, sizes: dict[str, Any]) -> bool:
    """See the head of this file."""
    with tempfile.TemporaryDirectory(prefix="s-") as name:
        folder = Path(name)
        save(model, sizes, folder)
        config = EngineConfig(
            model_dir=name,
            model_digest="00",
            backend="device",
            kv_bytes=1 << 24,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_context=64,
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        place = str(folder / "host.sock")
        program = subprocess.Popen(
            [sys.executable, "-m", "engine", place], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            assert program.stderr is not None
            while (line := program.stderr.readline()) and line.strip() != WAITS_LINE:
                pass
            waits, began = nodes_of(program.pid), time.monotonic()
            with Listener(place) as listener:
                channel = listener.accept(None, READY_S, standard_layout(), Role.ENGINE)
                receive(channel, READY_S)
                channel.send(Configure(config.to_json()))
                ready = isinstance(receive(channel, READY_S), EngineReady)
                figures = {"ready": ready, "nodes_when_ready": nodes_of(program.pid)}
                put("order", nodes_while_it_waits=waits, **figures, ready_s=round(time.monotonic() - began, 2))
                channel.close()
        finally:
            program.kill()
            program.wait()
    return waits == 0 and ready


def main() -> int:
    """Run all of it; gives 0 when the bits were right and no node was open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=36.0, help="seconds after which no further round begins")
    options = parser.parse_args()
    began = time.monotonic()
    card = torch.cuda.get_device_name() if ON_CARD else "CPU"
    put("machine", torch=torch.__version__, card=card)
    # On a card: heads of 64, and as many of them as make a block of one MiB.
    sizes = TINY | (WIDE | {"num_layers": 8, "num_kv_heads": 4} if ON_CARD else {})
    dtype = torch.bfloat16 if ON_CARD else torch.float32
    model = build_model(sizes, PLACE, dtype)
    good = order(build_model(sizes, torch.device("cpu"), dtype), sizes)
    put("time", at_s=round(time.monotonic() - began, 1))
    step(model)
    put("time", at_s=round(time.monotonic() - began, 1))
    good &= right(model, 40 if ON_CARD else 1, began + options.budget - 4.0 if ON_CARD else math.inf)
    put("verdict", good=good, seconds=round(time.monotonic() - began, 1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
