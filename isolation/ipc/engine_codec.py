"""Arms of the codec for the engine's messages: Submit, Abort, Drain, StepOutput.

``StepOutput`` is the hot path, one frame a step. Its columns travel as the raw memory of their
arrays, so a step of hundreds of tokens costs a handful of copies and no Python work a token, as
long as no log-probabilities were asked for.

Payloads (``n`` items each where marked):

* Submit: max_tokens u32, prompt length u32, weight u16, stop ids u8, flags u8, logprobs i8, priority u8, choices u8,
  prompt_logprobs i8, deadline_us u64, sampling (6 x f64, top_k u32, seed u64), namespace 32 bytes, group 32 bytes,
  public 32 bytes (zeros for none, as the flags say), prompt n x u32, stop ids n x u32.
* StepOutput: counts of tokens, starts, failures, logprobs, alternatives (u32 each), running,
  waiting, free_blocks, defects, prompts, their positions, their alternatives (u32 each); columns requests n x u64,
  token_ids n x u32, finishes n x u8; starts n x (u64, u32, u64); failures n x (u64, u8); then logprobs and prompts as
  ``isolation.ipc.logprob_codec`` has them.
"""

from __future__ import annotations

import struct
from array import array

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U32,
    MAX_U64,
    Arm,
    Frame,
    Kind,
    OutOfBoundsError,
    require,
    require_array,
    require_length,
    require_range,
    take_array,
    take_bytes,
)
from isolation.ipc.logprob_codec import (
    check_logprobs,
    check_prompts,
    logprobs_size,
    pack_logprobs,
    pack_prompts,
    prompts_size,
    unpack_logprobs,
    unpack_prompts,
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
)

MAX_WEIGHT = 1_000
_SMALLEST = 5e-324  # the least positive float: "above 0" as a closed range
_LARGEST = 1.7976931348623157e308

_SUBMIT = struct.Struct(f"<IIHBBbBBbQddddddIQ{NAMESPACE_KEY_BYTES}s{NAMESPACE_KEY_BYTES}s{NAMESPACE_KEY_BYTES}s")
_STEP = struct.Struct("<12I")
_START = struct.Struct("<QIQ")
_FAILURE = struct.Struct("<QB")
_TOKEN_BYTES = 8 + 4 + 1
_FINISHES = bytes((0, 1, 2))
_NO_KEY = bytes(NAMESPACE_KEY_BYTES)


def _check_submit(message: Submit) -> None:
    require_array("the prompt", message.token_ids, "I")
    require_range("prompt length", len(message.token_ids), 1, MAX_TOKENS_PER_REQUEST)
    require_range("max_tokens", message.max_tokens, 1, MAX_TOKENS_PER_REQUEST)
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")
    require(len(message.group) in (0, NAMESPACE_KEY_BYTES), "the group's key has another length")
    require(len(message.public) in (0, NAMESPACE_KEY_BYTES), "the public prefix's key has another length")
    require_length("stop_ids", len(message.stop_ids), MAX_STOP_IDS)
    require_range("logprobs", message.logprobs, -1, MAX_TOP_LOGPROBS)
    require_range("weight", message.weight, 1, MAX_WEIGHT)
    require_range("priority", message.priority, Priority.HIGH, Priority.LOW)
    require_range("prompt_logprobs", message.prompt_logprobs, -1, MAX_TOP_LOGPROBS)
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
        message.ignore_eos | message.retain << 1 | message.structured << 2 | message.deterministic << 3
        | bool(message.group) << 4 | bool(message.public) << 5,
        message.logprobs,
        message.priority,
        message.choices,
        message.prompt_logprobs,
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
        message.group or _NO_KEY,
        message.public or _NO_KEY,
    )
    return b"".join((fixed, message.token_ids.tobytes(), array("I", message.stop_ids).tobytes()))


def _unpack_submit(request: int, frame: Frame) -> Submit:
    (
        max_tokens, num_tokens, weight, num_stop_ids, flags, logprobs, priority, choices, prompt_logprobs, deadline_us,
        temperature, top_p, min_p, repetition, presence, frequency, top_k, seed, namespace, group, public,
    ) = _SUBMIT.unpack_from(frame, HEADER_BYTES)  # fmt: skip
    require(flags < 64, f"unknown flags {flags:#x}")
    require(bool(flags & 16) or group == _NO_KEY, "a group's key where there is no group")
    require(bool(flags & 32) or public == _NO_KEY, "a public prefix's key where there is none")
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
        structured=bool(flags & 4),
        prompt_logprobs=prompt_logprobs,
        choices=choices,
        deterministic=bool(flags & 8),
        group=group if flags & 16 else b"",
        public=public if flags & 32 else b"",
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
        check_logprobs(message.logprobs, count)
    if message.prompts:
        check_prompts(message.prompts)


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
            len(message.prompts),
            sum(len(entry.logprobs) for entry in message.prompts),
            sum(len(entry.top_ids) for entry in message.prompts),
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
        parts += pack_logprobs(entries)
    if message.prompts:
        parts += pack_prompts(message.prompts)
    return b"".join(parts)


def _unpack_step_output(_request: int, frame: Frame) -> StepOutput:
    (
        count, num_starts, num_failures, num_logprobs, num_alternatives,
        running, waiting, free_blocks, defects, num_prompts, num_positions, num_prompt_alternatives,
    ) = _STEP.unpack_from(frame, HEADER_BYTES)  # fmt: skip
    tokens = HEADER_BYTES + _STEP.size
    starts = tokens + _TOKEN_BYTES * count
    failures = starts + _START.size * num_starts
    logprobs = failures + _FAILURE.size * num_failures
    prompts = logprobs + logprobs_size(num_logprobs, num_alternatives)
    end = prompts + prompts_size(num_prompts, num_positions, num_prompt_alternatives)
    # One comparison settles truncation, trailing bytes and forged counts before any allocation.
    if end != len(frame):
        raise OutOfBoundsError("the counts do not give the frame's length")
    ids = tokens + 8 * count
    finishes = ids + 4 * count
    return StepOutput(
        take_array("Q", frame, tokens, ids),
        take_array("I", frame, ids, finishes),
        take_bytes(frame, finishes, starts),
        tuple(Started(*fields) for fields in _START.iter_unpack(frame[starts:failures])) if num_starts else (),
        unpack_logprobs(frame[logprobs:prompts], num_logprobs, num_alternatives) if logprobs != prompts else (),
        tuple(
            RequestFailure(failed, FailureCode(code)) for failed, code in _FAILURE.iter_unpack(frame[failures:logprobs])
        )
        if num_failures
        else (),
        running,
        waiting,
        free_blocks,
        defects,
        unpack_prompts(frame[prompts:], num_prompts, num_positions) if prompts != end else (),
    )


def _check_nothing(_message: Abort | Drain) -> None:
    pass


def _pack_nothing(_message: Abort | Drain) -> bytes:
    return b""


def _unpack_abort(request: int, frame: Frame) -> Abort:
    require(len(frame) == HEADER_BYTES, "bytes trail the message")
    return Abort(request)


def _unpack_drain(_request: int, frame: Frame) -> Drain:
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
