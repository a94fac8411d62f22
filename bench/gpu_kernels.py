"""The machine's own roofline, exactness of the device backend, and the kernels' share of what the machine can do."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu_engines import TINY, Shape, build_model, make_engine
from bench.gpu_report import OutOfTimeError, Report, seconds_of
from engine.backends.attention import AttentionRule
from engine.backends.cuda.load import make_operations
from engine.backends.cuda.runtime.operations import Chunks, KvLayer, SamplingColumns
from engine.backends.cuda.runtime.rows import NO_LINE, NUM_FIELDS, Field, words_of
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.core.offline import generate
from isolation.ipc.engine import Submit
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES
from isolation.ipc.sampling import Sampling

LAYERS = 8
"""Calls in one recording."""


def roofline(report: Report) -> dict[str, float]:
    """Measured rates of this machine: memory copied and read, bfloat16 products, transfers from page-locked memory."""
    device, toy = report.device, report.toy
    size = (1 << 22) if toy else (1 << 32)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / seconds_of(lambda: target.copy_(source), report)
    read = size / seconds_of(source.sum, report)
    source = target = torch.empty(0)
    edge = 256 if toy else 8_192
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * edge**3 / seconds_of(lambda: a @ b, report)
    rates = {"copy_bytes_per_s": copied, "read_bytes_per_s": read, "bf16_flop_per_s": product}
    if device.type == "cuda":
        pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        placed = torch.empty_like(pinned, device=device)
        rates["to_device_bytes_per_s"] = len(pinned) / seconds_of(
            lambda: placed.copy_(pinned, non_blocking=True), report
        )
    report.put("roofline", device=name_of(device), **rates)
    return rates


def name_of(device: torch.device) -> str:
    """The device's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class Case:
    """Rows with contexts of given lengths in a paged cache, and the operations that attend to them."""

    def __init__(self, report: Report, lengths: list[int], shape: Shape, *, dtype: torch.dtype) -> None:
        self.device, self.shape, self.lengths = report.device, shape, lengths
        generator = torch.Generator(device=self.device).manual_seed(1)
        width = -(-max(lengths) // 16)
        needed = [-(-length // 16) for length in lengths]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(2)) + 1
        tables = torch.zeros(len(lengths), width, dtype=torch.int64)
        for row, part in enumerate(order.split(needed)):
            tables[row, : len(part)] = part
        self.tables = tables.to(self.device)
        rows = (sum(needed) + 2, 16, shape.kv_heads, shape.dim)
        keys, values = (torch.randn(rows, generator=generator, device=self.device, dtype=dtype) for _ in range(2))
        self.layer = KvLayer(keys, values)
        self.rule = AttentionRule(shape.dim**-0.5)
        self.generator, self.dtype = generator, dtype
        self.kernels = make_operations(
            build_model(
                TINY | {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.dim},
                self.device,
                dtype,
            )
        )

    def queries(self, count: int) -> Tensor:
        """Queries of so many tokens."""
        size = (count, self.shape.heads, self.shape.dim)
        return torch.randn(size, generator=self.generator, device=self.device, dtype=self.dtype)

    def reference(self, q: Tensor, row: int, position: int) -> Tensor:
        """What one token gets, in float64."""
        places = torch.arange(position + 1, device=self.device)
        blocks = self.tables[row, places // 16]
        group = self.shape.heads // self.shape.kv_heads
        k, v = (
            part[blocks, places % 16].double().repeat_interleave(group, 1)
            for part in (self.layer.keys, self.layer.values)
        )
        weights = (torch.einsum("hd,shd->hs", q.double(), k) * self.rule.scale).softmax(-1)
        return torch.einsum("hs,shd->hd", weights, v).flatten()

    def decode(self, q: Tensor) -> Callable[[], Tensor]:
        """Attention of one token a row, as a step computes it in each layer."""
        lengths = torch.tensor(self.lengths, device=self.device)
        attend = self.kernels.decoding(lengths, (self.tables,))
        return lambda: attend(q, self.layer, self.rule)

    def prefill(self, q: Tensor) -> Callable[[], Tensor]:
        """Attention of whole prompts, one a row."""
        lengths = torch.tensor(self.lengths, device=self.device)
        begins = lengths.cumsum(0) - lengths
        spans = tuple(zip(begins.tolist(), self.lengths, strict=True))
        attend = self.kernels.prefilling(Chunks(begins, lengths, torch.zeros_like(lengths), (self.tables,), spans))
        return lambda: attend(q, self.layer, self.rule)


def exactness(report: Report) -> None:
    """Attention against float64, draws against plain operations, and both loops against each other."""
    shape = Shape(4, 2, 16) if report.toy else Shape(32, 8, 128)
    dtype = torch.float32 if report.toy else torch.bfloat16
    lengths = [1, 17, 40] if report.toy else [1, 15, 16, 17, 63, 64, 65, 300, 1_000, 4_097]
    case = Case(report, lengths, shape, dtype=dtype)
    q = case.queries(len(lengths))
    found = case.decode(q)()
    wanted = torch.stack([case.reference(q[row], row, length - 1) for row, length in enumerate(lengths)])
    q_all = case.queries(sum(lengths))
    prefilled = case.prefill(q_all)()
    some = [(row, place) for row, length in enumerate(lengths) for place in {0, length // 2, length - 1}]
    begins = list(itertools.accumulate(lengths, initial=0))
    checked = torch.stack([case.reference(q_all[begins[row] + place], row, place) for row, place in some])
    lines = prefilled[[begins[row] + place for row, place in some]]
    report.put(
        "exactness",
        dtype=str(dtype),
        decode_error=relative(found, wanted),
        prefill_error=relative(lines, checked),
        bound=2.0**-6,
    )
    both_loops(report)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest error over the largest value; not a number where something is not finite."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def both_loops(report: Report) -> None:
    """Schedules through the loop that replays recordings and runs ahead, and through the eager one that waits: on a GPU
    with the kernels, in float32 with a tiny model."""
    equal = count = 0
    most = 1 if report.toy else 500
    with suppress(OutOfTimeError):
        for seed in range(most):
            report.check()
            answers = []
            for eager in (False, True):
                model = build_model(TINY, report.device, torch.float32)
                engine = make_engine(model, kv_bytes=1 << 21, rows=6, budget=48, context=128, eager=eager)
                answers.append({key: one.token_ids for key, one in generate(engine, drawn(seed)).items()})
            equal += answers[0] == answers[1]
            count += 1
    report.put("loops", schedules=count, equal=equal)
    if count:
        report.figure("loops_equal", equal / count)


def drawn(seed: int) -> list[Submit]:
    """Requests of all lengths, greedy and drawn."""
    draw = random.Random(seed)
    return [
        Submit(
            number,
            bytes(32),
            array("I", [draw.randrange(TINY["vocab_size"]) for _ in range(draw.randint(1, 60))]),
            draw.randint(1, 30),
            Sampling(temperature=draw.choice((0.0, 0.9)), top_k=draw.choice((0, 9)), seed=seed),
            ignore_eos=True,
        )
        for number in range(1, draw.randint(3, 9))
    ]


def kernels(report: Report, rates: dict[str, float]) -> None:
    """Attention's share of memory bandwidth while decoding, and of the best library kernel for prompts; the sampler."""
    shape = Shape(4, 2, 16) if report.toy else Shape(32, 8, 128)
    dtype = torch.bfloat16
    draw = random.Random(0)
    rows = 4 if report.toy else 64
    mixes = {
        "uniform": [64 if report.toy else 4_096] * rows,
        "many": [60] * rows if report.toy else [1_000] * 256,
        "mixed": [draw.choice((8, 40, 60) if report.toy else (128, 512, 2_048, 8_192, 16_384)) for _ in range(rows)],
    }
    for kind, lengths in mixes.items():
        case = Case(report, lengths, shape, dtype=dtype)
        taken = replayed(case.decode(case.queries(len(lengths))), report)
        moved = sum(lengths) * 2 * shape.kv_heads * shape.dim * dtype.itemsize
        share = moved / taken / rates["read_bytes_per_s"]
        report.put("kernel", kernel="attention decode", lengths=kind, seconds=taken, share=share)
        if kind == "mixed":
            report.figure("attention_decode_share", share)
    prefill(report, shape, dtype)
    sampler(report)


def replayed(run: Callable[[], object], report: Report) -> float:
    """Seconds of one call among several that are recorded and replayed, as a step's layers are: without what a launch
    costs the host."""
    if report.device.type != "cuda":
        return seconds_of(run, report)
    run()
    torch.cuda.synchronize(report.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            run()
    return seconds_of(graph.replay, report) / LAYERS


def prefill(report: Report, shape: Shape, dtype: torch.dtype) -> None:
    """Causal attention of prompts over the paged cache, against torch's own over contiguous keys."""
    count, length = (2, 48) if report.toy else (4, 4_096)
    case = Case(report, [length] * count, shape, dtype=dtype)
    own = seconds_of(case.prefill(case.queries(count * length)), report)
    size = (count, shape.heads, length, shape.dim)
    q, k, v = (torch.randn(size, device=report.device, dtype=dtype) for _ in range(3))
    best = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        if backend is SDPBackend.MATH and best:
            continue
        with suppress(RuntimeError), sdpa_kernel(backend):
            best[backend.name] = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), report)
    work = 2 * count * shape.heads * length**2 * shape.dim
    report.put("kernel", kernel="attention prefill", seconds=own, flop_per_s=work / own, library_seconds=best)
    if best:
        report.figure("attention_prefill_ratio", min(best.values()) / own)


def sampler(report: Report) -> None:
    """Seconds that a step's choice takes, by what its rows ask for; top-k and top-p read scores many times."""
    rows, vocab = (4, 300) if report.toy else (256, 128_256)
    logits = torch.randn(rows, vocab, device=report.device) * 3
    run = make_operations(build_model(TINY, report.device, torch.float32, vocab_size=vocab))
    places = torch.arange(rows, device=report.device)
    for kind, wishes in {
        "greedy": Wishes(),
        "draw": Wishes(temperature=1.0),
        "top-p": Wishes(temperature=1.0, top_k=50, top_p=0.9),
        "penalties": Wishes(penalties=True),
        "masks": Wishes(masks=True),
        "logprobs": Wishes(logprobs=5),
    }.items():
        columns = columns_of(rows, vocab, wishes, report.device)
        taken = seconds_of(lambda columns=columns: run.sample(logits, places, places, columns), report, rounds=5)
        # A choice is counted where there are penalties: each is made of counts of its own.
        chosen, wanted = (
            one.sample(logits, places, places, columns_of(rows, vocab, wishes, report.device)).tokens.tolist()
            for one in (run, PlainOperations())
        )
        same = sum(one == two for one, two in zip(chosen, wanted, strict=True)) / rows
        report.put("kernel", kernel="sampler", kind=kind, seconds=taken, rows=rows, same_as_plain=same)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What all rows ask of their choice."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalties: bool = False
    masks: bool = False
    logprobs: int = -1


def columns_of(rows: int, vocab: int, wishes: Wishes, device: torch.device) -> SamplingColumns:
    """Sampling numbers that all rows share; masks allow every other token."""
    numbers = Sampling(
        temperature=wishes.temperature,
        top_k=wishes.top_k,
        top_p=wishes.top_p,
        repetition_penalty=1.2 if wishes.penalties else 1.0,
    )
    words = torch.zeros(NUM_FIELDS, rows, dtype=torch.int64)
    own = torch.arange(rows)
    words[Field.LIMIT] = 1 << 30
    words[Field.PENALTY_LINE] = own if wishes.penalties else NO_LINE
    words[Field.MASK_LINE] = own if wishes.masks else NO_LINE
    words[Field.LOGPROBS] = wishes.logprobs
    words[len(Field) :] = torch.tensor([words_of(replace(numbers, seed=977 * row)) for row in range(rows)]).T
    return SamplingColumns(
        words=words.to(device),
        counts=torch.zeros(rows, vocab, dtype=torch.int32, device=device),
        masks=torch.full((rows, -(-vocab // 32)), 0x55555555, dtype=torch.int32, device=device),
        bias_ids=torch.zeros(rows, MAX_LOGIT_BIASES, dtype=torch.int32, device=device),
        biases=torch.zeros(rows, MAX_LOGIT_BIASES, device=device),
    )
