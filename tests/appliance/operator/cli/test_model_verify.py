"""Signatures of models in ``athanor model pull``, ``verify``, ``list`` and ``show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from isolation.keys.public_key import public_key_of
from tests.appliance.common.bundles import pem, sign_folder
from tests.appliance.operator.cli.conftest import Run
from tests.appliance.operator.cli.test_model_cache import place

__all__ = ["place"]

KEY = ec.derive_private_key(11, ec.SECP256R1())
OTHER = ec.derive_private_key(12, ec.SECP256R1())
SIGNER = public_key_of(pem(KEY))


def configured(place: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Demand that a key has signed all models, and have two key files beside."""
    text = (place / "athanor.yaml").read_text()
    (place / "athanor.yaml").write_text(f"{text}model_keys: [{public_key_of(pem(key)).line}]\n")
    (place / "key.pub").write_text(pem(KEY))
    (place / "other.pub").write_text(pem(OTHER))


@pytest.fixture
def signed(place: Path) -> Path:
    """The same, with a signed model and the demand for its key."""
    configured(place, KEY)
    sign_folder(place / "models/llama", KEY)
    return place


def test_a_signature_comes_with_a_pull_and_is_told(run: Run, signed: Path) -> None:
    """Pulled beside the files; list, show and verify name who has signed. A model that came unsigned is marked, verify
    refuses it, and a pull after it was signed brings the signature."""
    assert run("model", "pull", "models/llama", "-c", "athanor.yaml").exit_code == 0
    assert run("model", "pull", "models/served", "-c", "athanor.yaml").exit_code == 0
    rows = json.loads(run("model", "list", "-c", "athanor.yaml", "-o", "json").stdout)["models"]
    told = {one["name"]: (one["signer"], "is not signed" in one["unsigned"]) for one in rows}
    assert told == {"llama": (SIGNER.id, False), "served": ("", True)}
    assert f"signed  {SIGNER.id}" in run("model", "show", "llama", "-c", "athanor.yaml", columns=160).stdout
    good = run("model", "verify", "llama", "-c", "athanor.yaml", columns=160)
    assert (good.exit_code, f"whole  llama, signed by {SIGNER.id[:16]}" in good.stdout) == (0, True)
    for name, code in (("key.pub", 0), ("other.pub", 1)):
        assert run("model", "verify", "llama", "--key", name, "-c", "athanor.yaml").exit_code == code
    bad = run("model", "verify", "-c", "athanor.yaml", columns=160)
    assert (bad.exit_code, "broken  served" in bad.stdout, "is not signed" in bad.output) == (1, True, True)
    sign_folder(signed / "models/served", KEY)
    assert run("model", "pull", "models/served", "-c", "athanor.yaml").exit_code == 0
    assert run("model", "verify", "-c", "athanor.yaml").exit_code == 0


def test_a_key_of_the_command_counts_in_place_of_the_configurations(run: Run, signed: Path) -> None:
    """For a folder that is in no cache; a damaged file of it is named."""
    for name, code in (("key.pub", 0), ("other.pub", 1)):
        done = run("model", "verify", "models/llama", "--key", name, "-c", "athanor.yaml", columns=160)
        assert done.exit_code == code, done.output
    assert run("model", "verify", "models/llama", "-c", "athanor.yaml").exit_code == 0
    (signed / "models/llama/config.json").write_text("{}")
    done = run("model", "verify", "models/llama", "--key", "key.pub", columns=200)
    assert (done.exit_code, "config.json is not the file that was signed" in done.output) == (1, True)


def test_nothing_is_verified_against_nothing(run: Run, place: Path) -> None:
    """Without keys a folder cannot be verified; a file that is no key is refused."""
    sign_folder(place / "models/llama", KEY)
    (place / "none.pub").write_text("-----BEGIN PUBLIC KEY-----\n")
    assert "--key FILE names the key" in run("model", "verify", "models/llama", "-c", "athanor.yaml").output
    refused = run("model", "verify", "models/llama", "--key", "none.pub")
    assert (refused.exit_code, "not a public key" in refused.output) == (1, True)
