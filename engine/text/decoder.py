"""Ids to text by the tokenizer itself, for the models whose table is not exact."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import RequestRejectedError
from engine.text.tokenizer import Tokenizer
from isolation.ipc.messages import MAX_FRAME_BYTES, FailureCode

FRAME_ROOM_BYTES = 1_024
"""Bytes of a frame that are not text; the header has a few dozen."""


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """UTF-8 of ``ids``: special tokens and ids that no token has give nothing, and bytes that are
    no character give U+FFFD.

    Raises:
        RequestRejectedError: ``TOO_LONG`` when the text does not fit a frame, ``INVALID`` when the
            tokenizer cannot decode the ids.
    """
    text = tokenizer.decode(ids).encode("utf-8", "replace")
    if len(text) > MAX_FRAME_BYTES - FRAME_ROOM_BYTES:
        raise RequestRejectedError(FailureCode.TOO_LONG, "the decoded text is too long for one answer")
    return text
