"""Scopes: groups of operations that a credential can be limited to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any


class Scope(StrEnum):
    """A group of operations. A credential without scopes may do whatever its tenant may."""

    GENERATE = "generate"
    """Answers of models: chats, completions, responses, messages."""
    EMBEDDINGS = "embeddings"
    """Vectors of texts."""
    RERANK = "rerank"
    """Scores of documents against a query, and labels of texts."""
    TOKENIZE = "tokenize"
    """Token ids of texts, their number, and texts of token ids."""
    ATTESTATION = "attestation"
    """Signed statements of what serves the tenant."""
    BATCHES = "batches"
    """Files and batches, whose lines need no other scope."""
    RESPONSES = "responses"
    """Stored responses: reading and deleting them. Continuing one needs ``generate``."""
    MODELS = "models"
    """What is there: models, version, the document of the API, services, health over time."""

    ACCOUNT = "account"
    """Limits and usage of the tenant."""


_WORDS = frozenset(Scope)


def read_scopes(words: Iterable[Any]) -> frozenset[Scope]:
    """Return the scopes that words name.

    Raises:
        ValueError: a word is no scope; the message lists those that are.
    """
    found = set()
    for word in words:
        if not isinstance(word, str) or word not in _WORDS:
            raise ValueError(f"{str(word)[:64]!r} is no scope; take {', '.join(Scope)}")
        found.add(Scope(word))
    return frozenset(found)
