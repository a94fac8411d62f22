"""Lines of a batch's file: what each must be, and what is wrong with a file; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.common.batches.values import MAX_PROBLEMS, LineProblem
from appliance.common.strict_json import JsonError, parse_json

MAX_CUSTOM_ID_CHARS = 256
"""Characters of a line's own id."""

_WORDS = re.compile(r"[\x20-\x7e]{0,200}")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line: a request with its sender's id."""

    custom_id: str
    body: bytes
    """JSON of the body, as its route takes it."""


class LineError(Exception):
    """A line is no request of its batch."""

    def __init__(self, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(text: bytes, endpoint: str) -> BatchRequest:
    """Read a line of a batch for one route.

    Raises:
        LineError: it is none.
    """
    document = _document(text)
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise LineError(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if document.get("method") != "POST":
        raise LineError("invalid_method", "method must be POST", "method")
    if document.get("url") != endpoint:
        raise LineError("mismatched_url", f"url must be that of the batch, {endpoint}", "url")
    body = document.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", "body must be an object", "body")
    if not isinstance(body.get("model"), str):
        raise LineError("missing_model", "body.model must name a model", "body.model")
    if body.get("stream"):
        raise LineError("invalid_body", "a line of a batch is not streamed; leave body.stream out", "body.stream")
    return BatchRequest(custom_id, json.dumps(body, separators=(",", ":")).encode())


def _document(text: bytes) -> Mapping[str, Any]:
    try:
        document = parse_json(text)
    except JsonError as error:
        shown = str(error)
        raise LineError(
            "invalid_json_line", f"the line is not acceptable JSON: {shown if _WORDS.fullmatch(shown) else 'malformed'}"
        ) from None
    if not isinstance(document, dict):
        raise LineError("invalid_json_line", "the line must be a JSON object")
    return document


@dataclass(slots=True)
class FileCheck:
    """Reads all lines of a file, and collects what is wrong."""

    endpoint: str
    problems: list[LineProblem] = field(default_factory=list)
    _ids: dict[str, int] = field(default_factory=dict)
    """Line that had an id first."""

    def take(self, number: int, text: bytes) -> None:
        """Look at a line."""
        try:
            request = read_line(text, self.endpoint)
        except LineError as error:
            self._add(LineProblem(error.code, error.message, number, error.param))
            return
        first = self._ids.setdefault(request.custom_id, number)
        if first != number:
            self._add(LineProblem("duplicate_custom_id", f"line {first} has the same custom_id", number, "custom_id"))

    def end(self) -> list[LineProblem]:
        """Return what is wrong with the file."""
        if not self._ids and not self.problems:
            self._add(LineProblem("empty_file", "the file has no request"))
        return self.problems

    @property
    def full(self) -> bool:
        """Whether no more problems are told."""
        return len(self.problems) >= MAX_PROBLEMS

    def _add(self, problem: LineProblem) -> None:
        if not self.full:
            self.problems.append(problem)
