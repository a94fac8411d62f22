"""One line of a batch as a request of its tenant: parsed as its route parses, run as every request, answered with a
line of the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from appliance.common.audit.entry import Entry, to_wire
from appliance.common.batches.values import CANCELLED_CODE, EXPIRED_CODE, MAX_RESULT_BYTES, StoredBatch, line_request
from appliance.common.errors import (
    ApplianceError,
    DeadlineExceededError,
    InvalidRequestError,
    PolicyChangedError,
    RateLimitedError,
    SpendLimitError,
    UnavailableError,
)
from appliance.common.tracebacks import forget_frames
from appliance.gateway.batches.checking import BatchRequest, LineError, read_line
from appliance.gateway.batches.several_prompts import (
    DEFECTS,
    LONGEST_S,
    DelayedError,
    LineCall,
    LineProgress,
    PromptPlaces,
    PromptRuns,
)
from appliance.gateway.front.defect import defect
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import BatchLine, CallContext, Operation, Principal
from appliance.gateway.http import openai, openai_embeddings, openai_objects, responses_objects, scoring
from appliance.gateway.http.collecting import collect, started
from appliance.gateway.http.dialect import Parsed
from appliance.gateway.http.openai_embeddings import ParsedEmbed
from appliance.gateway.http.openai_objects import pieces_of
from appliance.gateway.http.parsing import Parser
from appliance.gateway.http.responses_request import parse_response
from appliance.gateway.http.scoring import ParsedScore
from appliance.gateway.service import Service
from isolation.ipc.messages import Priority

LATER_S = 30.0
"""Seconds after which a line is tried again that met one of ``PASSING``."""

PASSING = (".hours", ".features.wake")
"""Ends of rules that deny for a time, without a word of its end: out of the tenant's hours, and while the model sleeps
for a tenant that may not wake it."""

LEAST_WAIT_S, MOST_WAIT_S = 0.1, 60.0
"""Bounds of the wait before a line is tried again: a limit that is raised is noticed within a minute."""

_PARSERS: dict[str, Callable[[bytes, Stamp], Parsed | ParsedEmbed | ParsedScore]] = {
    "/v1/chat/completions": partial(openai.parse, Operation.CHAT),
    "/v1/completions": partial(openai.parse, Operation.TEXT_COMPLETION),
    "/v1/responses": parse_response,
    "/v1/embeddings": openai_embeddings.parse,
    "/v1/rerank": scoring.parse_rerank,
    "/v1/score": scoring.parse_score,
    "/v1/classify": scoring.parse_classify,
}


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What became of a line."""

    ok: bool
    data: bytes
    """The line of the results."""
    entries: list[str] = field(default_factory=list)
    """Entries of the audit log that charge it: one, or one for each prompt."""


@dataclass(frozen=True, slots=True)
class LineDelay:
    """A line that is to be tried again after so many seconds."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class LineState:
    """What the runner gives to a line."""

    note_model: Callable[[str], None]
    """Takes the model that the line asks for."""
    places: PromptPlaces
    progress: LineProgress
    """What an earlier attempt left: answers to some of its prompts."""


class LineCalls:
    """Runs lines."""

    def __init__(self, service: Service, caller_withdrawn: Callable[[Principal], ApplianceError | None]) -> None:
        """``caller_withdrawn`` gives the error of requests of a caller whose credential or tenant is gone."""
        self._service = service
        self._caller_withdrawn = caller_withdrawn
        self._parser = Parser()

    async def run(self, batch: StoredBatch, number: int, text: bytes, state: LineState) -> LineAnswer | LineDelay:
        """Run a line to its end, or until there is no room for more of its prompts."""
        request_id = line_request(batch.id, number)
        charged: list[Entry] = []
        try:
            read = await self._parser.parse(batch.tenant, partial(_read_line, batch.endpoint), text, Stamp(request_id))
        except InvalidRequestError as error:  # not a line that passed the check of its file
            forget_frames(error)
            return _failed(batch, request_id, "", error)
        custom_id, most = read.custom_id, MAX_RESULT_BYTES - len(text) - 1_024
        if batch.expires <= time.time():
            return expired(batch, number, text, state.progress.entries)
        try:
            body = await self._answer(batch, request_id, read.body, most, state, charged)
            if len(body) > most:
                raise InvalidRequestError("the answer is longer than a result may be")
        except DelayedError as error:
            forget_frames(error)
            return LineDelay(0.0)
        except ApplianceError as error:
            forget_frames(error)
            # Of several prompts some were answered by an earlier attempt, which this one may not have come to.
            given = charged or state.progress.entries
            if isinstance(error, DeadlineExceededError) and batch.expires <= time.time():
                return expired(batch, number, text, given)
            wait_s = wait_of(error)
            if wait_s is not None:
                return LineDelay(min(MOST_WAIT_S, max(LEAST_WAIT_S, wait_s)))
            return _failed(batch, request_id, custom_id, error, given)
        except DEFECTS as error:
            return _failed(batch, request_id, custom_id, defect(error, request_id), charged or state.progress.entries)
        head = {"id": request_id, "custom_id": custom_id}
        start = json.dumps(head, separators=(",", ":"))[:-1]
        response = f',"response":{{"status_code":200,"request_id":{json.dumps(request_id)},"body":'
        data = start.encode() + response.encode() + body + b'},"error":null}\n'
        return LineAnswer(True, data, [to_wire(one) for one in charged])

    async def _answer(
        self, batch: StoredBatch, request_id: str, body: bytes, most: int, state: LineState, charged: list[Entry]
    ) -> bytes:
        """Return the body of the answer, of at most so many bytes where it is one of several prompts; entries that
        charge it are added to ``charged``.

        Raises:
            DelayedError: there is no room for some of its prompts.
            ApplianceError: typed, from the closed list.
        """
        principal = Principal(batch.tenant, batch.credential)
        if (withdrawn := self._caller_withdrawn(principal)) is not None:
            raise withdrawn
        stamp = Stamp(request_id, time.monotonic() + min(batch.expires - time.time(), LONGEST_S))
        parsed = await self._parser.parse(batch.tenant, _PARSERS[batch.endpoint], body, stamp)
        state.note_model(parsed.request.model)
        context = CallContext(
            route=f"POST {batch.endpoint}",
            front_end="batch",
            attributes={"athanor.batch.id": batch.id},
            line=BatchLine(batch.id, charged.append),
        )
        if isinstance(parsed, ParsedEmbed):
            embed = self._service.routed(principal, replace(parsed.request, priority=Priority.LOW))
            found = await self._service.embed(principal, embed, context)
            return b"".join(openai_embeddings.answer(found, embed.model, base64=parsed.base64))
        if isinstance(parsed, ParsedScore):
            asked = self._service.routed(principal, replace(parsed.request, priority=Priority.LOW))
            return b"".join(parsed.write(await self._service.score(principal, asked, context), asked))
        request = self._service.routed(principal, replace(parsed.request, priority=Priority.LOW, stream=False))
        if parsed.others:
            others = [
                replace(one, priority=Priority.LOW, model=request.model, alias=request.alias, adapter=request.adapter)
                for one in parsed.others
            ]
            call = LineCall(principal, context, batch.expires, wait_of, charged.append)
            return await PromptRuns(self._service, call, state.places, state.progress, most).run([request, *others])
        writer = parsed.make_writer(request, int(time.time()))
        async with aclosing(self._service.generate(principal, request, context)) as events:
            del parsed, request  # with the prompt
            await started(events)
            heard, finished = await collect(events)
        return b"".join(pieces_of(writer.collected(heard, finished)))


def expired(batch: StoredBatch, number: int, text: bytes, charged: Sequence[Entry] = ()) -> LineAnswer:
    """Return the result of a line that did not end before its batch's window; ``charged`` are the entries of what it
    was given."""
    message = "the line did not end before the end of the batch's completion window"
    return _ended(batch, number, text, {"code": EXPIRED_CODE, "message": message}, charged)


def cancelled(batch: StoredBatch, number: int, text: bytes, charged: Sequence[Entry]) -> LineAnswer:
    """Return the result of a line of several prompts of which some were answered when its batch was cancelled."""
    message = "the batch was cancelled when some of the line's prompts were answered, which are charged"
    return _ended(batch, number, text, {"code": CANCELLED_CODE, "message": message}, charged)


def _ended(batch: StoredBatch, number: int, text: bytes, error: dict[str, str], charged: Sequence[Entry]) -> LineAnswer:
    """Return the result of a line that ended with its batch."""
    try:
        custom_id = read_line(text, batch.endpoint).custom_id
    except LineError:
        custom_id = ""
    document = {"id": line_request(batch.id, number), "custom_id": custom_id, "response": None, "error": error}
    data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    return LineAnswer(False, data, [to_wire(one) for one in charged])


def _read_line(endpoint: str, text: bytes, _stamp: Stamp) -> BatchRequest:
    try:
        return read_line(text, endpoint)
    except LineError as error:
        raise InvalidRequestError(error.message, param=error.param) from None


def _failed(
    batch: StoredBatch, request_id: str, custom_id: str, error: ApplianceError, charged: list[Entry] | None = None
) -> LineAnswer:
    """Return the result of a line that an error ended."""
    form = responses_objects.ERRORS if batch.endpoint == "/v1/responses" else openai_objects.ERRORS
    response = {"status_code": error.wire.http, "request_id": request_id, "body": form.document(error, request_id)}
    document = {"id": request_id, "custom_id": custom_id, "response": response, "error": None}
    data = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    return LineAnswer(False, data, [to_wire(one) for one in charged or []])


def wait_of(error: ApplianceError) -> float | None:
    """Return the seconds after which a line that met an error is tried again; None where that would not help."""
    if error.rule.endswith(PASSING):
        return LATER_S
    if isinstance(error, UnavailableError | PolicyChangedError):
        return error.retry_after_s or 1.0
    if isinstance(error, RateLimitedError | SpendLimitError):
        return error.retry_after_s
    return None
