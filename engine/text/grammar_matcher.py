"""One compiled grammar and the requests that use it; runs inside the grammar's own process.

A source is compiled once, by llguidance, within llguidance's work limits (counted in expressions and items, so every
machine accepts or refuses it alike). Each request gets a copy of the compiled state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestRejectedError
from engine.text.output.grammar import tools_grammar
from engine.text.token_bytes import Words
from isolation.ipc.grammar import GrammarKind, MaskState, Whitespace
from isolation.ipc.messages import FailureCode
from isolation.ipc.output import Thinking

WHITESPACE = {Whitespace.COMPACT: "", Whitespace.FLEXIBLE: r"[ ]|\n[ \t]{0,24}"}
"""What may stand between the tokens of a JSON text, besides nothing; a schema's ``x-guidance`` has its own, if any.
JSON allows any amount (RFC 8259, section 2), and a small model may emit it until its tokens are used up. Compact is an
empty pattern in place of ``whitespace_flexible: false``, which a schema could turn back to any amount."""

MAX_CHOICES = 10_000
"""Largest number of alternative strings."""


@dataclass(frozen=True, slots=True)
class Row:
    """Permitted next tokens of one request."""

    request: int
    position: int
    """Number of output tokens before this position."""
    state: MaskState
    words: bytes


@dataclass(slots=True)
class _Run:
    matcher: Any
    position: int = 0


class CompiledGrammar:
    """A compiled grammar that some output can satisfy."""

    def __init__(
        self,
        tokenizer: Any,
        kind: GrammarKind,
        source: bytes,
        words: Words,
        whitespace: Whitespace = Whitespace.COMPACT,
        thinking: Thinking = Thinking.NONE,
    ) -> None:
        """Compile the source; ``words`` are the model's, of which ``tokenizer`` was made.

        Raises:
            RequestRejectedError: ``INVALID``, with the compiler's message.
        """
        import llguidance

        self._mask_bytes = words.mask_bytes
        self._nothing = bytes(words.mask_bytes)
        self._end = tokenizer.eos_token
        self._runs: dict[int, _Run] = {}
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            if kind is GrammarKind.TOOLS:
                grammar = llguidance.LLMatcher.grammar_from_lark(
                    tools_grammar(words.form, words.spelling, source, thinking)
                )
            else:
                grammar = _translated(kind, source, whitespace)
        except (ValueError, RecursionError) as error:
            raise RequestRejectedError(FailureCode.INVALID, str(error)) from error
        self._fresh = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._raise_error()
        first = _Run(self._fresh.deep_copy())
        if self._row(0, first).state is MaskState.BROKEN:
            raise RequestRejectedError(
                FailureCode.INVALID, "no output can satisfy this grammar, or too many can begin it"
            )

    def open(self, request: int) -> Row:
        """Start a request at the beginning of the grammar."""
        run = self._runs[request] = _Run(self._fresh.deep_copy())
        return self._row(request, run)

    def advance(self, request: int, token_id: int) -> Row | None:
        """Advance the request by its next token; None when it is not open."""
        run = self._runs.get(request)
        if run is None:
            return None
        run.position += 1
        if not run.matcher.is_stopped():
            run.matcher.consume_token(token_id)
        return self._row(request, run)

    def close(self, request: int) -> None:
        """Forget a request; ignored when it is not open."""
        self._runs.pop(request, None)

    def _row(self, request: int, run: _Run) -> Row:
        matcher = run.matcher
        if not matcher.is_error() and not matcher.is_stopped():
            mask = bytearray(matcher.compute_bitmask())
            if not matcher.is_error():
                place, bit = self._end >> 3, 1 << (self._end & 7)
                accepting = bool(mask[place] & bit)
                mask[place] &= ~bit
                words = bytes(mask[: self._mask_bytes])
                if accepting or words != self._nothing:
                    state = MaskState.ACCEPTING if accepting else MaskState.OPEN
                    return Row(request, run.position, state, words)
        ended = not matcher.is_error() and matcher.is_accepting()
        state = MaskState.ACCEPTING if ended else MaskState.BROKEN
        return Row(request, run.position, state, self._nothing)

    def _raise_error(self) -> None:
        if self._fresh.is_error():
            raise RequestRejectedError(FailureCode.INVALID, self._fresh.get_error())


def _translated(kind: GrammarKind, source: bytes, whitespace: Whitespace) -> str:
    """Translate the grammar to llguidance's own form.

    Raises:
        ValueError: it is not UTF-8, or not the JSON that its kind requires.
        RecursionError: the JSON is nested too deeply.
    """
    from llguidance import LLMatcher

    text = source.decode("utf-8")
    if kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind is GrammarKind.LARK:
        return LLMatcher.grammar_from_lark(text)
    if kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(_choice(text))
    lenient, pattern = kind is GrammarKind.JSON_SCHEMA_LENIENT, WHITESPACE[whitespace]
    return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": pattern}, {"lenient": lenient})


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("the choices are not an array of strings that are not empty")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"there must be 1 to {MAX_CHOICES} choices")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
