"""Checkpoints and verifier keys: signed notes that others read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.audit.checkpoint import (
    Checkpoint,
    CheckpointError,
    Verifier,
    parse_verifier,
    read_checkpoint,
    sign_checkpoint,
)
from isolation.keys.signing import key_of

KEY = key_of(bytes(range(32)))
NAME = "athanor.audit/0011223344556677"
VERIFIER = Verifier(NAME, KEY.public)
CHECKPOINT = Checkpoint(42, bytes(range(32)))
NOTE = sign_checkpoint(CHECKPOINT, NAME, KEY)


def test_a_published_verifier_key_is_read() -> None:
    """The example of the Go checksum database's documentation: its four bytes come out of our rule."""
    line = "sum.golang.org+033de0ae+Ac4zctda0e5eza+HJyk9SxEdh+s3Ux18htTTAD8OuAn8"
    assert parse_verifier(line).mark.hex() == "033de0ae"
    with pytest.raises(CheckpointError, match="verifier key"):
        parse_verifier(line.replace("033de0ae", "033de0af"))


def test_a_checkpoint_comes_back() -> None:
    """What was signed is read, by the key's line as well; five lines, the last with the name."""
    assert read_checkpoint(NOTE, parse_verifier(VERIFIER.line())) == CHECKPOINT
    lines = NOTE.splitlines()
    assert lines[:2] == [NAME, "42"]
    assert lines[3] == ""
    assert lines[4].startswith(f"\u2014 {NAME} ")


@settings(deadline=None, derandomize=True)
@given(st.integers(0, len(NOTE) - 1), st.characters(codec="utf-8"))
def test_no_character_can_be_another(place: int, character: str) -> None:
    """Whichever character is replaced by whichever: the checkpoint is refused, or is the same text."""
    text = NOTE[:place] + character + NOTE[place + 1 :]
    if text != NOTE:
        with pytest.raises(CheckpointError):
            read_checkpoint(text, VERIFIER)


def test_another_key_or_name_does_not_do() -> None:
    """A checkpoint by another key, or of another log, is refused with its reason."""
    with pytest.raises(CheckpointError, match="signature"):
        read_checkpoint(sign_checkpoint(CHECKPOINT, NAME, key_of(bytes(32))), VERIFIER)
    with pytest.raises(CheckpointError, match="of the log other"):
        read_checkpoint(sign_checkpoint(CHECKPOINT, "other", KEY), VERIFIER)
