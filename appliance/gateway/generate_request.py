"""What both front ends translate to, and what a session gives back: values only.

``GenerateRequest`` is checked by its builder (``appliance.gateway.front.request_builder``), so a session may trust its
ranges. Times are seconds of ``time.monotonic``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from appliance.common.audit.entry import Entry
from appliance.common.scopes import Scope
from isolation.ipc.grammar import GrammarKind, Whitespace
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.messages import Priority
from isolation.ipc.output import Thinking
from isolation.ipc.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: made by ``appliance.gateway.front.auth`` alone, from a verified credential."""

    tenant: str
    credential: str
    """As the policy spells it: ``key:ID``, ``oidc:ISSUER:VALUE`` or a SPIFFE URI."""
    scopes: frozenset[Scope] | None = field(default=None, compare=False)
    """Operations that the credential is limited to; None: to what its tenant may do."""
    secret: str = field(default="", compare=False)
    """Name of the secret that an API key was proved with (``appliance.common.keys.secret_name``), or of the key that
    signed a token."""
    ends: float = field(default=math.inf, compare=False)
    """Unix time at which a token ends."""
    listener: str = field(default="", compare=False)
    """By which the call came (``appliance.gateway.front.own_listeners.Entrance``); empty for a line of a batch."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: JSON object ``{"messages": [...], "tools": [...]?, "template_kwargs": {...}?, "hints": {...}?}``,
    UTF-8, shape checked, content not read."""

    source: bytes
    param: str = field(default="messages", compare=False)
    """Name by which the caller knows the field, for errors."""
    arguments_param: str = field(default="chat_template_kwargs", compare=False)
    """Name by which the caller knows the arguments of the chat template."""
    roles: frozenset[str] = field(default=frozenset(), compare=False)
    """Roles of its messages, for the policy."""
    fields: frozenset[str] = field(default=frozenset(), compare=False)
    """Fields beside the messages that it was made of, by the policy's names."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text for a completion."""

    text: str
    param: str = field(default="prompt", compare=False)
    """As in ``ChatPrompt``."""
    framed: bool = True
    """Whether the tokenizer adds its own special tokens around the text."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, typecode ``I``, used as they are."""

    token_ids: array[int]
    param: str = field(default="prompt", compare=False)
    """As in ``ChatPrompt``."""


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that an output may call."""

    source: bytes
    """JSON of them as the text sandbox reads it (``engine.text.output.tools``)."""
    names: frozenset[str]
    """Those that may be called."""
    held: bool = False
    """Whether calls are held to the tools' schemas by a grammar, or have to be made."""
    param: str = field(default="tools", compare=False)
    """Name by which the caller knows the field, for errors."""
    answer_param: str | None = field(default=None, compare=False)
    """Name by which the caller knows the schema that an output without calls follows; None: there is none."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output shall follow: bytes that nobody on the host reads."""

    kind: GrammarKind
    source: bytes
    whitespace: Whitespace = Whitespace.COMPACT
    """Between the tokens of JSON; without effect for other kinds."""
    thinking: Thinking = Thinking.NONE
    """Where the prompt leaves the model's reasoning; without effect for a kind that is not ``TOOLS``."""
    param: str = field(default="structured_outputs", compare=False)
    """Name of the field by which the caller sent it, for errors."""


class Operation(Enum):
    """``gen_ai.operation.name`` of a request."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"


class EmbedOperation(Enum):
    """``gen_ai.operation.name`` of a request for vectors."""

    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation, whichever front end it came through."""

    request_id: str
    """Made by the server, unguessable; a client's own id is never an internal key."""
    operation: Operation
    model: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int | None = None
    """Output tokens asked for; None: as much as policy and context leave."""
    max_tokens_param: str = field(default="max_tokens", compare=False)
    """Name by which the caller knows ``max_tokens``, for errors."""
    stop: tuple[str, ...] = ()
    """Strings that end the output and are not part of it."""
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    """-1 none, 0 the chosen token's, n alternatives besides."""
    deadline: float | None = None
    stream: bool = False
    priority: Priority | None = None
    """What the caller asks for; the tenant's own holds where that is less urgent, or None was given."""
    grammar: Grammar | None = None
    """What the output shall follow, if anything."""
    tools: Tools | None = None
    """What the output may call; what it follows otherwise is then part of this, and ``grammar`` is None."""
    prompt_logprobs: int = -1
    """As ``logprobs``, for the prompt."""
    logit_bias: LogitBias | None = None
    """Numbers added to the scores of some token ids."""
    echo: bool = False
    """Whether the prompt's text is part of the answer."""
    choices: int = 1
    """Outputs of the one prompt; choice ``i`` is drawn with the seed plus ``i``."""
    choices_param: str = field(default="n", compare=False)
    """Name by which the caller knows ``choices``, for errors."""
    deterministic: bool = False
    """Whether the caller asks for the same bits in any batch; the policy may refuse it, or grant it to all."""
    sent: frozenset[str] = field(default=frozenset(), compare=False)
    """Numbers of ``sampling`` that the caller sent, for the policy."""
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field, by the policy's name or ours -> the caller's spelling where it differs, for errors."""
    cache_key: str = field(default="", repr=False)
    """Text of the caller's that requests with one beginning have in common: a route gives them to one model."""
    alias: str = ""
    """Route or adapter by which the caller asked for ``model``; empty: by the model's own name."""
    adapter: str = ""
    """Whole name of the adapter with which ``model`` serves it; empty: without one."""
    passed_over: str = ""
    """Model that its route would have chosen and passed over because it sleeps; it wakes behind the request."""
    end_user: str = field(default="", compare=False)
    """Pseudonym of the tenant's user for whom it is (``appliance.gateway.front.end_user``); empty: not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Some texts, each to be made one vector of."""

    request_id: str
    """As in ``GenerateRequest``."""
    model: str
    inputs: tuple[TextPrompt | TokenPrompt, ...]
    """At least one."""
    param: str = "input"
    """Name by which the caller knows ``inputs``, for errors."""
    dimensions: int | None = None
    """How many of a vector's numbers are wanted; None: all."""
    deadline: float | None = None
    priority: Priority | None = None
    end_user: str = field(default="", compare=False)
    """As in ``GenerateRequest``."""
    operation: EmbedOperation = EmbedOperation.EMBEDDINGS
    alias: str = ""
    """As in ``GenerateRequest``."""
    adapter: str = ""
    """As in ``GenerateRequest``."""
    passed_over: str = ""
    """As in ``GenerateRequest``."""


class ScoreOperation(Enum):
    """``gen_ai.operation.name`` of a request for scores."""

    RERANK = "rerank"
    SCORE = "score"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Texts to be scored against others, or to be classified."""

    request_id: str
    """As in ``GenerateRequest``."""
    operation: ScoreOperation
    model: str
    queries: tuple[TextPrompt, ...]
    """One for all documents, or one for each; none to classify."""
    documents: tuple[TextPrompt, ...]
    """At least one."""
    param: str = "documents"
    """Name by which the caller knows ``documents``, for errors."""
    deadline: float | None = None
    priority: Priority | None = None
    end_user: str = field(default="", compare=False)
    """As in ``GenerateRequest``."""
    alias: str = ""
    """As in ``GenerateRequest``."""
    adapter: str = ""
    """As in ``GenerateRequest``."""
    passed_over: str = ""
    """As in ``GenerateRequest``."""


class TokenizerOperation(Enum):
    """``gen_ai.operation.name`` of a request to a tokenizer alone."""

    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRequest:
    """A prompt to be made token ids, or token ids to be made text; no engine sees it."""

    request_id: str
    """As in ``GenerateRequest``."""
    operation: TokenizerOperation
    model: str
    prompt: Prompt
    """What is converted: token ids where text is wanted."""
    deadline: float | None = None
    alias: str = ""
    """As in ``GenerateRequest``."""
    adapter: str = ""
    """As in ``GenerateRequest``."""
    passed_over: str = ""
    """As in ``GenerateRequest``."""


class AttestOperation(Enum):
    """``gen_ai.operation.name`` of a request for an attestation."""

    ATTEST = "attest"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestRequest:
    """A question for what serves a model; no sandbox sees it."""

    request_id: str
    """As in ``GenerateRequest``."""
    model: str
    alias: str = ""
    """As in ``GenerateRequest``."""
    adapter: str = ""
    """As in ``GenerateRequest``."""
    passed_over: str = ""
    """As in ``GenerateRequest``."""
    nonce: str
    """The caller's, drawn for this call; small hexadecimal digits."""
    deadline: float | None = None
    operation: AttestOperation = AttestOperation.ATTEST


AnyRequest = GenerateRequest | EmbedRequest | ScoreRequest | TokenizerRequest | AttestRequest
"""What a session is made for."""

Routable = TypeVar("Routable", bound=AnyRequest)
"""Kind of request that comes back as it went in."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids of a prompt, as a request with this prompt would be counted."""

    token_ids: array[int]
    """Typecode ``I``."""
    max_context: int
    """Tokens of the model's context; 0 while no engine has told them."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What became of them."""

    vectors: tuple[array[float], ...]
    """Typecode ``f``, in the order of the texts, all of one length."""
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of pairs, or the classes of texts."""

    values: tuple[tuple[float, ...], ...]
    """For each document, in their order: its one score, or a probability for each label."""
    input_tokens: int
    labels: tuple[str, ...] = ()
    """Names of the labels; none where nothing was classified."""

    def best(self, most: int) -> list[int]:
        """Return the documents with the highest scores, the best first; of equal ones the first."""
        return sorted(range(len(self.values)), key=lambda index: (-self.values[index][0], index))[:most]


class FinishReason(Enum):
    """OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """It has calls, and all are complete."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token with its log-probability and the likeliest alternatives; ``text`` may hold part of a character."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt with its log-probability given those before it; the first has none."""

    token_id: int
    text: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The engine took the request up; always the first event."""

    input_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call that begins, or more of its arguments, or the news that it is none."""

    index: int
    """Which call of the output, from 0."""
    name: str = ""
    """The tool's name, where the call begins."""
    call_id: str = ""
    """Its id, where it begins."""
    arguments: str = ""
    """More JSON text of its arguments."""
    refused: bool = False
    """Whether it turned out to be none: its text follows as content."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text (whole characters, possibly empty) and the tokens that carried it."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    reasoning: str = ""
    """New text that the model wrote to itself; before ``text``."""
    calls: tuple[CallDelta, ...] = ()
    """What became of calls; behind ``text``."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt, where it was asked for; once, before any ``Delta``."""

    text: str
    """Empty unless an echo was asked for."""
    tokens: tuple[PromptToken, ...]
    """Empty unless log-probabilities were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One of several choices is complete, and others are not yet."""

    choice: int
    reason: FinishReason
    stop: str | None = None
    """The stop string that ended it, if one did."""
    refused: str | None = None
    """Why text that begins like a call is none, where there was some."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended well. Reason and stop string are those of the choice that ended last,
    counts of all together; the prompt counts once."""

    reason: FinishReason
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    stop: str | None = None
    """The stop string that ended it, if one did."""
    choice: int = 0
    refused: str | None = None
    """As in ``ChoiceFinished``."""
    reasoning_tokens: int = 0
    """Output tokens that are reasoning."""


Event = Started | PromptTokens | Delta | ChoiceFinished | Finished


@dataclass(frozen=True, slots=True)
class RateState:
    """What is left of the tenant's request and token rate, for ``x-ratelimit-*`` headers."""

    limit_requests: int
    remaining_requests: int
    reset_requests_s: float
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_s: float


@dataclass(frozen=True, slots=True)
class BatchLine:
    """What a request that is a line of a batch has besides."""

    batch: str
    """Id of the batch."""
    charge: Callable[[Entry], None]
    """Takes the request's entry of the audit log, which is written with the line's result and not by the gateway."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a front end knows of a call besides its content."""

    route: str
    """``POST /v1/chat/completions`` or the full gRPC method name: the server span's name."""
    front_end: str
    """``http``, ``grpc`` or ``batch``."""
    traceparent: str | None = None
    attributes: dict[str, str | int] = field(default_factory=dict)
    line: BatchLine | None = None
    """Set for a line of a batch."""
    listener: str = ""
    """The one tenant by whose own listener the call came; empty where it takes all tenants."""
    prefiller: str = ""
    """HOST:PORT of the host that a router chose to compute the prompt; empty where it named none."""


class Sink(Protocol):
    """Where a session writes its deltas without waking anybody. All calls come from the event loop and do not wait."""

    @property
    def ready(self) -> bool:
        """Whether the client reads fast enough to be written to."""
        ...

    def on_ready(self, call: Callable[[], None] | None) -> None:
        """Call this whenever ``ready`` becomes true again, or nothing any more."""
        ...

    def delta(self, delta: Delta) -> None:
        """Write it."""
        ...
