"""Attestations: signed, read, and compared with what is expected; no change of any byte passes."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from appliance.common.audit.attestation import NONCE, Attestation, mismatches, read_attestation, sign_attestation
from appliance.common.audit.checkpoint import Verifier
from appliance.common.audit.signed_text import SignedTextError, read_lines, sign_lines
from isolation.keys.signing import key_of
from tests.appliance.common.audit.test_statement import mutated

KEY = key_of(bytes(range(32)))
NAME = "athanor.audit/0011223344556677"
VERIFIER = Verifier(NAME, KEY.public)

ONE = Attestation(
    log=NAME,
    time=1_790_812_800_000,
    nonce="9f86d081884c7d65",
    tenant="alpha",
    model="athanor-mini",
    model_digest="ab" * 32,
    model_signer="23" * 32,
    isolation_class="shared",
    policy="cd" * 32,
    image="ef" * 32,
    runtime="gvisor/systrap",
    program="runsc 20240729",
    program_digest="01" * 32,
    flags=("--platform=systrap", "--network=none"),
    limits="cgroup v2",
    version="0.1.0",
    selftest="2026-10-01T00:00:00Z, version 0.1.0, short form: 61 pass, 0 fail, 2 absent, 9 not run",
)


def test_an_attestation_is_read_as_it_was_made() -> None:
    """Every field, flags in their order."""
    assert read_attestation(sign_attestation(ONE, KEY).encode(), VERIFIER) == ONE


def detected(count: int, seed: int) -> int:
    """How many of so many random changes were detected."""
    chance, data, found = random.Random(seed), sign_attestation(ONE, KEY).encode(), 0
    for _ in range(count):
        while (changed := mutated(data, chance)) == data:
            continue
        try:
            read_attestation(changed, VERIFIER)
        except SignedTextError:
            found += 1
    return found


def test_every_change_is_detected() -> None:
    """3,000 random changes of bits, bytes and lines; the text itself passes (control, above)."""
    assert detected(3_000, 3) == 3_000


@pytest.mark.full
def test_every_change_of_a_hundred_thousand_is_detected() -> None:
    """The same with 100,000 changes."""
    assert detected(100_000, 4) == 100_000


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        json.dumps(asdict(ONE) | {"more": 1}),
        json.dumps({name: value for name, value in asdict(ONE).items() if name != "image"}),
        json.dumps(asdict(ONE) | {"time": "1"}),
        json.dumps(asdict(ONE) | {"time": True}),
        json.dumps(asdict(ONE) | {"flags": "x"}),
        json.dumps(asdict(ONE) | {"flags": [1]}),
        json.dumps(asdict(ONE) | {"image": None}),
    ],
)
def test_what_is_signed_and_no_attestation_is_refused(line: str) -> None:
    """A signature that holds makes no attestation of another text; one with the fields is read (control)."""
    first = "athanor.attestation/2"
    assert read_attestation(sign_lines(first, [json.dumps(asdict(ONE))], NAME, KEY).encode(), VERIFIER) == ONE
    with pytest.raises(SignedTextError):
        read_attestation(sign_lines(first, [line], NAME, KEY).encode(), VERIFIER)


def test_one_kind_of_text_does_not_pass_for_another() -> None:
    """A statement's first line is not an attestation's, though one key signs both."""
    text = sign_lines("athanor.statement/1", [json.dumps(asdict(ONE))], NAME, KEY).encode()
    assert read_lines(text, "athanor.statement/1", VERIFIER)
    with pytest.raises(SignedTextError, match=r"no athanor\.attestation/2"):
        read_attestation(text, VERIFIER)


def test_expectations_are_compared() -> None:
    """Fields that differ are told with both values; equal ones are not."""
    assert mismatches(ONE, {"runtime": "gvisor/systrap", "nonce": ONE.nonce, "time": str(ONE.time)}) == []
    other = replace(ONE, runtime="unsafe/none")
    assert mismatches(other, {"runtime": "gvisor/systrap"}) == ["runtime is 'unsafe/none', not 'gvisor/systrap'"]


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 129, "A" * 16, "g" * 16, "\u0660" * 16, "0" * 16 + "\n"])
def test_what_is_no_nonce(text: str) -> None:
    """Too short, too long, other digits, a line end; sixteen small hexadecimal digits are one (control)."""
    assert NONCE.fullmatch("0123456789abcdef") is not None
    assert NONCE.fullmatch(text) is None
