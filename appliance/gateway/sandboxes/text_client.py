"""Client of a text sandbox: exact token ids before admission, text of ids where the vocabulary table is not exact.

A text sandbox may die under a job. The job that it was working on is tried once more; when that ends the next sandbox
too, the job is refused. Jobs that merely waited are sent again as often as their deadline allows.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Callable

from appliance.common.errors import (
    ApplianceError,
    ContextLengthError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QuarantinedError,
    UnavailableError,
)
from appliance.gateway.generate_request import ChatPrompt, Grammar, Prompt, TokenPrompt
from appliance.gateway.sandboxes.awake_time import AwakeTime
from appliance.gateway.sandboxes.grammars import GrammarLostError, GrammarRun, printable_reason
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import Answer, Job, TextFullError, TextLink, TextLostError
from isolation.ipc.grammar import GRAMMAR_TENANT_BYTES, NO_GRAMMAR_USER
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Failed, FailureCode, TextReady
from isolation.ipc.output import Thinking
from isolation.ipc.text import Decode, Decoded, Encode, Encoded, SourceKind

OPEN_WAIT_S = 8.0
"""Seconds that a grammar may wait for others to be compiled, and for itself."""

MAX_OPENINGS = 3
"""Text sandboxes tried for one grammar."""

PROSE_BYTES = 4
"""Bytes for each token that a prompt counts as which was refused before its tokens were counted; prose has about as
many."""


class TextClient:
    """Asks the text sandbox for one request."""

    def __init__(
        self, model: ModelSandboxes, next_id: Callable[[], int], tenant: str, most_tokens: int = MAX_TOKENS_PER_REQUEST
    ) -> None:
        """``most_tokens``: how far the tokens of a prompt are counted."""
        self._model = model
        self._next_id = next_id
        self._tenant = tenant
        self._most_tokens = most_tokens
        self.thinking = Thinking.NONE
        """Where the last conversation leaves the model's reasoning."""
        self.text_tokens = 0
        """Tokens that the sandbox made of the prompts, or gave them up at: what they cost it."""

    async def encode(self, prompt: Prompt, until: float) -> array[int]:
        """Return the prompt's token ids, at least one.

        Raises:
            ApplianceError: the text was refused, too long, or could not be worked on in time.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if isinstance(prompt, ChatPrompt):
            kind, source = SourceKind.CHAT, prompt.source
        else:
            kind, source = SourceKind.TEXT if prompt.framed else SourceKind.BARE, prompt.text.encode()
        try:
            answer = await self.ask(lambda _: Encode(self._next_id(), kind, source, self.most_counted), until)
        except QuarantinedError:
            self.text_tokens += self.most_counted
            raise
        if isinstance(answer, Failed):
            self.text_tokens += _spent(answer, len(source), self.most_counted)
            if answer.code is FailureCode.UNKNOWN_ARGUMENT and isinstance(prompt, ChatPrompt):
                raise InvalidRequestError(printable_reason(answer), param=prompt.arguments_param)
            raise _refusal(answer, prompt.param)
        assert isinstance(answer, Encoded)
        self.text_tokens += len(answer.token_ids)
        self.thinking = answer.thinking
        if not answer.token_ids:
            raise InvalidRequestError("the prompt has no tokens", param=prompt.param)
        return answer.token_ids

    async def capabilities(self, until: float) -> TextReady:
        """Return what the model's text sandbox can do.

        Raises:
            ApplianceError: none was there in time.
        """
        return (await self._model.wait_text(until)).ready

    async def follow(
        self, grammar: Grammar, namespace: bytes, until: float, *, keep: bool = True, user: bytes = b""
    ) -> GrammarRun:
        """Have the grammar compiled, or found compiled for this namespace, ready to be followed by one request.
        ``keep``: whether later requests may find it; ``user``: key of the end user's own namespace, whose requests
        alone may find it then, on the tenant's account.

        Raises:
            ApplianceError: it cannot be used, or could not be compiled in time.
        """
        tenant, of_user = _grammar_name(namespace), _grammar_name(user) if user else NO_GRAMMAR_USER
        waited = AwakeTime(OPEN_WAIT_S)
        for _ in range(MAX_OPENINGS):
            link = await self._model.wait_text(until)
            try:
                opening = link.grammars.open(self._next_id(), tenant, grammar, keep=keep, user=of_user)
                return await waited.wait(opening, until)
            except TimeoutError:
                raise UnavailableError("too many grammars wait to be compiled", retry_after_s=RETRY_AFTER_S) from None
            except GrammarLostError:
                self._model.forget_text(link)
        raise UnavailableError("the text sandbox ended again and again", retry_after_s=RETRY_AFTER_S)

    async def text_of(self, prompt: TokenPrompt, until: float) -> str:
        """Return the text of a caller's token ids.

        Raises:
            ApplianceError: an id is no token of the model, the text is too long for one answer, or the sandbox could
                not make it in time.
        """
        vocabulary = (await self._model.wait_text(until)).ready.vocab_size
        if max(prompt.token_ids) >= vocabulary:
            raise InvalidRequestError(f"a token id is beyond the vocabulary of {vocabulary}", param=prompt.param)
        self.text_tokens += len(prompt.token_ids)
        answer = await self.ask(lambda _: Decode(self._next_id(), prompt.token_ids), until)
        if isinstance(answer, Failed):
            if answer.code is FailureCode.TOO_LONG:
                raise InvalidRequestError(
                    "the text of these tokens is too long for one answer; send them in several requests",
                    param=prompt.param,
                )
            raise _refusal(answer, prompt.param)
        assert isinstance(answer, Decoded)
        return answer.text.decode("utf-8", "replace")

    async def decode(self, token_ids: array[int]) -> str:
        """Return the text of these ids.

        Raises:
            ApplianceError: the text sandbox could not decode them.
        """
        if not token_ids:
            return ""
        answer = await self.ask(lambda _: Decode(self._next_id(), token_ids), time.monotonic() + 60.0)
        if isinstance(answer, Failed):
            raise InternalError("the tokenizer met a defect with this answer")
        assert isinstance(answer, Decoded)
        return answer.text.decode("utf-8", "replace")

    @property
    def most_counted(self) -> int:
        """Return the tokens beyond which nobody counts a prompt's now: the model's context, once it is known, or
        less."""
        capacity = self._model.capacity
        return min(self._most_tokens, capacity.max_context if capacity is not None else MAX_TOKENS_PER_REQUEST)

    async def ask(self, make_job: Callable[[TextLink], Job], until: float) -> Answer:
        """Return a sandbox's answer to a job, made for the sandbox that it is sent to.

        Raises:
            ApplianceError: it was not answered in time.
        """
        blamed = 0
        while True:
            link = await self._model.wait_text(until)
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    return await link.ask(make_job(link), self._tenant)
            except TimeoutError:
                raise DeadlineExceededError("the request's deadline passed in tokenising") from None
            except TextFullError:
                raise UnavailableError("too many prompts wait", retry_after_s=RETRY_AFTER_S) from None
            except TextLostError as error:
                blamed += error.culprit
                if blamed >= 2:
                    raise QuarantinedError("this prompt ended its tokenizer twice") from error
                # The link is closed but model may not have been told in this turn of the loop.
                self._model.forget_text(link)


def _grammar_name(namespace: bytes) -> bytes:
    """Return what stands for a namespace where compiled grammars are kept."""
    return hashlib.blake2b(b"grammars", key=namespace, digest_size=GRAMMAR_TENANT_BYTES).digest()


def _spent(answer: Failed, source_bytes: int, most: int) -> int:
    """Return the tokens that a refused prompt counts as. One that is too long has more than ``most``; of one that
    cannot be used, nobody knows, and the work on it grows with its bytes. The sandbox's own failures count nothing."""
    if answer.code is FailureCode.TOO_LONG:
        return most
    refused = answer.code in (FailureCode.INVALID, FailureCode.UNKNOWN_ARGUMENT)
    return min(most, source_bytes // PROSE_BYTES) if refused else 0


def _refusal(answer: Failed, param: str) -> ApplianceError:
    """Return the caller's error."""
    reason = printable_reason(answer)
    if answer.code is FailureCode.TOO_LONG:
        return ContextLengthError(f"the prompt is too long: {reason}", param=param)
    if answer.code is FailureCode.INVALID:
        return InvalidRequestError(f"the prompt cannot be used: {reason}", param=param)
    if answer.code is FailureCode.OVERLOADED:
        return UnavailableError("the tokenizer is overloaded", retry_after_s=RETRY_AFTER_S)
    return InternalError("the tokenizer met a defect with this prompt")
