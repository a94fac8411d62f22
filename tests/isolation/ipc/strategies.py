"""Hypothesis strategies for every message of the wire, and fixed samples of each."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st

from isolation.ipc import grammar as g
from isolation.ipc import kv as k
from isolation.ipc import messages as m
from isolation.ipc import output as o
from isolation.ipc import ping as pi
from isolation.ipc import public as pu
from isolation.ipc import spill as sp
from isolation.ipc import text as t
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, Drain, RequestFailure, Started, StepOutput, Submit
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.sampling import Sampling
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, ReadVocabulary, Vocabulary

u8 = st.integers(0, 0xFF)
u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFF_FFFF)
u64 = st.integers(0, 0xFFFF_FFFF_FFFF_FFFF)
count = st.integers(1, 0xFFFF_FFFF)
finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(u32, max_size=50).map(lambda values: array("I", values))
utf8 = st.text(max_size=60).map(str.encode)


def think_tokens(size: int) -> st.SearchStrategy[tuple[int, int]]:
    """The tokens around reasoning of a model with this many ids, or none."""
    token = st.integers(0, size - 1)
    return st.just((m.NO_TOKEN, m.NO_TOKEN)) | st.tuples(token, token).filter(lambda pair: m.NO_TOKEN not in pair)


sampling = st.builds(
    Sampling,
    temperature=st.floats(0, 1e30),
    top_k=u32,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0, 1e30, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=u64,
)

biases = st.dictionaries(u32, st.floats(-100, 100, width=32), min_size=1, max_size=40).map(
    lambda given: LogitBias(array("I", sorted(given)), array("f", [given[one] for one in sorted(given)]))
)

submit = st.builds(
    Submit,
    request=st.integers(0, (1 << 64) - m.MAX_CHOICES),
    namespace=st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
    token_ids=st.lists(u32, min_size=1, max_size=50).map(lambda values: array("I", values)),
    max_tokens=st.integers(1, m.MAX_TOKENS_PER_REQUEST),
    sampling=sampling,
    stop_ids=st.lists(u32, max_size=m.MAX_STOP_IDS).map(tuple),
    ignore_eos=st.booleans(),
    retain=st.booleans(),
    logprobs=st.integers(-1, m.MAX_TOP_LOGPROBS),
    weight=st.integers(1, 1000),
    priority=st.sampled_from(m.Priority).map(int),
    deadline_us=st.integers(0, m.MAX_DEADLINE_US),
    structured=st.booleans(),
    choices=st.integers(1, m.MAX_CHOICES),
    prompt_logprobs=st.integers(-1, m.MAX_TOP_LOGPROBS),
    deterministic=st.booleans(),
    group=st.just(b"") | st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
    public=st.just(b"") | st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
    user=st.just(b"") | st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
    logit_bias=st.none() | biases,
    coming=st.booleans(),
)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    """Scores of a few positions with any number of alternatives."""
    positions, width = draw(st.integers(1, 4)), draw(st.integers(0, m.MAX_TOP_LOGPROBS))

    def column(code: str, values: st.SearchStrategy[float], count: int) -> array:
        return array(code, draw(st.lists(values, min_size=count, max_size=count)))

    return PromptLogprobs(
        draw(u64),
        draw(st.integers(1, m.MAX_TOKENS_PER_REQUEST)),
        column("d", finite, positions),
        column("I", u32, positions * width),
        column("d", finite, positions * width),
    )


@st.composite
def step_output(draw: st.DrawFn) -> StepOutput:
    """Steps with and without tokens, starts, failures and log-probabilities."""
    size = draw(st.integers(0, 20))
    exactly = {"min_size": size, "max_size": size}
    with_logprobs = sorted(draw(st.sets(st.integers(0, size - 1)))) if size else []
    entries = []
    for index in with_logprobs:
        width = draw(st.integers(0, m.MAX_TOP_LOGPROBS))
        top = {"min_size": width, "max_size": width}
        entries.append(
            TokenLogprobs(index, draw(finite), tuple(draw(st.lists(u32, **top))), tuple(draw(st.lists(finite, **top))))
        )
    return StepOutput(
        requests=array("Q", draw(st.lists(u64, **exactly))),
        token_ids=array("I", draw(st.lists(u32, **exactly))),
        finishes=bytes(draw(st.lists(st.sampled_from(m.Finish), **exactly))),
        starts=tuple(draw(st.lists(st.builds(Started, u64, u32, u64), max_size=4))),
        logprobs=tuple(entries),
        failures=tuple(draw(st.lists(st.builds(RequestFailure, u64, st.sampled_from(m.FailureCode)), max_size=4))),
        running=draw(u32),
        waiting=draw(u32),
        free_blocks=draw(u32),
        defects=draw(u32),
        prompts=tuple(draw(st.lists(prompt_logprobs(), max_size=3))),
    )


vocabulary = st.builds(
    Vocabulary,
    request=u64,
    start=st.integers(0, 1 << 20),
    entries=st.lists(st.binary(max_size=m.MAX_ENTRY_BYTES), max_size=6).map(tuple),
)


@st.composite
def kv_quotas(draw: st.DrawFn) -> k.KvQuotas:
    """A few namespaces whose reservations are no more than the pool."""
    keys = draw(st.lists(st.binary(min_size=32, max_size=32), max_size=5, unique=True))
    quotas = []
    for key in keys:
        reserved = draw(st.integers(0, k.WHOLE_POOL // 5))
        quotas.append(k.KvQuota(key, reserved, draw(st.integers(max(1, reserved), k.WHOLE_POOL)), draw(st.booleans())))
    return k.KvQuotas(tuple(quotas))


@st.composite
def public_prefixes(draw: st.DrawFn) -> pu.PublicPrefixes:
    """A few prefixes of a few ids."""
    keys = draw(st.lists(st.binary(min_size=32, max_size=32), max_size=4, unique=True))
    ids = st.lists(u32, min_size=1, max_size=9).map(lambda values: array("I", values))
    return pu.PublicPrefixes(tuple(pu.PublicPrefix(key, draw(ids)) for key in keys))


@st.composite
def masks(draw: st.DrawFn) -> g.Masks:
    """Rows of one width, from none to a few words."""
    size = draw(st.integers(0, 8))
    exactly = {"min_size": size, "max_size": size}
    width = 4 * draw(st.integers(0, 5)) * size
    return g.Masks(
        array("Q", draw(st.lists(u64, **exactly))),
        array("I", draw(st.lists(u32, **exactly))),
        bytes(draw(st.lists(st.sampled_from(g.MaskState), **exactly))),
        draw(st.binary(min_size=width, max_size=width)),
    )


@st.composite
def advance(draw: st.DrawFn) -> g.Advance:
    """A few requests with a token each."""
    size = draw(st.integers(0, 8))
    exactly = {"min_size": size, "max_size": size}
    return g.Advance(array("Q", draw(st.lists(u64, **exactly))), array("I", draw(st.lists(u32, **exactly))))


key = st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES)

BY_TYPE: dict[type, st.SearchStrategy[Message]] = {
    m.Hello: st.builds(m.Hello, u16, st.sampled_from(m.Role)),
    m.Configure: st.builds(m.Configure, utf8),
    m.EngineReady: st.builds(
        m.EngineReady, *[count] * 4, st.booleans(), st.booleans(), weights=st.sampled_from(m.WeightForm).map(int)
    ),
    m.TextReady: count.flatmap(
        lambda size: st.tuples(*[st.booleans()] * 5, think_tokens(size)).map(
            lambda row: m.TextReady(size, *row[:5], *row[5])
        )
    ),
    Submit: submit,
    Abort: st.builds(Abort, u64),
    Prefetch: st.builds(
        Prefetch,
        u64,
        st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
        st.lists(u32, min_size=1, max_size=50).map(lambda values: array("I", values)),
    ),
    Embed: st.builds(
        Embed,
        request=u64,
        namespace=st.binary(min_size=m.NAMESPACE_KEY_BYTES, max_size=m.NAMESPACE_KEY_BYTES),
        token_ids=st.lists(u32, min_size=1, max_size=50).map(lambda values: array("I", values)),
        weight=st.integers(1, 1000),
        priority=st.sampled_from(m.Priority).map(int),
        deadline_us=st.integers(0, m.MAX_DEADLINE_US),
    ),
    Embedding: st.builds(
        Embedding,
        u64,
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50).map(
            lambda values: array("f", values)
        ),
    ),
    Drain: st.just(Drain()),
    StepOutput: step_output(),
    Encode: st.builds(Encode, u64, st.sampled_from(t.SourceKind), utf8, st.integers(0, m.MAX_TOKENS_PER_REQUEST)),
    Encoded: st.builds(Encoded, u64, ids, st.sampled_from(o.Thinking)),
    o.ReadOutput: ids.flatmap(
        lambda tokens: st.builds(
            o.ReadOutput,
            u64,
            st.integers(0, len(tokens)),
            st.sampled_from(o.Thinking),
            st.sampled_from(m.Finish),
            st.just(tokens),
            utf8,
            st.booleans(),
        )
    ),
    o.OutputRead: st.builds(
        o.OutputRead,
        u64,
        st.booleans(),
        st.integers(0, m.MAX_TOKENS_PER_REQUEST),
        st.lists(st.builds(o.Part, st.sampled_from(o.PartKind), u32, st.text(max_size=20)), max_size=5).map(tuple),
    ),
    o.CloseOutput: st.builds(o.CloseOutput, u64),
    Decode: st.builds(Decode, u64, ids),
    Decoded: st.builds(Decoded, u64, utf8),
    ReadVocabulary: st.builds(ReadVocabulary, u64, u32),
    Vocabulary: vocabulary,
    g.OpenGrammar: st.builds(
        g.OpenGrammar,
        u64,
        st.binary(min_size=g.GRAMMAR_TENANT_BYTES, max_size=g.GRAMMAR_TENANT_BYTES),
        st.sampled_from(g.GrammarKind),
        utf8,
        st.booleans(),
        st.sampled_from(g.Whitespace),
        st.sampled_from(o.Thinking),
        st.binary(min_size=g.GRAMMAR_TENANT_BYTES, max_size=g.GRAMMAR_TENANT_BYTES),
    ),
    g.Advance: advance(),
    g.CloseGrammar: st.builds(g.CloseGrammar, u64),
    g.Masks: masks(),
    sp.Keep: st.builds(
        sp.Keep,
        key,
        st.binary(min_size=1, max_size=32),
        st.binary(min_size=1, max_size=200),
        st.integers(0, sp.MAX_LEFT_OUT),
    ),
    sp.Withdraw: st.builds(sp.Withdraw, key, st.binary(min_size=1, max_size=32)),
    sp.Fetch: st.builds(
        sp.Fetch,
        u64,
        key,
        st.integers(1, 32).flatmap(
            lambda width: st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=5).map(tuple)
        ),
        st.integers(0, m.MAX_FRAME_BYTES),
        st.booleans(),
        st.booleans(),
    ),
    sp.Fetched: st.builds(sp.Fetched, u64, u32, st.binary(max_size=200)),
    sp.Forget: st.builds(sp.Forget, key),
    sp.Lost: st.builds(sp.Lost, key),
    sp.Unwanted: st.builds(sp.Unwanted, u32),
    sp.Share: st.builds(sp.Share, key, st.booleans(), u32),
    k.KvQuotas: kv_quotas(),
    pu.PublicPrefixes: public_prefixes(),
    pi.Ping: st.builds(pi.Ping, number=u64),
    pi.Pong: st.builds(pi.Pong, number=u64),
    pu.PublicUsage: st.builds(
        pu.PublicUsage,
        st.lists(
            st.builds(pu.PublicUse, st.binary(min_size=32, max_size=32), st.sampled_from(pu.PublicState), u32, u64),
            max_size=5,
        ).map(tuple),
    ),
    k.KvUsage: st.builds(
        k.KvUsage,
        st.lists(
            st.builds(k.KvUse, st.binary(min_size=32, max_size=32), u32, u32, u32, u32, u64, u64, u64), max_size=5
        ).map(tuple),
    ),
    m.Failed: st.builds(m.Failed, u64, st.sampled_from(m.FailureCode), st.text(max_size=m.MAX_REASON_BYTES // 4)),
}
"""A strategy for each message."""

SAMPLES: tuple[Message, ...] = (
    m.Hello(m.PROTOCOL_VERSION, m.Role.ENGINE),
    m.Configure(b'{"model_dir": "/model"}'),
    m.EngineReady(128_256, 8192, 16, 4096, True, True, weights=m.WeightForm.FP8),
    m.TextReady(128_256, True, False, True, True, False),
    m.TextReady(151_936, True, True, False, True, True, 151_667, 151_668),
    Submit(
        request=7,
        namespace=bytes(range(32)),
        token_ids=array("I", [1, 2, 0xFFFF_FFFF]),
        max_tokens=16,
        sampling=Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=1 << 63),
        stop_ids=(2, 3),
        ignore_eos=True,
        logprobs=5,
        weight=10,
        priority=m.Priority.LOW,
        deadline_us=30_000_000,
        structured=True,
        deterministic=True,
        choices=3,
        prompt_logprobs=2,
        group=bytes(range(32, 64)),
        public=bytes(range(64, 96)),
        user=bytes(range(96, 128)),
        coming=True,
    ),
    Abort(7),
    k.KvQuotas((k.KvQuota(bytes(32), 2_000, 5_000), k.KvQuota(bytes(range(32)), 8_000, 8_000, False))),
    k.KvQuotas(),
    pu.PublicPrefixes((pu.PublicPrefix(bytes(32), array("I", [1, 2])), pu.PublicPrefix(b"k" * 32, array("I", [3])))),
    pu.PublicPrefixes(),
    pu.PublicUsage((pu.PublicUse(bytes(range(32)), pu.PublicState.RESIDENT, 12, 1 << 40),)),
    k.KvUsage((k.KvUse(bytes(range(32)), 90, 60, 100, 200, 7, 1, 3),)),
    pi.Ping(1),
    pi.Pong((1 << 64) - 1),
    Embed(7, bytes(range(32)), array("I", [1, 2, 0xFFFF_FFFF]), 10, m.Priority.LOW, 30_000_000),
    Prefetch(7, bytes(range(32)), array("I", [1, 2, 0xFFFF_FFFF])),
    Embedding(7, array("f", [0.5, -0.25])),
    Drain(),
    StepOutput(
        requests=array("Q", [7, 8, 7]),
        token_ids=array("I", [10, 11, 12]),
        finishes=bytes([m.Finish.NONE, m.Finish.STOP, m.Finish.LENGTH]),
        starts=(Started(8, 32, 1500, 0, 16, 16, store_gap=True),),
        logprobs=(TokenLogprobs(0, -0.5, (10, 4), (-0.5, -1.25)), TokenLogprobs(2, -0.25, (), ())),
        failures=(RequestFailure(9, m.FailureCode.TOO_LONG),),
        running=2,
        waiting=1,
        free_blocks=100,
        prompts=(
            PromptLogprobs(7, 1, array("d", [-1.5, -0.5]), array("I", [3, 4]), array("d", [-0.25, -0.125])),
            PromptLogprobs(8, 65, array("d", [-2.0])),
        ),
    ),
    StepOutput(),
    Encode(1, t.SourceKind.CHAT, b'{"messages": []}', 100),
    Encoded(1, array("I", [5, 6, 7]), o.Thinking.BEGUN),
    o.ReadOutput(6, 1, o.Thinking.POSSIBLE, m.Finish.LENGTH, array("I", [5, 6]), b'{"tools": []}', True),
    o.OutputRead(6, True, 3, (o.Part(o.PartKind.CALL, 0, "f"), o.Part(o.PartKind.ARGUMENTS, 1, "{}"))),
    o.CloseOutput(6),
    Decode(2, array("I", [5])),
    Decoded(2, "h\u00e9".encode()),
    ReadVocabulary(3, 8192),
    Vocabulary(3, 8192, (b"", b"\xff\xfe", b"the")),
    m.Failed(4, m.FailureCode.INVALID, "unknown role"),
    g.OpenGrammar(5, bytes(range(16)), g.GrammarKind.REGEX, b"[a-z]+", False, g.Whitespace.FLEXIBLE, user=b"u" * 16),
    g.Advance(array("Q", [5, 6]), array("I", [17, 0xFFFF_FFFF])),
    g.CloseGrammar(5),
    g.Masks(array("Q", [5, 6]), array("I", [0, 9]), bytes([0, 1]), bytes(range(16))),
    g.Masks(),
    sp.Keep(bytes(range(32)), b"0123456789abcdef", b"keys and values", 7),
    sp.Withdraw(bytes(range(32)), b"0123456789abcdef"),
    sp.Fetch(9, bytes(range(32)), (b"0123456789abcdef", b"fedcba9876543210"), 15, True, True),
    sp.Fetched(9, 1, b"keys and values", sp.KvTier.STORE),
    sp.Forget(bytes(range(32))),
    sp.Lost(bytes(range(32))),
    sp.Unwanted(3),
    sp.Share(bytes(range(32)), computed=True, lasts_s=590),
)
"""At least one of each message, with no field at its default where that says nothing."""
