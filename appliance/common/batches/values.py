"""Files, batches and stored responses as supervisor and gateway know them, with their bounds. Values only; times are
Unix seconds, 0 for what has not happened."""

from __future__ import annotations

from dataclasses import dataclass, field

PIECE_BYTES = 1 << 20
"""Bytes of a piece in which content crosses between gateway and supervisor, and is sealed: some milliseconds of work.
Every piece of a file but its last one has this size."""

MAX_FILE_BYTES = 200 << 20
"""Bytes of one uploaded file: OpenAI's limit for the input of a batch."""

MAX_LINES = 50_000
"""Requests of one file: OpenAI's limit for a batch."""

MAX_LINE_BYTES = 4 << 20
"""Bytes of one line: the largest body of a request by HTTP."""

MAX_RESULT_BYTES = 16 << 20
"""Bytes of one line's result: the vectors of 2,048 texts as decimal numbers."""

MAX_FILES = 1_000
"""Uploaded files of one tenant: one page of a list, and a bound of the index."""

MAX_BATCHES = 1_000
"""Batches of one tenant, ended ones too until they are removed."""

MAX_OPEN_BATCHES = 32
"""Batches of one tenant that are not over: it has as many turns as one anyway."""

MAX_OPEN_IN_ALL = 1_000
"""Batches of all tenants that are not over: the gateway holds some lines of each."""

MAX_NAME_CHARS = 256
"""Characters of a file's name."""

MAX_METADATA = 16
"""Pairs of a batch's metadata, with keys and values as long as OpenAI's."""
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

MAX_PROBLEMS = 100
"""Problems of an input file that are told."""

DAY_S = 86_400
FILE_KEEP_S = 30 * DAY_S
"""Seconds for which a file is kept where its upload says nothing, and results where their batch says nothing: OpenAI's
for results."""

LEAST_KEEP_S = 3_600
"""Shortest time for which an upload or a batch may ask, as with OpenAI; the longest is ``FILE_KEEP_S``."""

MAX_RESPONSES = 10_000
"""Stored responses of one tenant: a conversation of an agent has some hundreds."""

MAX_RESPONSE_BYTES = MAX_RESULT_BYTES
"""Bytes of one stored response with the items before it: the largest input, and the longest answer."""

MAX_RESPONSE_ID_CHARS = 64
"""Characters of the id of a response."""

RESPONSE_KEEP_S = 30 * DAY_S
"""Seconds for which a response is kept, as with OpenAI."""

WINDOWS = {"24h": DAY_S}
"""Word of a completion window -> its seconds."""

PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
"""Purposes of the files that batches read and of results."""

PURPOSES = (PURPOSE, "assistants", "fine-tune", "vision", "user_data", "evals")
"""Purposes of uploads, as with OpenAI. Files of all but the first are kept, and read by their tenant alone."""

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/v1/rerank", "/v1/score", "/v1/classify"),
)
"""Routes whose requests a batch may have."""

MAX_PROMPTS = 128
"""Prompts of one request, each of which is a request of the tenant's rate, and has a charge of its own."""

VALIDATING, IN_PROGRESS, CANCELLING = OPEN = ("validating", "in_progress", "cancelling")
"""States of a batch that is not over; its file is being read, its lines run, or those that began are ending."""

COMPLETED, FAILED, EXPIRED, CANCELLED = ("completed", "failed", "expired", "cancelled")
"""States of one that is over. ``failed``: its file was refused."""

EXPIRED_CODE = "batch_expired"
"""Code of the error of a line that did not end before the window's end."""

CANCELLED_CODE = "batch_cancelled"
"""Code of the error of a line of several prompts of which some were answered when its batch was cancelled."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is kept."""

    id: str
    purpose: str
    name: str
    size: int
    """Bytes."""
    created: int
    expires: int


@dataclass(frozen=True, slots=True)
class LineProblem:
    """What is wrong with an input file."""

    code: str
    message: str
    line: int = 0
    """Number of the line, from 1; 0: the whole file."""
    param: str = ""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch that is kept."""

    id: str
    tenant: str
    credential: str
    """Credential that made it, as the policy spells it; its lines run as requests of this one."""
    endpoint: str
    input_file: str
    status: str
    created: int
    expires: int
    """End of its window."""
    output_file: str = ""
    error_file: str = ""
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    total: int = 0
    """Lines with a request."""
    completed: int = 0
    failed: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    problems: list[LineProblem] = field(default_factory=list)
    output_keep_s: int = 0
    """Seconds for which its results are kept; 0: as long as files are."""


MAX_LINES_GIVEN = 64
"""Lines of one answer of the store, of a piece's bytes together unless one alone has more."""


def line_request(batch: str, line: int, prompt: int = 0) -> str:
    """Return the id of the request that a line is: the same at every attempt, so that it is charged once. Each prompt
    behind the first is a request of its own, and has its number behind the line's id."""
    return f"{batch}-{line}.{prompt}" if prompt else f"{batch}-{line}"
