"""The messages of a generation: a request for the engine, its end, and what each step gave.

Arms of the codec for the engine's messages: Submit, Abort, Drain, StepOutput.

``StepOutput`` is the hot path, one frame a step. Its columns travel as the raw memory of their
arrays, so a step of hundreds of tokens costs a handful of copies and no Python work a token, as
long as no log-probabilities were asked for.

Payloads (``n`` items each where marked):

* Submit: max_tokens u32, prompt length u32, weight u16, stop ids u8, flags u8, logprobs i8, priority u8, choices u8,
  prompt_logprobs i8, biases u16, deadline_us u64, sampling (``WIRE_CODES``), namespace 32 bytes, group 32 bytes,
  public 32 bytes, adapter 32 bytes, user 32 bytes (zeros for none, as the flags say), prompt n x u32, stop ids n x u32,
  then the logit bias as ``isolation.ipc.logit_bias`` has it.
* StepOutput: counts of tokens, starts, failures, logprobs, alternatives (u32 each), running,
  waiting, free_blocks, defects, prompts, their positions, their alternatives (u32 each); columns requests n x u64,
  token_ids n x u32, finishes n x u8; starts n x (u64, u32, u64, 3 x u32, u8); failures n x (u64, u8); then logprobs and
  prompts as ``isolation.ipc.logprob`` has them.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from operator import attrgetter

from isolation.ipc.frame import (
    HEADER_BYTES,
    MAX_U64,
    Frame,
    Kind,
    MessageCodec,
    OutOfBoundsError,
    Record,
    record_codec,
    require,
    require_array,
    require_length,
    require_range,
    take_array,
    take_bytes,
)
from isolation.ipc.logit_bias import BIAS_BYTES, LogitBias, check_logit_bias, pack_logit_bias, unpack_logit_bias
from isolation.ipc.logprob import (
    PromptLogprobs,
    TokenLogprobs,
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
    DIGEST_BYTES,
    MAX_CHOICES,
    MAX_DEADLINE_US,
    MAX_STOP_IDS,
    MAX_TOKENS_PER_FRAME,
    MAX_TOKENS_PER_REQUEST,
    MAX_TOP_LOGPROBS,
    NAMESPACE_KEY_BYTES,
    FailureCode,
    Priority,
)
from isolation.ipc.sampling import WIRE_CODES, Sampling, out_of_bounds, values_of

MAX_WEIGHT = 1_000

_SUBMIT = struct.Struct(
    f"<IIHBHbBBbHQ{WIRE_CODES}{NAMESPACE_KEY_BYTES}s{NAMESPACE_KEY_BYTES}s{NAMESPACE_KEY_BYTES}s{DIGEST_BYTES}s"
    f"{NAMESPACE_KEY_BYTES}s"
)
_STEP = struct.Struct("<12I")
_START = struct.Struct("<QIQIIIB")
_START_FIELDS = attrgetter(
    "request", "cached_tokens", "queue_us", "memory_tokens", "disk_tokens", "store_tokens", "store_gap"
)
_FAILURE = struct.Struct("<QB")
_TOKEN_BYTES = 8 + 4 + 1
_FINISHES = bytes((0, 1, 2))
_NO_KEY = bytes(NAMESPACE_KEY_BYTES)
_NO_DIGEST = bytes(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request. ``max_tokens`` is the grant: the most output tokens the host accepts."""

    request: int
    namespace: bytes
    """``NAMESPACE_KEY_BYTES`` random bytes: whose request it is. They key the block hashes and name the account of
    blocks, unless there is a ``group``: same key, same namespace."""
    token_ids: array[int]
    """Prompt, typecode ``I``, at least one id."""
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    """Ids that end the output besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own stop ids are passed over (``stop_ids`` still hold)."""
    retain: bool = True
    """Whether finished blocks may serve later requests of the namespace."""
    logprobs: int = -1
    """-1 none; 0 the chosen token's; n also the n likeliest's, at most ``MAX_TOP_LOGPROBS``."""
    weight: int = 1
    """Share of the namespace in fair service, 1..1000."""
    priority: int = Priority.NORMAL
    """A ``Priority``."""
    deadline_us: int = 0
    """Microseconds from receipt in the engine after which the request fails as ``DEADLINE``, unsigned 64-bit below
    ``MAX_DEADLINE_US``; 0: never."""
    structured: bool = False
    """Whether each output token is chosen under a mask of its own: none is sampled before that has come."""
    prompt_logprobs: int = -1
    """As ``logprobs``, for every token of the prompt but the first. The prompt is then computed from its start,
    whatever is cached. Of several choices it concerns the first."""
    choices: int = 1
    """Outputs wanted, at most ``MAX_CHOICES``. Each is answered as a request of its own under ``request``,
    ``request + 1`` ..., with ``max_tokens`` for each, and drawn with the seed plus its number."""
    deterministic: bool = False
    """Whether tokens and log-probabilities must be the same bits alone and in any batch. Its blocks serve other
    deterministic requests only."""
    group: bytes = b""
    """Namespace key of the sharing group whose blocks it finds and leaves, or nothing. Service is still its own
    namespace's."""
    public: bytes = b""
    """Key of the public prefix that it may begin with, or nothing. As many whole blocks are shared as both have in
    common; what follows is its own, as ever. Not used with ``prompt_logprobs``."""
    logit_bias: LogitBias | None = None
    """Numbers added to the scores of some ids; of every choice, and of no prompt's log-probabilities."""
    adapter: bytes = b""
    """Digest of the adapter that changes the model for it, or nothing. No public prefix is used with one."""
    user: bytes = b""
    """Key of the end user's namespace within the tenant's, or nothing: it keys the block hashes in place of the
    namespace's, which still names their account."""
    coming: bool = False
    """Whether another host has just computed the prompt: blocks of it that the store does not have yet are waited
    for."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the request at the next step. Idempotent; an unknown id is ignored. Answered by a
    failure ``ABORTED`` when the request was live."""

    request: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, accept nothing more, then end the process with status 0."""


@dataclass(frozen=True, slots=True)
class Started:
    """A request was scheduled for the first time in this step."""

    request: int
    cached_tokens: int
    """Prompt tokens served from the namespace's own earlier blocks, and from a public prefix."""
    queue_us: int
    """Microseconds between receipt in the engine and scheduling, unsigned 64-bit."""
    memory_tokens: int = 0
    """Prompt tokens whose blocks came back for this request from the supervisor's memory; they are found again like
    others, and so are part of ``cached_tokens`` unless they were evicted before."""
    disk_tokens: int = 0
    """Likewise, from its disk."""
    store_tokens: int = 0
    """Likewise, from the store outside of the machine."""
    store_gap: bool = False
    """Whether the store was asked for blocks of the prompt and said that it lacks one. Where nobody asked, or nothing
    answered, nothing is known of what it has."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request ended without finishing; nothing more will come for it."""

    request: int
    code: FailureCode


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All that one step gave, in one frame. ``requests`` (typecode ``Q``), ``token_ids`` (``I``)
    and ``finishes`` run in parallel. Starts, failures and positions of prompts are bounded as the tokens are."""

    requests: array[int] = field(default_factory=lambda: array("Q"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    finishes: bytes = b""
    """One ``Finish`` a token."""
    starts: tuple[Started, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    failures: tuple[RequestFailure, ...] = ()
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    defects: int = 0
    """Promises of its own that the engine found broken since its start: none, unless there is a defect."""
    prompts: tuple[PromptLogprobs, ...] = ()


def _check_submit(message: Submit) -> None:
    require_array("the prompt", message.token_ids, "I")
    require_range("prompt length", len(message.token_ids), 1, MAX_TOKENS_PER_REQUEST)
    require_range("max_tokens", message.max_tokens, 1, MAX_TOKENS_PER_REQUEST)
    require(len(message.namespace) == NAMESPACE_KEY_BYTES, "the namespace key has another length")
    require(len(message.group) in (0, NAMESPACE_KEY_BYTES), "the group's key has another length")
    require(len(message.public) in (0, NAMESPACE_KEY_BYTES), "the public prefix's key has another length")
    require(len(message.adapter) in (0, DIGEST_BYTES), "the adapter's digest has another length")
    require(len(message.user) in (0, NAMESPACE_KEY_BYTES), "the end user's key has another length")
    require_length("stop_ids", len(message.stop_ids), MAX_STOP_IDS)
    require_range("logprobs", message.logprobs, -1, MAX_TOP_LOGPROBS)
    require_range("weight", message.weight, 1, MAX_WEIGHT)
    require_range("priority", message.priority, Priority.HIGH, Priority.LOW)
    require_range("prompt_logprobs", message.prompt_logprobs, -1, MAX_TOP_LOGPROBS)
    require_range("choices", message.choices, 1, MAX_CHOICES)
    require(message.request + message.choices - 1 <= MAX_U64, "the ids of the choices leave 64 bits")
    require_range("deadline_us", message.deadline_us, 0, MAX_DEADLINE_US)
    if message.logit_bias is not None:
        check_logit_bias(message.logit_bias)
    fault = out_of_bounds(message.sampling)
    require(not fault, fault)


def _pack_submit(message: Submit) -> bytes:
    bias = message.logit_bias
    fixed = _SUBMIT.pack(
        message.max_tokens,
        len(message.token_ids),
        message.weight,
        len(message.stop_ids),
        message.ignore_eos
        | message.retain << 1
        | message.structured << 2
        | message.deterministic << 3
        | bool(message.group) << 4
        | bool(message.public) << 5
        | bool(message.adapter) << 6
        | bool(message.user) << 7
        | message.coming << 8,
        message.logprobs,
        message.priority,
        message.choices,
        message.prompt_logprobs,
        len(bias) if bias is not None else 0,
        message.deadline_us,
        *values_of(message.sampling),
        message.namespace,
        message.group or _NO_KEY,
        message.public or _NO_KEY,
        message.adapter or _NO_DIGEST,
        message.user or _NO_KEY,
    )
    parts = (fixed, message.token_ids.tobytes(), array("I", message.stop_ids).tobytes())
    return b"".join(parts if bias is None else (*parts, *pack_logit_bias(bias)))


def _unpack_submit(request: int, frame: Frame) -> Submit:
    (
        max_tokens,
        num_tokens,
        weight,
        num_stop_ids,
        flags,
        logprobs,
        priority,
        choices,
        prompt_logprobs,
        num_biases,
        deadline_us,
        *numbers,
        namespace,
        group,
        public,
        adapter,
        user,
    ) = _SUBMIT.unpack_from(frame, HEADER_BYTES)
    require(flags < 512, "a flag that does not exist")
    require(bool(flags & 16) or group == _NO_KEY, "a group's key where there is no group")
    require(bool(flags & 32) or public == _NO_KEY, "a public prefix's key where there is none")
    require(bool(flags & 64) or adapter == _NO_DIGEST, "an adapter's digest where there is none")
    require(bool(flags & 128) or user == _NO_KEY, "an end user's key where there is none")
    prompt = HEADER_BYTES + _SUBMIT.size
    stops = prompt + 4 * num_tokens
    biases = stops + 4 * num_stop_ids
    end = biases + BIAS_BYTES * num_biases
    require(end == len(frame), "the counts do not give the frame's length")
    return Submit(
        request=request,
        namespace=namespace,
        token_ids=take_array("I", frame, prompt, stops),
        max_tokens=max_tokens,
        sampling=Sampling(*numbers),
        stop_ids=tuple(take_array("I", frame, stops, biases)),
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
        adapter=adapter if flags & 64 else b"",
        user=user if flags & 128 else b"",
        coming=bool(flags & 256),
        logit_bias=unpack_logit_bias(frame, biases, num_biases) if num_biases else None,
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
        parts.append(_START.pack(*_START_FIELDS(start)))
    for failure in message.failures:
        parts.append(_FAILURE.pack(failure.request, FailureCode(failure.code)))
    if entries:
        parts += pack_logprobs(entries)
    if message.prompts:
        parts += pack_prompts(message.prompts)
    return b"".join(parts)


def _started(fields: tuple[int, ...]) -> Started:
    request, cached, queue_us, memory, disk, store, gap = fields
    require(gap < 2, "a flag that does not exist")
    return Started(request, cached, queue_us, memory, disk, store, bool(gap))


def _unpack_step_output(_request: int, frame: Frame) -> StepOutput:
    (
        count,
        num_starts,
        num_failures,
        num_logprobs,
        num_alternatives,
        running,
        waiting,
        free_blocks,
        defects,
        num_prompts,
        num_positions,
        num_prompt_alternatives,
    ) = _STEP.unpack_from(frame, HEADER_BYTES)
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
        tuple(map(_started, _START.iter_unpack(frame[starts:failures]))) if num_starts else (),
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


ARMS = (
    MessageCodec(Kind.SUBMIT, Submit, _check_submit, _pack_submit, _unpack_submit),
    record_codec(Kind.ABORT, Abort, Record()),
    record_codec(Kind.DRAIN, Drain, Record(), names_request=False),
    MessageCodec(
        Kind.STEP_OUTPUT, StepOutput, _check_step_output, _pack_step_output, _unpack_step_output, names_request=False
    ),
)
