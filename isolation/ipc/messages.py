"""Protocol of a sandbox border: its order, its bounds, its shared words, and the handshake's messages.

A family of messages has a module: ``engine``, ``logprob``, ``embed``, ``text``, ``output``, ``grammar``, ``kv``,
``public``, ``ping``, ``prefetch`` and ``spill`` hold types and codec side by side, ``sampling`` the numbers of a draw.
All are frozen, typed and bounded.

Two peers speak over one channel: the *host* (supervisor during the handshake, gateway after it)
and the *guest* (the program in a sandbox). A message is one frame. Every message that concerns a
request carries the request's wire id, an unsigned 64-bit number that the gateway draws and never
reuses on one channel.

Order: guest ``Hello``, host ``Configure``, guest ``EngineReady`` or ``TextReady``; then, by role,

* engine: host ``Submit | Embed | Prefetch | Abort | Masks | KvQuotas | PublicPrefixes``, guest ``StepOutput |
  Embedding | KvUsage | PublicUsage``;
* text: host ``Encode | Decode | ReadVocabulary | ReadOutput``, guest ``Encoded | Decoded | Vocabulary | OutputRead |
  Failed``; host ``CloseOutput``, which has no answer; and, answered as they come and not in that order, host
  ``OpenGrammar | Advance | CloseGrammar``, guest ``Masks | Failed`` (``grammar``);
* spill, without ``Configure``: guest ``Keep | Withdraw | Fetch | Unwanted``, host ``Fetched | Forget | Share |
  Lost`` (``spill``);
* engine and text: host ``Ping``, guest ``Pong`` at once (``ping``); host ``Drain``, after which the guest finishes and
  leaves.

The bounds here are part of the protocol: the codec refuses a frame outside them on both sides.
Integers are unsigned 32-bit where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

PROTOCOL_VERSION = 25
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
NO_TOKEN = 0xFFFF_FFFF
"""Stands for no token where an id may be missing."""
NAMESPACE_KEY_BYTES = 32
"""Bytes of a namespace key, the key of the tenant's block hashes."""
DIGEST_BYTES = 32
"""Bytes of a digest of files: SHA-256."""


class Role(IntEnum):
    """Which program a sandbox runs, or what else a channel is for."""

    ENGINE = 1
    TEXT = 2
    SPILL = 3
    """An engine's second channel, to the supervisor: blocks of KV that leave it and come back."""


class WeightForm(IntEnum):
    """Form in which an engine holds the matrices that it multiplies by."""

    UNKNOWN = 0
    """It has not said, or another system computes."""
    NONE = 1
    """It has none: the null engine."""
    FLOAT32 = 2
    BF16 = 3
    FP16 = 4
    INT8 = 5
    """Rounded to 8-bit integers, a scale for each output."""
    FP8 = 6
    """Rounded to 8-bit floating point, a scale for each output."""
    PALETTE = 7
    """bfloat16, and on a card some matrices a second time without loss in 12 bits a weight."""
    COMPRESSED = 8
    """bfloat16, which compiled kernels hold without loss in about three quarters of its bytes."""

    @property
    def word(self) -> str:
        """Its name on every surface; empty where it is not known."""
        return self.name.lower() if self else ""


def weight_word(number: int) -> str:
    """Name of the weights' form with this number; empty for one that is not known."""
    return WeightForm(number).word if 0 <= number <= max(WeightForm) else ""


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
    NO_ADAPTER = 9
    """The engine has no adapter of the digest that was named: its files could not be used, or it found no room."""
    UNKNOWN_ARGUMENT = 8
    """The model's chat template has no argument of a name that was given."""
    ENDPOINT_FAILED = 10
    """The endpoint of an external model did not answer, refused, or broke off."""
    ENDPOINT_BUSY = 11
    """It takes no more requests now."""
    ENDPOINT_LATE = 12
    """It gave no token for too long."""
    ENDPOINT_WRONG = 13
    """It answered with what is no answer, or with more than was asked for."""


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
    form: int = 0
    """Number of the form in which it computes (``engine.backends.native.manifest.FORMS``); 0: it has not chosen one."""
    adapters: int = 0
    """Adapters that it has."""
    weights: int = WeightForm.UNKNOWN
    """Form of its weights: a ``WeightForm``."""


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
    calls: bool = False
    """Whether its outputs can call tools."""
    thinks: bool = False
    """Whether its outputs may hold reasoning."""
    think_begins: int = NO_TOKEN
    """Token that begins reasoning, where it stands between two tokens; else ``NO_TOKEN``."""
    think_ends: int = NO_TOKEN
    """Token that ends it; ``NO_TOKEN`` where ``think_begins`` is."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A text job failed. ``reason`` is for the caller and names nothing of the host."""

    request: int
    code: FailureCode
    reason: str
