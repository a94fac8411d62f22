"""The messages that cross a sandbox border: frozen, typed, bounded.

Two peers speak over one channel: the *host* (supervisor during the handshake, gateway after it)
and the *guest* (the program in a sandbox). A message is one frame. Every message that concerns a
request carries the request's wire id, an unsigned 64-bit number that the gateway draws and never
reuses on one channel.

Order: guest ``Hello``, host ``Configure``, guest ``EngineReady`` or ``TextReady``; then, by role,

* engine: host ``Submit | Embed | Abort | Masks | KvQuotas | PublicPrefixes``, guest ``StepOutput | Embedding |
  KvUsage | PublicUsage``;
* text: host ``Encode | Decode | ReadVocabulary``, guest ``Encoded | Decoded | Vocabulary | Failed``; and, answered as
  they come and not in that order, host ``OpenGrammar | Advance | CloseGrammar``, guest ``Masks | Failed``
  (``grammar_messages``);
* spill, without ``Configure``: guest ``Keep | Fetch``, host ``Fetched | Forget`` (``spill_messages``);
* engine and text: host ``Drain``, after which the guest finishes and leaves.

The bounds here are part of the protocol: the codec refuses a frame outside them on both sides.
Integers are unsigned 32-bit where nothing else is said.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from isolation.ipc.grammar_messages import Advance, CloseGrammar, Masks, OpenGrammar
from isolation.ipc.kv_messages import KvQuotas, KvUsage
from isolation.ipc.public_messages import PublicPrefixes, PublicUsage
from isolation.ipc.spill_messages import Fetch, Fetched, Forget, Keep
from isolation.ipc.text_messages import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary

PROTOCOL_VERSION = 6
"""Raised by one whenever a frame of the last version would be read differently."""
WAITS_LINE = "waits for its host"
"""What a guest says on stderr when it has come to its meeting point before its host: everything is imported, and
nothing of the host's is there yet."""
MAX_FRAME_BYTES = 5 << 20
"""Bytes of one frame with its header: a 4 MiB prompt body and room around it."""
MAX_CONFIG_BYTES = 64 << 10
"""Bytes of the JSON configuration in ``Configure``."""
MAX_TOKENS_PER_REQUEST = 1 << 20
"""Token ids in a prompt, ``Encoded`` or ``Decode``; the longest published context is 1 Mi."""
MAX_SOURCE_BYTES = 4 << 20
"""Bytes of the UTF-8 text or JSON conversation in one ``Encode``."""
MAX_STOP_IDS = 64
"""Additional stop token ids of one request."""
MAX_TOKENS_PER_FRAME = 65_536
"""Token events in one ``StepOutput``: 4,096 sequences times 16 steps of a replay."""
MAX_TOP_LOGPROBS = 20
"""Alternatives reported beside a token, the limit of OpenAI's API."""
MAX_REASON_BYTES = 512
"""Bytes of the human text in ``Failed``."""
MAX_VOCABULARY_ENTRIES = 8_192
"""Entries in one ``Vocabulary`` frame; a larger table takes several frames."""
MAX_ENTRY_BYTES = 1_024
"""Bytes of one token's text; the longest in published vocabularies is 512 (runs of spaces)."""
MAX_EMBEDDING = 65_536
"""Numbers of one embedding; the widest published residual stream has 18,432."""
MAX_DEADLINE_US = 7 * 24 * 3_600 * 1_000_000
"""Microseconds in a week: beyond any request's life, and far from where nanoseconds would leave 64 bits."""
MAX_CHOICES = 16
"""Outputs of one prompt in one request; each takes a row of the engine and a grant of its own."""
NAMESPACE_KEY_BYTES = 32
"""Bytes of a namespace key, the key of the tenant's block hashes."""


class Role(IntEnum):
    """Which program a sandbox runs, or what else a channel is for."""

    ENGINE = 1
    TEXT = 2
    SPILL = 3
    """An engine's second channel, to the supervisor: blocks of KV that leave it and come back."""


class Finish(IntEnum):
    """Why a request's last token is its last; ``NONE`` on every other token."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class FailureCode(IntEnum):
    """Why a request ended without its answer, or a text job without its result."""

    ABORTED = 1
    """The host asked for it."""
    INVALID = 2
    """It cannot be run as asked: an id out of range, a malformed chat, a template's refusal."""
    TOO_LONG = 3
    """It does not fit context or KV cache, or a text gives more tokens than allowed."""
    OVERLOADED = 4
    """A bounded queue inside the sandbox is full; asking again later may help."""
    INTERNAL = 5
    """A defect met while serving this request; other requests go on."""
    DEADLINE = 6
    """Its deadline passed, while it waited or while it ran."""
    INTEGRITY = 7
    """A KV block in its table was not its own: a defect of the engine. Nothing of the block was read; other requests
    go on, and the same one may be sent again."""


class Priority(IntEnum):
    """Who goes first: while a request of a lower number can be served, none of a higher number is begun."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """The guest is up and speaks this protocol version in this role."""

    version: int
    role: Role


@dataclass(frozen=True, slots=True)
class Configure:
    """The guest's configuration: JSON of ``EngineConfig`` or ``TextConfig``."""

    config: bytes


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Loaded and warm. Counts are 1 or more, and claims: the host uses them within its bounds."""

    vocab_size: int
    """Width of the logits: every id in a prompt must be below it."""
    max_context: int
    """Tokens of prompt and output together."""
    block_size: int
    num_blocks: int
    deterministic: bool = False
    """Whether it can serve deterministic requests."""
    publishes: bool = False
    """Whether it can keep public prefixes."""


@dataclass(frozen=True, slots=True)
class TextReady:
    """Tokenizer and template are loaded."""

    vocab_size: int
    """One more than the highest id the tokenizer can give."""
    has_chat_template: bool
    exact_vocabulary: bool
    """Whether the id-to-bytes table decodes as the tokenizer does (the guest tries samples)."""
    strip_leading_space: bool
    """Whether a decoded text loses its first character when a space (SentencePiece's prefix)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Numbers that choose a token. Greedy when ``temperature`` is 0. Order of application:
    penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """0 or more, finite."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    """In (0, 1]."""
    min_p: float = 0.0
    """In [0, 1]."""
    repetition_penalty: float = 1.0
    """Above 0; over prompt and output, as in CTRL (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """In [-2, 2]; over the output."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; over the output."""
    seed: int = 0
    """Unsigned 64-bit; the host always draws one, so a request is reproducible."""


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


@dataclass(frozen=True, slots=True)
class Embed:
    """Pool this text into one vector. Answered by one ``Embedding`` and, behind it, the end of the request in a
    ``StepOutput`` (one token of no meaning), or by a failure; an engine that generates answers ``INVALID``, as one that
    embeds does to a ``Submit``. Nothing of it is kept."""

    request: int
    namespace: bytes
    """As in ``Submit``."""
    token_ids: array[int]
    """Typecode ``I``, at least one id."""
    weight: int = 1
    """As in ``Submit``."""
    priority: int = Priority.NORMAL
    """As in ``Submit``."""
    deadline_us: int = 0
    """As in ``Submit``."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of an ``Embed``."""

    request: int
    values: array[float]
    """Typecode ``f``, 1 to ``MAX_EMBEDDING`` finite numbers; as many for every request of one engine."""


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities beside one token event."""

    index: int
    """Position in the frame's parallel arrays; ascends within a frame, each at most once."""
    logprob: float
    """Finite, as are the alternatives'."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one request, each given the tokens before it. A request's
    entries follow each other without a gap, from position 1 on, and are complete before its first token.

    Three columns: ``logprobs`` (typecode ``d``) one a position; ``top_ids`` (``I``) and ``top_logprobs`` (``d``) the
    alternatives, position after position, the same number for each, at most ``MAX_TOP_LOGPROBS``."""

    request: int
    start: int
    """Position of the first token."""
    logprobs: array[float]
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def width(self) -> int:
        """Alternatives of each position."""
        return len(self.top_ids) // len(self.logprobs)


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


@dataclass(frozen=True, slots=True)
class Failed:
    """A text job failed. ``reason`` is for the caller and names nothing of the host."""

    request: int
    code: FailureCode
    reason: str


EngineRequest = Submit | Embed | Abort | Masks | KvQuotas | PublicPrefixes
TextRequest = Encode | Decode | ReadVocabulary | OpenGrammar | Advance | CloseGrammar
HostMessage = Configure | Drain | EngineRequest | TextRequest | Fetched | Forget
TextAnswer = Encoded | Decoded | Vocabulary | Failed
GuestMessage = (
    Hello | EngineReady | TextReady | StepOutput | Embedding | KvUsage | PublicUsage | TextAnswer | Masks | Keep | Fetch
)
Message = HostMessage | GuestMessage
