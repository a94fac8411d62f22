"""What an external model's endpoint is asked and what it answers, in the form of /v1/completions. Pure.

The prompt goes out as token ids. What comes back is token ids where the endpoint gives them (``return_token_ids``, as
vLLM does), and text otherwise, which is written in ids of the tokenizer's own vocabulary: the longest entry first, so
that a piece of one token becomes that token. Everything that comes back is a claim, and is checked here.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Finish

MAX_EVENT_BYTES = 64 << 10
"""Bytes of one event of an answer, beside the prompt's ids, which some endpoints repeat in the first."""

ID_BYTES = 12
"""Bytes of one token id in JSON, with comma and blank."""

EVENTS_SLACK = 64
"""Events of an answer beside two for each of its tokens: the usage, and comments that keep a connection open."""

MAX_EVENT_CONTAINERS = 64
"""Arrays and objects in one event."""

SALT_DOMAIN = b"athanor external cache salt v1\0"
"""What the digest of a salt begins with."""

OUTCOMES = ("ok", "failed", "busy", "late", "wrong", "cancelled", "usage_differs")
"""What is counted of an endpoint's outputs; the last beside ``ok``."""

MAX_SEED = (1 << 63) - 1
"""Largest seed that endpoints take: theirs is signed."""


class WrongAnswerError(Exception):
    """The endpoint's answer is none to this request; the message is for the operator."""


def cache_salt(key: bytes, url: str, model: str) -> str:
    """Return what separates the prefixes that an endpoint caches for one tenant from those of others: a digest under
    the tenant's own ``key``, another for each endpoint. It tells nothing of the tenant's name."""
    message = SALT_DOMAIN + hashlib.sha256(url.encode()).digest() + hashlib.sha256(model.encode()).digest()
    return base64.urlsafe_b64encode(hmac.digest(key, message, "sha256")).decode().rstrip("=")


def body_of(submit: Submit, choice: int, model: str, salt: str) -> dict[str, Any]:
    """Return the body of the request for one choice."""
    sampling = submit.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": submit.token_ids.tolist(),
        "max_tokens": submit.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": (sampling.seed + choice) & MAX_SEED,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    # Fields that OpenAI does not have are sent only where they ask for something: some endpoints refuse them.
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1.0:
        body["repetition_penalty"] = sampling.repetition_penalty
    if submit.stop_ids:
        body["stop_token_ids"] = list(submit.stop_ids)
    if submit.ignore_eos:
        body["ignore_eos"] = True
    if submit.logit_bias is not None:
        bias = submit.logit_bias
        body["logit_bias"] = {str(token): value for token, value in zip(bias.ids, bias.values, strict=True)}
    return body


def not_passed_on(submit: Submit) -> str:
    """Return what a request asks for that no endpoint is asked for; empty where there is nothing."""
    asked = {
        "log-probabilities": submit.logprobs >= 0 or submit.prompt_logprobs >= 0,
        "structured output": submit.structured,
        "deterministic answers": submit.deterministic,
        "adapters": bool(submit.adapter),
        "typical_p": submit.sampling.typical_p < 1.0,
    }
    return next((what for what, wanted in asked.items() if wanted), "")


class Spelling:
    """Writes text in ids of a vocabulary; ``entries`` are the bytes of each id, empty for special tokens."""

    def __init__(self, entries: Sequence[bytes], *, strip_leading_space: bool) -> None:
        self._ids: dict[bytes, int] = {}
        for token, entry in enumerate(entries):
            if entry:
                self._ids.setdefault(entry, token)
        self._longest = max(map(len, self._ids), default=0)
        self._strips = strip_leading_space

    def ids(self, text: bytes, *, first: bool) -> list[int]:
        """Return ids whose bytes are the text; ``first``: it begins the output.

        Raises:
            WrongAnswerError: the vocabulary has no such bytes.
        """
        if first and self._strips:
            text = b" " + text
        found, place = [], 0
        while place < len(text):
            for length in range(min(self._longest, len(text) - place), 0, -1):
                token = self._ids.get(text[place : place + length])
                if token is not None:
                    break
            else:
                raise WrongAnswerError("it gives text that the model's vocabulary cannot write")
            found.append(token)
            place += length
        return found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known here of the model's tokens."""

    size: int
    spelling: Spelling | None
    """None where concatenated entries are not the tokenizer's decoding: text cannot be taken then."""
    ends: int
    """An id without text, for the end of an output whose last id the endpoint does not say."""
    special: frozenset[int] = frozenset()
    """Ids without text."""


@dataclass(frozen=True, slots=True)
class EndpointUsage:
    """Tokens that an endpoint counts."""

    input: int
    output: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event gave. With ``finish`` other than ``NONE`` the last id ends the output."""

    token_ids: list[int]
    finish: Finish = Finish.NONE
    usage: EndpointUsage | None = None


class AnswerReader:
    """Reads the events of one answer in their order."""

    def __init__(self, submit: Submit, vocabulary: Vocabulary) -> None:
        self._grant = submit.max_tokens
        self._stops = frozenset(submit.stop_ids)
        self._vocabulary = vocabulary
        self.received = 0
        """Tokens so far."""
        self.finished = False

    def read(self, event: Any) -> Piece:
        """Read an event.

        Raises:
            WrongAnswerError: it is none of an answer to this request.
        """
        if not isinstance(event, dict):
            raise WrongAnswerError("it gives an event that is no JSON object")
        if "error" in event:
            raise WrongAnswerError("it gives an error in the middle of its answer")
        usage = _usage(event.get("usage"))
        choices = event.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise WrongAnswerError("it gives other choices than the one that was asked for")
        if not choices:
            return Piece([], usage=usage)
        choice = choices[0]
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise WrongAnswerError("it gives a choice that was not asked for")
        ids, reason = self._ids(choice), choice.get("finish_reason")
        if self.finished and (ids or reason is not None):
            raise WrongAnswerError("it goes on behind the end of its answer")
        finish = self._finish(reason)
        if finish is Finish.STOP and not (ids and self._is_end(ids[-1])):
            ids.append(self._vocabulary.ends)
        return self._within_grant(ids, finish, usage, told=_tells_ids(choice))

    def _ids(self, choice: Mapping[str, Any]) -> list[int]:
        """Return the ids of a choice."""
        if _tells_ids(choice):
            ids = choice["token_ids"]
            if len(ids) > MAX_TOKENS_PER_REQUEST or not all(type(one) is int for one in ids):
                raise WrongAnswerError("it gives token ids that are none")
            if any(not 0 <= one < self._vocabulary.size for one in ids):
                raise WrongAnswerError("it gives token ids beyond the model's vocabulary; is it another model?")
            return list(ids)
        text = choice.get("text")
        if not isinstance(text, str):
            raise WrongAnswerError("it gives neither text nor token ids")
        if not text:
            return []
        if self._vocabulary.spelling is None:
            raise WrongAnswerError("it gives no token ids, and this tokenizer cannot turn pieces of text into some")
        try:
            return self._vocabulary.spelling.ids(text.encode(), first=not self.received)
        except UnicodeEncodeError:
            raise WrongAnswerError("it gives text that is no Unicode") from None

    def _finish(self, reason: Any) -> Finish:
        if reason is None:
            return Finish.NONE
        if reason not in ("stop", "length"):
            raise WrongAnswerError("it ends for a reason other than stop or length")
        return Finish.STOP if reason == "stop" else Finish.LENGTH

    def _is_end(self, token: int) -> bool:
        return token in self._stops or token in self._vocabulary.special

    def _within_grant(self, ids: list[int], finish: Finish, usage: EndpointUsage | None, *, told: bool) -> Piece:
        """Return a piece that keeps to the tokens that were granted. Text may take more ids here than there; told ids
        may not."""
        left = self._grant - self.received
        if told and len(ids) > left + (finish is Finish.STOP):
            raise WrongAnswerError("it gives more tokens than were asked for")
        if len(ids) >= left and (len(ids) > left or finish is Finish.NONE):
            ids, finish = ids[:left], Finish.LENGTH
        if finish is Finish.LENGTH and not ids:
            ids = [self._vocabulary.ends]  # The last id was handed on already, as one that ends nothing.
        self.received += len(ids)
        self.finished = finish is not Finish.NONE
        return Piece(ids, finish, usage)


def _tells_ids(choice: Mapping[str, Any]) -> bool:
    return isinstance(choice.get("token_ids"), list)


def _usage(value: Any) -> EndpointUsage | None:
    if not isinstance(value, dict):
        return None
    return EndpointUsage(_count(value.get("prompt_tokens")), _count(value.get("completion_tokens")))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS_PER_REQUEST:
        raise WrongAnswerError("it counts tokens that cannot be")
    return value


def most_bytes(submit: Submit) -> int:
    """Return the most bytes of one event of an answer."""
    return MAX_EVENT_BYTES + ID_BYTES * len(submit.token_ids)


def most_events(submit: Submit) -> int:
    """Return the most events, empty lines left out, of an answer."""
    return 2 * submit.max_tokens + EVENTS_SLACK
