"""Arms of the codec for the engine's messages: Submit, Abort, Drain, StepOutput.

``StepOutput`` is the hot path, one frame a step. Its columns travel as the raw memory of their
arrays, so a step of hundreds of tokens costs a handful of copies and no Python work a token, as
long as no log-probabilities were asked for.

Payloads (``n`` items each where marked):

* Submit: max_tokens u32, prompt length u32, weight u16, stop ids u8, flags u8, logprobs i8, priority u8, choices u8,
  deadline_us u64, sampling (6 x f64, top_k u32, seed u64), namespace 32 bytes, prompt n x u32, stop ids n x u32.
* StepOutput: counts of tokens, starts, failures, logprobs, alternatives (u32 each), running,
  waiting, free_blocks, defects (u32 each); columns requests n x u64, token_ids n x u32, finishes n x u8;
  starts n x (u64, u32, u64); failures n x (u64, u8); logprobs as columns index n x u32,
  logprob n x f64, alternatives of each n x u8, then all ids n x u32 and all values n x f64.
"""

from __future__ import annotations

import struct
from array import array
from itertools import chain, pairwise
from math import isfinite

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    MAX_U64,
    Arm,
    Kind,
    OutOfBoundsError,
    require,
    require_array,
    require_length,
    require_range,
    take_array,
)
from isolation.ipc.messages import (
    MAX_CHOICES,
    MAX_DEADLINE_US,
    MAX_STOP_IDS,
    MAX_TOKENS_PER_FRAME,
    MAX_TOKENS_PER_REQUEST,
    MAX_TOP_LOGPROBS,
    NAMESPACE_KEY_BYTES,
    Abort,
    Drain,
    FailureCode,
    Priority,
    RequestFailure,
    Sampling,
    Started,
    StepOutput,
    Submit,
    TokenLogprobs,
)

MAX_WEIGHT = 1_000
_SMALLEST = 5e-324  # the least positive float: "above 0" as a closed range
_LARGEST = 1.7976931348623157e308

_SUBMIT = struct.Struct(f"<IIHBBbBBQddddddIQ{NAMESPACE_KEY_BYTES}s")
_STEP = struct.Struct("<9I")
_START = struct.Struct("<QIQ")
_FAILURE = struct.Struct("<QB")
_TOKEN_BYTES = 8 + 4 + 1
_LOGPROB_BYTES = 4 + 8 + 1
_ALTERNATIVE_BYTES = 4 + 8
_FINISHES = bytes((0, 1, 2))


def _check_submit(message: Submit) -> None:
    require_array("the prompt", message.token_ids, "I")
    require_range("prompt length", len(message.token_ids), 1, MAX_TOKENS_PER_REQUEST)
    require_range("max_tokens", message.max_tokens, 1, MAX_TOKENS_PER_REQUEST)
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")
    require_length("stop_ids", len(message.stop_ids), MAX_STOP_IDS)
    require_range("logprobs", message.logprobs, -1, MAX_TOP_LOGPROBS)
    require_range("weight", message.weight, 1, MAX_WEIGHT)
    require_range("priority", message.priority, Priority.HIGH, Priority.LOW)
    require_range("choices", message.choices, 1, MAX_CHOICES)
    require(message.request + message.choices - 1 <= MAX_U64, "the ids of the choices leave 64 bits")
    require_range("deadline_us", message.deadline_us, 0, MAX_DEADLINE_US)
    sampling = message.sampling
    require_range("temperature", sampling.temperature, 0.0, _LARGEST)
    require_range("top_k", sampling.top_k, 0, MAX_U32)
    require_range("top_p", sampling.top_p, _SMALLEST, 1.0)
    require_range("min_p", sampling.min_p, 0.0, 1.0)
    require_range("repetition_penalty", sampling.repetition_penalty, _SMALLEST, _LARGEST)
    require_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    require_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    require_range("seed", sampling.seed, 0, MAX_U64)


def _pack_submit(message: Submit) -> bytes:
    sampling = message.sampling
    fixed = _SUBMIT.pack(
        message.max_tokens,
        len(message.token_ids),
        message.weight,
        len(message.stop_ids),
        message.ignore_eos | message.retain << 1 | message.deterministic << 2,
        message.logprobs,
        message.priority,
        message.choices,
        message.deadline_us,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.top_k,
        sampling.seed,
        message.namespace,
    )
    return b"".join((fixed, message.token_ids.tobytes(), array("I", message.stop_ids).tobytes()))


def _unpack_submit(request: int, frame: bytes) -> Submit:
    (
        max_tokens, num_tokens, weight, num_stop_ids, flags, logprobs, priority, choices, deadline_us,
        temperature, top_p, min_p, repetition, presence, frequency, top_k, seed, namespace,
    ) = _SUBMIT.unpack_from(frame, HEADER_BYTES)  # fmt: skip
    require(flags < 8, f"unknown flags {flags:#x}")
    prompt = HEADER_BYTES + _SUBMIT.size
    stops = prompt + 4 * num_tokens
    end = stops + 4 * num_stop_ids
    require(end == len(frame), "the counts do not give the frame's length")
    return Submit(
        request=request,
        namespace=namespace,
        token_ids=take_array("I", frame, prompt, stops),
        max_tokens=max_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition, presence, frequency, seed),
        stop_ids=tuple(take_array("I", frame, stops, end)),
        ignore_eos=bool(flags & 1),
        retain=bool(flags & 2),
        logprobs=logprobs,
        weight=weight,
        priority=priority,
        deadline_us=deadline_us,
        choices=choices,
        deterministic=bool(flags & 4),
    )


def _check_step_output(message: StepOutput) -> None:
    require_array("requests", message.requests, "Q")
    require_array("token_ids", message.token_ids, "I")
    count = len(message.requests)
    if not count == len(message.token_ids) == len(message.finishes):
        raise OutOfBoundsError("requests, token_ids and finishes have different lengths")
    require_length("tokens", count, MAX_TOKENS_PER_FRAME)
    if message.finishes.translate(None, _FINISHES):
        raise OutOfBoundsError("finishes holds a byte that is no Finish")
    require_length("starts", len(message.starts), MAX_TOKENS_PER_FRAME)
    require_length("failures", len(message.failures), MAX_TOKENS_PER_FRAME)
    if message.logprobs:
        _check_logprobs(message.logprobs, count)


def _check_logprobs(entries: tuple[TokenLogprobs, ...], num_tokens: int) -> None:
    require(
        all(before.index < after.index for before, after in pairwise(entries))
        and entries[0].index >= 0
        and entries[-1].index < num_tokens,
        "positions of logprobs do not ascend within the frame's tokens",
    )
    for entry in entries:
        require_length("alternatives", len(entry.top_ids), MAX_TOP_LOGPROBS)
        require(
            len(entry.top_ids) == len(entry.top_logprobs),
            "alternatives and their logprobs have different lengths",
        )
        require(
            isfinite(entry.logprob) and all(map(isfinite, entry.top_logprobs)),
            "a logprob is not finite",
        )


def _pack_step_output(message: StepOutput) -> bytes:
    entries = message.logprobs
    parts = [
        _STEP.pack(
            len(message.requests),
            len(message.starts),
            len(message.failures),
            len(entries),
            sum(len(entry.top_ids) for entry in entries) if entries else 0,
            message.running,
            message.waiting,
            message.free_blocks,
            message.defects,
        ),
        message.requests.tobytes(),
        message.token_ids.tobytes(),
        message.finishes,
    ]
    for start in message.starts:
        parts.append(_START.pack(start.request, start.cached_tokens, start.queue_us))
    for failure in message.failures:
        parts.append(_FAILURE.pack(failure.request, FailureCode(failure.code)))
    if entries:
        parts += (
            array("I", [entry.index for entry in entries]).tobytes(),
            array("d", [entry.logprob for entry in entries]).tobytes(),
            bytes(len(entry.top_ids) for entry in entries),
            array("I", chain.from_iterable(entry.top_ids for entry in entries)).tobytes(),
            array("d", chain.from_iterable(entry.top_logprobs for entry in entries)).tobytes(),
        )
    return b"".join(parts)


def _unpack_step_output(_request: int, frame: bytes) -> StepOutput:
    (
        count, num_starts, num_failures, num_logprobs, num_alternatives,
        running, waiting, free_blocks, defects,
    ) = _STEP.unpack_from(frame, HEADER_BYTES)  # fmt: skip
    tokens = HEADER_BYTES + _STEP.size
    starts = tokens + _TOKEN_BYTES * count
    failures = starts + _START.size * num_starts
    logprobs = failures + _FAILURE.size * num_failures
    end = logprobs + _LOGPROB_BYTES * num_logprobs + _ALTERNATIVE_BYTES * num_alternatives
    # One comparison settles truncation, trailing bytes and forged counts before any allocation.
    if end != len(frame):
        raise OutOfBoundsError("the counts do not give the frame's length")
    ids = tokens + 8 * count
    finishes = ids + 4 * count
    return StepOutput(
        take_array("Q", frame, tokens, ids),
        take_array("I", frame, ids, finishes),
        frame[finishes:starts],
        tuple(Started(*fields) for fields in _START.iter_unpack(frame[starts:failures])) if num_starts else (),
        _unpack_logprobs(frame[logprobs:], num_logprobs, num_alternatives) if logprobs != end else (),
        tuple(
            RequestFailure(failed, FailureCode(code)) for failed, code in _FAILURE.iter_unpack(frame[failures:logprobs])
        )
        if num_failures
        else (),
        running,
        waiting,
        free_blocks,
        defects,
    )


def _unpack_logprobs(columns: bytes, num_entries: int, num_alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Entries of columns whose total length the caller has checked."""
    at_chosen = 4 * num_entries
    at_counts = at_chosen + 8 * num_entries
    at_ids = at_counts + num_entries
    at_values = at_ids + 4 * num_alternatives
    indices = take_array("I", columns, 0, at_chosen)
    chosen = array("d", columns[at_chosen:at_counts])
    counts = columns[at_counts:at_ids]
    ids = take_array("I", columns, at_ids, at_values)
    values = array("d", columns[at_values:])
    require(sum(counts) == num_alternatives, "alternatives do not sum up to their total")
    entries = []
    start = 0
    for index, logprob, count in zip(indices, chosen, counts, strict=True):
        end = start + count
        entries.append(TokenLogprobs(index, logprob, tuple(ids[start:end]), tuple(values[start:end])))
        start = end
    return tuple(entries)


def _check_nothing(_message: Abort | Drain) -> None:
    pass


def _pack_nothing(_message: Abort | Drain) -> bytes:
    return b""


def _unpack_abort(request: int, frame: bytes) -> Abort:
    require(len(frame) == HEADER_BYTES, "bytes trail the message")
    return Abort(request)


def _unpack_drain(_request: int, frame: bytes) -> Drain:
    require(len(frame) == HEADER_BYTES, "bytes trail the message")
    return Drain()


ARMS = (
    Arm(Kind.SUBMIT, Submit, _check_submit, _pack_submit, _unpack_submit),
    Arm(Kind.ABORT, Abort, _check_nothing, _pack_nothing, _unpack_abort),
    Arm(Kind.DRAIN, Drain, _check_nothing, _pack_nothing, _unpack_drain, names_request=False),
    Arm(
        Kind.STEP_OUTPUT,
        StepOutput,
        _check_step_output,
        _pack_step_output,
        _unpack_step_output,
        names_request=False,
    ),
)
