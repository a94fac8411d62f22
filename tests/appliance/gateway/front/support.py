"""A scripted service and both front ends before it, over real sockets; helpers that more than one test file uses."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from appliance.common.errors import ModelNotFoundError
from appliance.common.ids import new_request_id
from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.common.listen_config import TlsConfig
from appliance.gateway.front.auth import Resolver
from appliance.gateway.front.client_address import TrustedProxies
from appliance.gateway.generate_request import (
    AttestRequest,
    CallContext,
    ChatPrompt,
    Delta,
    Embeddings,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Principal,
    RateState,
    ScoreOperation,
    ScoreRequest,
    Scores,
    Sink,
    Started,
    TextPrompt,
    Tokenized,
    TokenizerRequest,
    TokenLogprob,
)
from appliance.gateway.grpc.servicer import STALL_S
from appliance.gateway.http.settings import HttpSettings
from appliance.gateway.model_card import ModelCard
from appliance.gateway.servers import FrontEnds, FrontEndSettings, serve_front_ends
from appliance.gateway.tenant_account import (
    LimitState,
    LimitUnit,
    ModelUse,
    PeriodUse,
    TenantLimits,
    TenantUsed,
    UserUse,
)

PEPPER = bytes(range(32))
SPIFFE_ID = "spiffe://athanor.test/tenant/acme"
MODEL = "athanor-mini"

Step = Event | Exception | float | asyncio.Event
"""What the scripted session does next: yield, raise, sleep, or wait."""


def text_script(*texts: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    """A session that gives these texts, one token each."""
    deltas = [Delta(text, (index,)) for index, text in enumerate(texts)]
    return [Started(7, 3), *deltas, Finished(reason, 7, 3, len(texts))]


def logprob_script() -> list[Step]:
    """A session of three tokens, the last two of which are halves of one character."""
    first = TokenLogprob(1, b"a", -0.5, ((1, b"a", -0.5), (2, b"b", -1.5)))
    second = TokenLogprob(3, b"\xc3", -0.25, ((3, b"\xc3", -0.25), (4, b"c", float("-inf"))))
    third = TokenLogprob(5, b"\xa9", -0.125, ((5, b"\xa9", -0.125), (6, b"d", -2.0)))
    return [
        Started(2, 0),
        Delta("a", (1,), (first,)),
        Delta("", (3,), (second,)),
        Delta("\u00e9", (5,), (third,)),
        Finished(FinishReason.LENGTH, 2, 0, 3),
    ]


class ScriptedService:
    """The gateway's ``Service`` with its behaviour written out beforehand; remembers what it was asked."""

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}
        """Model to which each alias leads."""
        self.script: Sequence[Step] = text_script("Hel", "lo")
        self.tenants = {"key:acme-1": "acme", "key:globex-1": "globex", SPIFFE_ID: "acme"}
        self.padded: set[str] = set()
        """Tenants whose answers are padded."""
        self.requests: list[GenerateRequest] = []
        self.embeds: list[EmbedRequest] = []
        self.scored: list[ScoreRequest] = []
        self.tokenizer_requests: list[TokenizerRequest] = []
        self.contexts: list[CallContext] = []
        self.principals: list[Principal] = []
        self.refusals: list[tuple[CallContext, Exception, str | None]] = []
        self.yielded = 0
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()

    def routed(self, principal: Principal, request):
        """By ``routes``."""
        model = self.routes.get(request.model)
        return request if model is None else replace(request, model=model, alias=request.model)

    async def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event]:
        """Play the script; deltas go to the sink where there is one, as fast as it takes them."""
        self.principals.append(principal)
        self.requests.append(request)
        self.asked.set()
        self.contexts.append(context)
        try:
            if request.model != MODEL:
                raise ModelNotFoundError("no such model", param="model", details={"model": request.model})
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                elif sink is not None and isinstance(step, Delta):
                    await self._writable(sink)
                    self.yielded += 1
                    sink.delta(step)
                else:
                    self.yielded += 1
                    yield step
        finally:
            self.closed.set()

    async def embed(self, principal: Principal, request: EmbedRequest, context: CallContext) -> Embeddings:
        """A vector of three numbers for each text: its place, its length, a third. The script may raise or wait."""
        self.principals.append(principal)
        self.embeds.append(request)
        self.contexts.append(context)
        self.asked.set()
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
        finally:
            self.closed.set()
        lengths = [len(one.text if isinstance(one, TextPrompt) else one.token_ids) for one in request.inputs]
        vectors = tuple(array("f", [place, length, 1 / 3]) for place, length in enumerate(lengths))
        return Embeddings(vectors, sum(lengths))

    async def score(self, principal: Principal, request: ScoreRequest, context: CallContext) -> Scores:
        """A hundredth of each document's length; of what is classified, that and the rest. The script may raise or
        wait."""
        self.principals.append(principal)
        self.scored.append(request)
        self.contexts.append(context)
        self.asked.set()
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
        finally:
            self.closed.set()
        lengths = [len(one.text) for one in request.documents]
        used = sum(lengths) + sum(len(one.text) for one in request.queries)
        if request.operation is ScoreOperation.CLASSIFY:
            return Scores(tuple((one / 100, 1 - one / 100) for one in lengths), used, ("short", "long"))
        return Scores(tuple((one / 100,) for one in lengths), used)

    async def tokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> Tokenized:
        """An id for each character of the source: its code point."""
        await self._asked(principal, request, context)
        prompt = request.prompt
        text = prompt.source.decode() if isinstance(prompt, ChatPrompt) else prompt.text
        return Tokenized(array("I", map(ord, text)), 4096)

    async def detokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> str:
        """A character for each id."""
        await self._asked(principal, request, context)
        return "".join(map(chr, request.prompt.token_ids))

    async def attest(self, principal: Principal, request: AttestRequest, context: CallContext) -> str:
        """A text with the nonce in it."""
        await self._asked(principal, request, context)
        return f"signed {request.nonce}\n"

    async def _asked(
        self, principal: Principal, request: TokenizerRequest | AttestRequest, context: CallContext
    ) -> None:
        self.principals.append(principal)
        self.tokenizer_requests.append(request)
        self.contexts.append(context)
        await self._raised()

    async def _raised(self) -> None:
        for step in self.script:
            if isinstance(step, Exception):
                raise step

    @staticmethod
    async def _writable(sink: Sink) -> None:
        """Wait as a session does: until the sink says so."""
        if not sink.ready:
            room = asyncio.Event()
            sink.on_ready(room.set)
            await room.wait()
            sink.on_ready(None)

    def models(self, principal: Principal) -> tuple[ModelCard, ...]:
        """One model with the digest of its files, and one more with a slash in its name."""
        return (ModelCard(MODEL, 1_700_000_000, 4096, digest="ab" * 32), ModelCard("org/other", 1_700_000_001, 8192))

    def limits(self, principal: Principal) -> TenantLimits:
        """One rate, of which something is left, and a limit of spend."""
        rate = LimitState("requests_per_minute", LimitUnit.REQUESTS, 60, 60, 59, 1.0, "refuse")
        spend = LimitState("spend_per_day", LimitUnit.BILLIONTHS, 10**10, 10**10, 9_500_000_001, 3_600.0, "refuse")
        return TenantLimits(principal.tenant, (rate, spend), 1, 0, 4_096, 1_024, "EUR")

    async def usage(self, principal: Principal, end_user: str = "") -> TenantUsed:
        """Two models in the month, one of them today; two end users and all others today, or one that is asked about by
        the digest of its name."""
        await self._raised()
        first, second = ModelUse(MODEL, 3, 30, 10, 20, 1_500_000_000, 15), ModelUse("", 1, 2, 0, 1, 1)
        users = (UserUse("aa11", 2, 20, 10, 10, 1_000_000_000, 5), UserUse("", 1, 2, 0, 1, 1))
        if end_user:
            users = (UserUse(end_user, 1, 2, 0, 1, 1),)
        day = PeriodUse(1_700_006_400, 1_700_092_800, (first,), users)
        return TenantUsed(principal.tenant, day, PeriodUse(1_698_796_800, 1_701_388_800, (first, second)), "EUR")

    def rates(self, principal: Principal) -> RateState:
        """Fixed figures; tokens are unlimited."""
        return RateState(60, 59, 1.0, 0, 0, 0.0)

    def pads(self, principal: Principal) -> bool:
        """By ``padded``."""
        return principal.tenant in self.padded

    def authenticate(self, credential: str, address: str) -> Principal | None:
        """By ``tenants``."""
        tenant = self.tenants.get(credential)
        return None if tenant is None else Principal(tenant, credential)

    def record_refusal(self, context: CallContext, error: Exception, caller: Principal | None) -> str:
        """Remember it."""
        self.refusals.append((context, error, caller.tenant if caller is not None else None))
        return new_request_id()


@dataclass
class Running:
    """A served pair of front ends and what a client needs to reach them."""

    service: ScriptedService
    front_ends: FrontEnds
    key: str
    other_key: str
    tables: list[KeyTable]
    """The keys in force."""
    ready: list[bool] = field(default_factory=lambda: [True])

    @property
    def keys(self) -> KeyTable:
        """The keys in force."""
        return self.tables[0]

    def use_keys(self, keys: KeyTable) -> None:
        """Put these keys in force."""
        self.tables[0] = keys

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT``."""
        return f"http://127.0.0.1:{self.front_ends.http_port}"

    @property
    def target(self) -> str:
        """gRPC's ``host:port``."""
        return f"127.0.0.1:{self.front_ends.grpc_port}"

    @property
    def authorization(self) -> dict[str, str]:
        """The right header."""
        return {"authorization": f"Bearer {self.key}"}


@contextlib.asynccontextmanager
async def serving(tls: TlsConfig | None = None, **http: object) -> AsyncIterator[Running]:
    """Serve on free ports with these settings: HTTP's, ``grpc_stall_s``, ``proxies``, ``own`` and ``leaving``."""
    others = {"grpc_stall_s": http.pop("grpc_stall_s", STALL_S), "proxies": http.pop("proxies", TrustedProxies())}
    others["own"] = http.pop("own", ())
    others["leaving"] = http.pop("leaving", lambda: False)
    service = ScriptedService()
    key, digest = issue("acme-1", PEPPER)
    other, other_digest = issue("globex-1", PEPPER)
    created = datetime(2026, 1, 1, tzinfo=UTC)
    tables = [KeyTable(PEPPER, {"acme-1": KeyRecord(digest, created), "globex-1": KeyRecord(other_digest, created)})]
    settings = FrontEndSettings(http_port=0, grpc_port=0, tls=tls, http=replace(HttpSettings(), **http), **others)
    ready = [True]
    async with serve_front_ends(service, Resolver(service, lambda: tables[0]), settings, lambda: ready[0]) as ends:
        yield Running(service, ends, key, other, tables, ready)


async def talk(port: int, *pieces: bytes, timeout_s: float = 5.0) -> bytes:
    """Send these bytes to a local port and give all that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def post(path: str, body: bytes, authorization: dict[str, str], *extra: str) -> bytes:
    """The bytes of one POST that asks for the connection's end."""
    lines = [f"POST {path} HTTP/1.1", "host: a", "connection: close", f"content-length: {len(body)}", *extra]
    lines += [f"{name}: {value}" for name, value in authorization.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
