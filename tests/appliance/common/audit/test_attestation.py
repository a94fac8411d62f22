"""Attestations: signed, read, and compared with what is expected; no change of any byte passes."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.attestation import (
    NONCE,
    Attestation,
    AttestedAdapter,
    AttestedModel,
    facts,
    mismatches,
    read_attestation,
    sign_attestation,
)
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
    models=(
        AttestedModel(
            name="athanor-large", digest="ba" * 32, signer="", sandbox="gvisor/systrap", flags=("--nvproxy",)
        ),
        AttestedModel(name="athanor-mini", digest="ab" * 32, signer="23" * 32, sandbox="gvisor/systrap", flags=()),
        AttestedModel(name="far", digest="fa" * 32, signer="", sandbox="outside", flags=()),
    ),
    adapters=(AttestedAdapter(name="athanor-mini:support", digest="45" * 32),),
)

EARLIER = (Path(__file__).parent / "data/form-2.attestation").read_bytes()
"""What an earlier release made, with the same key."""


def written(**changes: Any) -> str:
    """The line of an attestation, with changes."""
    fields = asdict(ONE)
    del fields["form"]
    return json.dumps(fields | changes)


def part(kind: str, **changes: Any) -> list[dict[str, Any]]:
    """Models or adapters of the attestation, the second model or first adapter changed."""
    parts = [dict(one) for one in asdict(ONE)[kind]]
    parts[len(parts) // 2] |= changes
    return parts


def test_an_attestation_is_read_as_it_was_made() -> None:
    """Every field, flags in their order; its form is in the first line."""
    text = sign_attestation(ONE, KEY)
    assert (text.partition("\n")[0], ONE.form) == ("athanor.attestation/3", 3)
    assert read_attestation(text.encode(), VERIFIER) == ONE


def test_an_attestation_of_the_earlier_form_is_read() -> None:
    """It names the one model that it was asked about, where the newer form names all, and no adapters; everything else
    is as it was written. Programs find the model's digest under the name that it has there. Control: the newer form's
    number over its lines is refused."""
    found = read_attestation(EARLIER, VERIFIER)
    only = AttestedModel(name="athanor-mini", digest="ab" * 32, signer="23" * 32, sandbox="", flags=())
    assert found == replace(ONE, form=2, models=(only,), adapters=())
    assert mismatches(found, {"model_digest": "ab" * 32, "models.athanor-mini": "ab" * 32, "nonce": ONE.nonce}) == []
    line = json.loads(EARLIER.decode().split("\n")[1])
    assert {name: facts(found)[name] for name in line} | {"flags": list(found.flags)} == line
    with pytest.raises(SignedTextError, match="changed after it was signed"):
        read_attestation(EARLIER.replace(b"attestation/2", b"attestation/3"), VERIFIER)
    with pytest.raises(SignedTextError, match="other fields"):
        read_attestation(sign_lines("athanor.attestation/2", [written()], NAME, KEY).encode(), VERIFIER)


def detected(data: bytes, count: int, seed: int) -> int:
    """How many of so many random changes of a text were detected."""
    chance, found = random.Random(seed), 0
    for _ in range(count):
        while (changed := mutated(data, chance)) == data:
            continue
        try:
            read_attestation(changed, VERIFIER)
        except SignedTextError:
            found += 1
    return found


def test_every_change_is_detected() -> None:
    """3,000 random changes of bits, bytes and lines, and 1,000 of one of the earlier form; the texts themselves pass
    (control, above)."""
    assert detected(sign_attestation(ONE, KEY).encode(), 3_000, 3) == 3_000
    assert detected(EARLIER, 1_000, 3) == 1_000


def test_a_change_of_any_byte_is_detected() -> None:
    """Each byte of both forms in turn, with one bit of it turned: every place, where random changes miss some."""
    for data in (sign_attestation(ONE, KEY).encode(), EARLIER):
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            with pytest.raises(SignedTextError):
                read_attestation(bytes(changed), VERIFIER)


@pytest.mark.full
def test_every_change_of_a_hundred_thousand_is_detected() -> None:
    """100,000 random changes of an attestation, and as many of one of the earlier form."""
    assert detected(sign_attestation(ONE, KEY).encode(), 100_000, 4) == 100_000
    assert detected(EARLIER, 100_000, 4) == 100_000


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        written(more=1),
        json.dumps({name: value for name, value in json.loads(written()).items() if name != "image"}),
        written(time="1"),
        written(time=True),
        written(flags="x"),
        written(flags=[1]),
        written(image=None),
        written(form=3),
        written(models={}),
        written(models=[]),
        written(models=[[]]),
        written(model="none"),
        written(models=part("models", more=1)),
        written(models=part("models", digest=1)),
        written(models=part("models", flags=[None])),
        written(models=part("models", name="far")),
        written(adapters=None),
        written(adapters=["x"]),
        written(adapters=part("adapters", digest=None)),
        written(adapters=2 * part("adapters")),
    ],
    ids=lambda line: f"{zlib.crc32(line.encode()):08x}",
)
def test_what_is_signed_and_no_attestation_is_refused(line: str) -> None:
    """A signature that holds makes no attestation of another text, nor of one that names a model twice or not the one
    that was asked about; one with the fields is read (control)."""
    first = "athanor.attestation/3"
    assert read_attestation(sign_lines(first, [written()], NAME, KEY).encode(), VERIFIER) == ONE
    with pytest.raises(SignedTextError):
        read_attestation(sign_lines(first, [line], NAME, KEY).encode(), VERIFIER)


def test_one_kind_of_text_does_not_pass_for_another() -> None:
    """A statement's first line is not an attestation's, though one key signs both."""
    text = sign_lines("athanor.statement/1", [written()], NAME, KEY).encode()
    assert read_lines(text, "athanor.statement/1", VERIFIER)
    with pytest.raises(SignedTextError, match=r"no athanor\.attestation/3"):
        read_attestation(text, VERIFIER)


def test_expectations_are_compared() -> None:
    """Fields, and digests of models and adapters, that differ are told with both values, and one that is not named is;
    equal ones are not."""
    assert mismatches(ONE, {"runtime": "gvisor/systrap", "nonce": ONE.nonce, "time": str(ONE.time)}) == []
    other = replace(ONE, runtime="unsafe/none")
    assert mismatches(other, {"runtime": "gvisor/systrap"}) == ["runtime is 'unsafe/none', not 'gvisor/systrap'"]
    right = {
        "models.far": "fa" * 32,
        "adapters.athanor-mini:support": "45" * 32,
        "model_signer": "23" * 32,
        "form": "3",
    }
    assert mismatches(ONE, right) == []
    assert mismatches(ONE, {"models.far": "x"}) == [f"models.far is {'fa' * 32!r}, not 'x'"]
    assert mismatches(ONE, {"adapters.athanor-mini:none": "x"}) == ["adapters.athanor-mini:none is not stated"]


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 129, "A" * 16, "g" * 16, "\u0660" * 16, "0" * 16 + "\n"])
def test_what_is_no_nonce(text: str) -> None:
    """Too short, too long, other digits, a line end; sixteen small hexadecimal digits are one (control)."""
    assert NONCE.fullmatch("0123456789abcdef") is not None
    assert NONCE.fullmatch(text) is None
