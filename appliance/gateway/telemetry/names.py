"""Names of everything that telemetry emits: spans, attributes and metrics.

Pinned to OpenTelemetry semantic conventions v1.41.1, the last core release that held the GenAI group (it moved to a
repository of its own without a tagged release). The package of constants marks that group deprecated, hence the
literals. Own names begin with ``athanor.``; there is no name for a prompt, an answer, a stop string or a key, because
content is never recorded. Sources: semantic-conventions v1.41.1, docs/gen-ai/gen-ai-spans.md and gen-ai-metrics.md,
docs/http/http-spans.md, docs/rpc/grpc.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.gateway.telemetry.split_names import SPLIT_COUNTERS

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
"""The pin, sent with every span and metric."""

SCOPE = "athanor"
"""Instrumentation scope, service name and ``gen_ai.provider.name``."""

# Attributes of the conventions.
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
OUTPUT_TYPE = "gen_ai.output.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_CHOICES = "gen_ai.request.choice.count"
EMBEDDING_DIMENSIONS = "gen_ai.embeddings.dimension.count"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105 - a name, not a secret

# Own attributes.
TENANT = "athanor.tenant.id"
REQUEST_ID = "athanor.request.id"
FRONT_END = "athanor.front_end"
LISTENER = "athanor.listener"
OUTCOME = "athanor.outcome"
SANDBOX = "athanor.sandbox"
CREDENTIAL = "athanor.credential"
POLICY_RULE = "athanor.policy.rule"
POLICY_DIGEST = "athanor.policy.digest"
PHASE = "athanor.phase"
LINK_REASON = "athanor.link.reason"
REPLAYED_SPAN = "athanor.replayed_span"

ENGINE_LOST = "engine_lost"
"""``error.type`` of a phase that its engine did not live to end; the request itself may go on in the next one."""

OWN_PREFIX = "athanor."

TOKEN_TYPES = ("input", "cached", "output")
"""Values of the tokens' label."""

QUEUE_ADMITTED, QUEUE_REFUSED, QUEUE_CANCELLED = QUEUE_OUTCOMES = ("admitted", "refused", "cancelled")
"""Ends of a wait for a limit: it went on, it was refused after all, or its client left."""

LINE_COMPLETED, LINE_FAILED, LINE_DELAYED = LINE_OUTCOMES = ("completed", "failed", "delayed")
"""What became of a line of a batch: it has its answer, it has an error, or it is tried again later."""

RESPONSE_KEPT, RESPONSE_NOT_KEPT, RESPONSE_READ, RESPONSE_DELETED = RESPONSE_OUTCOMES = (
    *("kept", "not_kept"),
    *("read", "deleted"),
)
"""What was done with a stored response; ``not_kept``: it was to be kept, and could not be."""

DROP_REASONS = ("queue_full", "export_failed", "shutdown")
"""Why a span does not reach the collector."""

_ALIASES = {"tenant": TENANT, "model": REQUEST_MODEL}


def own_attribute(word: str) -> str:
    """Return the attribute that a keyword of ``annotate``, ``end`` or ``count`` stands for.

    The first underscore becomes a dot: ``policy_rule`` is ``athanor.policy.rule``, ``queue_wait_us`` is
    ``athanor.queue.wait_us``, ``sandbox`` is ``athanor.sandbox``; ``tenant`` and ``model`` are those of all.
    """
    return _ALIASES.get(word) or OWN_PREFIX + word.replace("_", ".", 1)


# Metrics of the conventions; bucket bounds are the specification's own.
REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105 - a name, not a secret
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"  # noqa: S105 - a name, not a secret
TOKEN_USAGE = "gen_ai.client.token.usage"  # noqa: S105 - a name, not a secret

# Own metrics.
REQUESTS = "athanor.requests"
REFUSALS = "athanor.refusals"
FAILURES = "athanor.failures"
TOKENS = "athanor.tokens"
COST = "athanor.cost"
PHASE_DURATION = "athanor.phase.duration"
OUTPUT_TOKEN_LATENCY = "athanor.output_token.latency"  # noqa: S105 - a name, not a secret
SANDBOX_RESTARTS = "athanor.sandbox.restarts"
SANDBOX_STARTS = "athanor.sandbox.starts"
SANDBOX_THAWS = "athanor.sandbox.thaws"
POLICY_RELOADS = "athanor.policy.reloads"
OPERATOR_CALLS = "athanor.operator.calls"
QUEUED_REQUESTS = "athanor.policy.queued_requests"
DOWNGRADED_REQUESTS = "athanor.policy.downgraded_requests"
EXTERNAL_OUTPUTS = "athanor.external.outputs"
WAITING_REQUESTS = "athanor.policy.waiting_requests"
DROPPED_SPANS = "athanor.telemetry.dropped_spans"
CONNECTIONS = "athanor.connections"
EVICTED_CONNECTIONS = "athanor.connections.evicted"
DELAYED_HANDSHAKES = "athanor.handshakes.delayed"
WAITING_HANDSHAKES = "athanor.handshakes.waiting"
BACKGROUND_STREAMS, BACKGROUND_BYTES = "athanor.background.streams", "athanor.background.bytes"
WAITING_STRANGERS = "athanor.strangers.waiting"
RUNNING, WAITING = "athanor.engine.running_requests", "athanor.engine.waiting_requests"
KV_FREE_BLOCKS = "athanor.engine.kv_free_blocks"
ENGINE_DEFECTS = "athanor.engine.defects"
INTEGRITY_FAILURES = "athanor.engine.integrity_failures"
AUDIT_FAILING = "athanor.audit.failing"
AUDIT_UNWITNESSED = "athanor.audit.unwitnessed"
FLEET_LENT, FLEET_BORROWED = "athanor.fleet.lent", "athanor.fleet.borrowed"
FLEET_KEYS_HELD, FLEET_SHREDS = "athanor.fleet.keys_held", "athanor.fleet.shreds"
FLEET_REFUSED, FLEET_STORE_AWAY = "athanor.fleet.refused_values", "athanor.fleet.store_away"
CERTIFICATE_END = "athanor.certificate.end"
KV_BLOCKS = "athanor.engine.kv_blocks"
KV_CACHED_BLOCKS = "athanor.engine.kv_cached_blocks"
KV_RESIDENT, KV_RESERVED = "athanor.kv.resident_blocks", "athanor.kv.reserved_blocks"
KV_BORROWED, KV_LOST = "athanor.kv.borrowed_blocks", "athanor.kv.lost_blocks"
KV_PREEMPTED, KV_WAITED = "athanor.kv.preempted_requests", "athanor.kv.cap_waits"
DISK_FREE, DISK_SIZE, CHECKPOINT_SIZE = "athanor.disk.free", "athanor.disk.size", "athanor.checkpoint.size"
GPU_WATCHED, GPU_LOST, GPU_BUSY = "athanor.gpu.watched", "athanor.gpu.lost", "athanor.gpu.busy"
GPU_MEMORY_SIZE, GPU_MEMORY_USED = "athanor.gpu.memory_size", "athanor.gpu.memory_used"
GPU_POWER, GPU_POWER_LIMIT = "athanor.gpu.power", "athanor.gpu.power_limit"
GPU_TEMPERATURE = "athanor.gpu.temperature"
GPU_ECC, GPU_REMAPPED_ROWS = "athanor.gpu.uncorrected_errors", "athanor.gpu.remapped_rows"
GPU_FAILING, GPU_THROTTLED = "athanor.gpu.failing", "athanor.gpu.throttled"
GPU_MODEL_MEMORY, GPU_MODEL_SHARE = "athanor.gpu.model_memory", "athanor.gpu.model_share"
GPU_XIDS, GPU_OUT, GPU_UNPLACED = "athanor.gpu.xids", "athanor.gpu.out", "athanor.gpu.unplaced"
GPU_MOVES = "athanor.gpu.moves"
SPILL_BYTES, SPILL_OBJECTS = "athanor.spill.bytes", "athanor.spill.objects"
SPILL_BLOCKS = "athanor.spill.blocks"
RESTORED_TOKENS, KV_STORE_AWAY = "athanor.kv.restored_tokens", "athanor.kv_store.away"
KV_PUBLIC_BLOCKS, KV_PUBLIC_HITS = "athanor.kv.public_blocks", "athanor.kv.public_hits"
MODELS, MODEL_STATE, MODEL_WAKE_TIME = "athanor.models", "athanor.model.state", "athanor.model.last_wake"
MODEL_WEIGHTS, MODEL_RANKS = "athanor.model.weights", "athanor.model.ranks"
MODEL_WAKES, MODEL_SLEEPS = "athanor.model.wakes", "athanor.model.sleeps"
MODEL_REFUSALS = "athanor.model.asleep_refusals"
SANDBOX_READY = "athanor.sandbox.ready"
SANDBOX_MEMORY, SANDBOX_MEMORY_LIMIT = "athanor.sandbox.memory", "athanor.sandbox.memory_limit"
SANDBOX_AWAY = "athanor.sandbox.last_away"
SANDBOX_FROZEN = "athanor.sandbox.frozen"
REFUSED_CREDENTIALS = "athanor.refused_credentials"
SANDBOX_LOSSES = "athanor.sandbox.losses"
SANDBOX_HANGS = "athanor.sandbox.hangs"
HAND_OVER_CUTS = "athanor.sandbox.hand_over_cuts"
OWN_SANDBOXES = "athanor.sandbox.own"
REPLAYS = "athanor.replays"
SHADOW_DECISIONS = "athanor.policy.shadow_decisions"
ROUTE_CHOICES = "athanor.route_choices"
SUSPECTS, QUARANTINED = "athanor.suspects", "athanor.quarantined"
BATCH_LINES = "athanor.batch.lines"
RESPONSES = "athanor.response.operations"
STORED_RESPONSES = "athanor.response.stored"
STORED_BYTES, STORED_FILES = "athanor.batch.stored_bytes", "athanor.batch.stored_files"
OPEN_BATCHES = "athanor.batch.open_batches"
OLDEST_BATCH, STUCK_BATCHES = "athanor.batch.oldest", "athanor.batch.stuck_batches"
MAX_STORED_BYTES = "athanor.batch.max_stored_bytes"
WAITING_LINES = "athanor.batch.waiting_lines"
SENT_SPANS, QUEUED_SPANS = "athanor.telemetry.sent_spans", "athanor.telemetry.queued_spans"


@dataclass(frozen=True, slots=True)
class Instrument:
    """Unit (UCUM), description, and the labels a counter or gauge takes, as the keywords of
    ``count`` and ``gauge``.
    """

    unit: str
    description: str
    labels: frozenset[str] = frozenset()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in ``unit``."""


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(float(bound) for bound in text.split())


HISTOGRAMS = {
    REQUEST_DURATION: Instrument(
        "s",
        "Time from the arrival of a request to its last byte.",
        buckets=_bounds("0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92"),
    ),
    TIME_TO_FIRST_TOKEN: Instrument(
        "s",
        "Time from the arrival of a request to its first output token.",
        buckets=_bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10"),
    ),
    TIME_PER_OUTPUT_TOKEN: Instrument(
        "s",
        "Mean time per output token after the first.",
        buckets=_bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5"),
    ),
    TOKEN_USAGE: Instrument(
        "{token}", "Input and output tokens of one request.", buckets=tuple(float(4**power) for power in range(14))
    ),
    PHASE_DURATION: Instrument(
        "s",
        "Time that requests spend in one phase: policy, text, queue, prefill, decode.",
        buckets=_bounds("0.0001 0.00025 0.001 0.0025 0.01 0.025 0.1 0.25 1 2.5 10 25 100"),
    ),
    # The conventions' first bucket ends at 10 ms, which is all of a fast engine.
    OUTPUT_TOKEN_LATENCY: Instrument(
        "s",
        "Mean time per output token after the first, in fine buckets.",
        buckets=_bounds("0.0005 0.001 0.002 0.003 0.004 0.006 0.008 0.012 0.016 0.024 0.05 0.1 0.25 1"),
    ),
}
"""Filled when a request finishes; nothing outside this package records them."""

_GPU = frozenset({"gpu", "gpu_uuid"})
"""Labels of a GPU that a model uses: the N of /dev/nvidiaN, and its UUID."""

COUNTERS = {
    REQUESTS: Instrument(
        "{request}",
        "Requests by outcome: ok, refused (by a limit or a rule), invalid (the caller's mistake), cancelled, failed "
        "(our fault).",
        frozenset({"tenant", "model", "outcome", "front_end"}),
    ),
    REFUSALS: Instrument("{request}", "Requests refused by a limit or a rule.", frozenset({"tenant", "reason"})),
    FAILURES: Instrument("{request}", "Requests that failed by our fault.", frozenset({"tenant", "reason"})),
    REFUSED_CREDENTIALS: Instrument(
        "{call}",
        "Calls whose credential was refused, or is limited to other operations, by reason.",
        frozenset({"reason"}),
    ),
    TOKENS: Instrument(
        "{token}",
        "Tokens by type: input, output, and cached, the part of input found in the tenant's KV.",
        frozenset({"tenant", "model", "token_type"}),
    ),
    COST: Instrument(
        "{billionth}",
        "Cost of finished requests at the policy's prices, in billionths of its currency's unit.",
        frozenset({"tenant", "model"}),
    ),
    SANDBOX_RESTARTS: Instrument("{restart}", "Sandboxes booted again after they ended.", frozenset({"model", "role"})),
    SANDBOX_STARTS: Instrument(
        "{start}",
        "Sandboxes that became ready: cold, restored from a checkpoint, or fallen_back because theirs was of no use.",
        frozenset({"model", "role", "outcome"}),
    ),
    SANDBOX_THAWS: Instrument("{thaw}", "Times that a model's frozen sandboxes went on.", frozenset({"model"})),
    MODEL_WAKES: Instrument(
        "{wake}", "Times that a model was woken, by reason: request, operator.", frozenset({"model", "reason"})
    ),
    MODEL_SLEEPS: Instrument(
        "{sleep}",
        "Times that a model was put to sleep, by reason: idle, memory (of another model), operator.",
        frozenset({"model", "reason"}),
    ),
    MODEL_REFUSALS: Instrument(
        "{request}", "Requests refused because their model sleeps (model_asleep).", frozenset({"model"})
    ),
    FLEET_LENT: Instrument("{unit}", "Units of limits lent to other hosts, by kind.", frozenset({"kind"})),
    FLEET_BORROWED: Instrument("{unit}", "Units of limits borrowed from others, by kind.", frozenset({"kind"})),
    FLEET_REFUSED: Instrument("{value}", "Values in the fleet's store that no host has written.", frozenset()),
    **{name: Instrument(*parts) for name, parts in SPLIT_COUNTERS.items()},
    OPERATOR_CALLS: Instrument(
        "{call}",
        "Calls of the operator's API that ended, and requests of operators on other machines to the admin listener, by "
        "method or route and by gRPC status.",
        frozenset({"method", "outcome"}),
    ),
    POLICY_RELOADS: Instrument("{reload}", "Policy reloads by outcome: ok, failed.", frozenset({"outcome"})),
    QUEUED_REQUESTS: Instrument(
        "{request}",
        "Requests that waited for a limit of their tenant, by limit and by outcome: admitted, refused (after all), "
        "cancelled (the client left).",
        frozenset({"rule", "outcome"}),
    ),
    DOWNGRADED_REQUESTS: Instrument(
        "{request}", "Requests served with low priority because they exceeded a limit.", frozenset({"rule"})
    ),
    EXTERNAL_OUTPUTS: Instrument(
        "{output}",
        "Outputs that the endpoint of an external model was asked for: ok, failed, busy, late, wrong (no answer to the "
        "request), cancelled; and usage_differs, of those whose tokens the endpoint counted otherwise.",
        frozenset({"model", "outcome"}),
    ),
    INTEGRITY_FAILURES: Instrument(
        "{request}",
        "Requests that an engine ended because a KV block in their tables was not theirs.",
        frozenset({"model"}),
    ),
    RESTORED_TOKENS: Instrument("{token}", "Cached tokens whose KV came back, by tier.", frozenset({"model", "tier"})),
    SPILL_BLOCKS: Instrument(
        "{block}",
        "KV blocks outside of engines by what became of them: kept, restored (hits), absent (misses), evicted, failed "
        "(of disk or keyring), rejected_length and rejected_seal (changed, cut, moved or replayed); and of the store "
        "outside of the machine: stored, store_restored, store_lost (it does not have them), store_away.",
        frozenset({"outcome"}),
    ),
    SANDBOX_LOSSES: Instrument(
        "{loss}",
        "Sandboxes that ended: oom (its memory limit), fault (it broke the protocol or hung), gpu_lost (its GPU was "
        "lost), gpu_memory (it held more than its share of the GPU's memory), ended (anything else).",
        frozenset({"model", "role", "reason"}),
    ),
    GPU_MOVES: Instrument("{engine}", "Engines that got another GPU since their own was lost.", frozenset({"model"})),
    GPU_XIDS: Instrument(
        "{event}",
        "Xid events of a GPU by where their cause mostly lies: program, memory, bus, driver, other.",
        _GPU | {"kind"},
    ),
    EVICTED_CONNECTIONS: Instrument(
        "{connection}",
        "Connections without a credential that were closed to make room for others.",
        frozenset({"front_end", "listener"}),
    ),
    DELAYED_HANDSHAKES: Instrument("{handshake}", "TLS handshakes of strangers that had to wait for their turn."),
    HAND_OVER_CUTS: Instrument(
        "{cut}",
        "Hand-overs of a sandbox that were cut off, because the gateway may open no more descriptors, and repeated.",
        frozenset({"model", "role"}),
    ),
    SANDBOX_HANGS: Instrument(
        "{hang}",
        "Times that a sandbox stopped answering: an idle one its probe, an engine its requests.",
        frozenset({"model", "role"}),
    ),
    REPLAYS: Instrument(
        "{replay}",
        "Requests begun again because the engine ended before any of their output was shown.",
        frozenset({"model"}),
    ),
    ROUTE_CHOICES: Instrument(
        "{request}",
        "Requests for routes by the model that was chosen and the reason: weight, cheapest, unready, busy and asleep "
        "(state of the model before it), none_ready (no model of the route could serve).",
        frozenset({"route", "model", "reason"}),
    ),
    SHADOW_DECISIONS: Instrument(
        "{request}",
        "Requests by what the shadow policy would have done: agrees, refuses (they were served), serves (they were "
        "refused), waits, other_model.",
        frozenset({"verdict"}),
    ),
    BATCH_LINES: Instrument(
        "{line}",
        "Lines of batches by outcome: completed, failed (its result is an error), delayed (a limit, or a model that is "
        "away: it is tried again).",
        frozenset({"tenant", "outcome"}),
    ),
    RESPONSES: Instrument(
        "{response}",
        "Stored responses by what was done: kept, not_kept (there was no room, or the store was away), read, deleted.",
        frozenset({"tenant", "outcome"}),
    ),
    DROPPED_SPANS: Instrument(
        "{span}", "Spans that did not reach the collector: queue_full, export_failed, shutdown.", frozenset({"reason"})
    ),
    SENT_SPANS: Instrument("{span}", "Spans that the collector has taken."),
}

_ACCOUNT = frozenset({"tenant", "model"})
"""Labels of an account of KV: ``tenant`` is a tenant's id or ``group/ID``."""

_SANDBOX = frozenset({"model", "role"})
"""Labels of a sandbox; tenants' own ones are added to the shared one of their model."""

GAUGES = {
    CONNECTIONS: Instrument(
        "{connection}",
        "Open connections by holder: known (a tenant's or a trusted proxy's), stranger (no credential came yet).",
        frozenset({"front_end", "listener", "holder"}),
    ),
    BACKGROUND_STREAMS: Instrument(
        "{stream}", "Responses that go on without their client, running or kept for a while after their end."
    ),
    BACKGROUND_BYTES: Instrument("By", "Bytes of events that are kept of these responses."),
    WAITING_HANDSHAKES: Instrument("{handshake}", "TLS handshakes that wait for their turn."),
    WAITING_STRANGERS: Instrument(
        "{wait}",
        "What waits of networks that showed no credential: requests that are to begin, gRPC connections to be read.",
        frozenset({"what"}),
    ),
    WAITING_REQUESTS: Instrument("{request}", "Requests that wait for a limit of their tenant."),
    RUNNING: Instrument("{request}", "Requests in the engine's last step.", frozenset({"model"})),
    WAITING: Instrument("{request}", "Requests that wait inside the engine.", frozenset({"model"})),
    ENGINE_DEFECTS: Instrument(
        "{defect}", "Promises (fairness between tenants) that the engine itself found broken.", frozenset({"model"})
    ),
    KV_FREE_BLOCKS: Instrument(
        "{block}", "KV blocks that a request can have: empty, or cached and evictable.", frozenset({"model"})
    ),
    KV_CACHED_BLOCKS: Instrument("{block}", "KV blocks that are cached, which are free too.", frozenset({"model"})),
    KV_BLOCKS: Instrument("{block}", "KV blocks in the pool.", frozenset({"model"})),
    AUDIT_FAILING: Instrument("1", "1 while the audit log cannot be written.", frozenset()),
    AUDIT_UNWITNESSED: Instrument(
        "1", "1 while a configured witness refuses, or has not cosigned in time.", frozenset()
    ),
    FLEET_STORE_AWAY: Instrument("1", "1 while the fleet's store does not answer.", frozenset()),
    FLEET_KEYS_HELD: Instrument("1", "1 while this host has the keys for the KV of its fleet.", frozenset()),
    FLEET_SHREDS: Instrument("{shred}", "Shreds ordered here that are not complete on all hosts yet.", frozenset()),
    CERTIFICATE_END: Instrument("s", "Unix time at which the certificate in use ends.", frozenset()),
    KV_RESIDENT: Instrument("{block}", "KV blocks with the account's content.", _ACCOUNT),
    KV_RESERVED: Instrument("{block}", "KV blocks that the account can always have.", _ACCOUNT),
    KV_BORROWED: Instrument("{block}", "KV blocks that the account has beyond its reservation.", _ACCOUNT),
    KV_LOST: Instrument("{block}", "Cached KV blocks of the account that were evicted for others.", _ACCOUNT),
    KV_PREEMPTED: Instrument("{request}", "Requests of the account that were preempted for others.", _ACCOUNT),
    KV_PUBLIC_BLOCKS: Instrument("{block}", "KV blocks of a public prefix that are resident.", _ACCOUNT),
    KV_PUBLIC_HITS: Instrument("{request}", "Requests that began with a public prefix of this engine.", _ACCOUNT),
    KV_WAITED: Instrument("{wait}", "Times that the account's requests waited for its own cap.", _ACCOUNT),
    DISK_FREE: Instrument("By", "Free bytes of the disk that a folder of the supervisor is on.", frozenset({"place"})),
    DISK_SIZE: Instrument("By", "Size of that disk.", frozenset({"place"})),
    CHECKPOINT_SIZE: Instrument("By", "Checkpoints: base of all models, or model.", frozenset({"role", "kind"})),
    GPU_WATCHED: Instrument("1", "1 while NVML answers; there is none while no model has a GPU."),
    GPU_LOST: Instrument("1", "1 while nothing can compute on the GPU: lost, not listed, or to be reset.", _GPU),
    GPU_OUT: Instrument(
        "1",
        "1 while no engine gets the GPU: it is lost, or has not answered for long enough since, or was lost too often.",
        _GPU,
    ),
    GPU_UNPLACED: Instrument(
        "1", "1 while an engine of the model has no GPU: its own was lost, and no other has room.", frozenset({"model"})
    ),
    GPU_MEMORY_SIZE: Instrument("By", "Memory of the GPU.", _GPU),
    GPU_MEMORY_USED: Instrument("By", "Part of it that is in use, by whatever process.", _GPU),
    GPU_BUSY: Instrument("%", "Part of the time in which something computed on the GPU.", _GPU),
    GPU_POWER: Instrument("W", "Power that the GPU draws.", _GPU),
    GPU_POWER_LIMIT: Instrument("W", "Power that it may draw.", _GPU),
    GPU_TEMPERATURE: Instrument("Cel", "Temperature of the GPU.", _GPU),
    GPU_ECC: Instrument("{error}", "Uncorrected errors of its memory since the driver was loaded.", _GPU),
    GPU_REMAPPED_ROWS: Instrument("{row}", "Rows of its memory that were replaced after uncorrected errors.", _GPU),
    GPU_FAILING: Instrument("1", "1 while its memory has had uncorrected errors, or a bad row is not replaced.", _GPU),
    GPU_THROTTLED: Instrument(
        "1",
        "Whether its clocks are lowered, by reason: power (its limit), heat, hardware (the card's own slow-down).",
        _GPU | {"reason"},
    ),
    GPU_MODEL_MEMORY: Instrument("By", "Memory of the GPU that the model's engines hold.", _GPU | {"model"}),
    GPU_MODEL_SHARE: Instrument("By", "Memory that they may hold together by gpu_share.", _GPU | {"model"}),
    SPILL_BYTES: Instrument("By", "Sealed KV outside of engines.", frozenset({"tier"})),
    KV_STORE_AWAY: Instrument("1", "1 while the store of sealed KV does not serve, by reason.", frozenset({"reason"})),
    SPILL_OBJECTS: Instrument("{object}", "Sealed KV blocks outside of engines.", frozenset({"tier"})),
    MODEL_STATE: Instrument(
        "1", "1 for the state that a model is in: awake, waking, asleep; else 0.", frozenset({"model", "state"})
    ),
    MODEL_WAKE_TIME: Instrument("s", "How long the model's last wake took.", frozenset({"model"})),
    MODEL_WEIGHTS: Instrument(
        "{engine}",
        "Engines by the form of their weights: float32, bf16, fp16, int8, fp8, palette, compressed, none.",
        frozenset({"model", "form"}),
    ),
    MODEL_RANKS: Instrument("{process}", "Processes that compute each engine together.", frozenset({"model"})),
    MODELS: Instrument("{model}", "Models by state; of one that fails, status has the reason.", frozenset({"state"})),
    SANDBOX_READY: Instrument("1", "1 when the sandbox is there and does not hang.", frozenset({"model", "role"})),
    SANDBOX_MEMORY: Instrument("By", "Memory that the sandboxes hold, as their limit counts it.", _SANDBOX),
    SANDBOX_MEMORY_LIMIT: Instrument("By", "Memory beyond which a sandbox is ended.", _SANDBOX),
    SANDBOX_FROZEN: Instrument("1", "Whether the sandbox is frozen because nobody uses it: 1 or 0.", _SANDBOX),
    SANDBOX_AWAY: Instrument("s", "How long the sandbox was away, or booted, before it was last ready.", _SANDBOX),
    STORED_BYTES: Instrument("By", "Files, results of batches and responses that are kept."),
    STORED_RESPONSES: Instrument("{response}", "Responses that are kept."),
    STORED_FILES: Instrument("{file}", "Files that are kept, results of batches among them."),
    OPEN_BATCHES: Instrument("{batch}", "Batches that are not over."),
    OLDEST_BATCH: Instrument("s", "Time since the oldest batch that is not over was made; 0 where there is none."),
    STUCK_BATCHES: Instrument("{batch}", "Batches that are not over, and of which no line ended for 15 minutes."),
    MAX_STORED_BYTES: Instrument("By", "What files, results of batches and responses may take together."),
    WAITING_LINES: Instrument("{line}", "Lines of batches that have no result yet."),
    SUSPECTS: Instrument(
        "{request}", "Requests that were in an engine when it ended, remembered for an hour.", frozenset({"model"})
    ),
    QUARANTINED: Instrument("{request}", "Those of them that are answered with an error.", frozenset({"model"})),
    QUEUED_SPANS: Instrument("{span}", "Spans that wait for the collector."),
    OWN_SANDBOXES: Instrument("{sandbox}", "Sandboxes of single tenants that are there and do not hang.", _SANDBOX),
}

CUMULATIVE = frozenset({KV_LOST, KV_PREEMPTED, KV_PUBLIC_HITS, KV_WAITED})
"""Gauges that are sums since an engine's start, of which dashboards show the rate."""
