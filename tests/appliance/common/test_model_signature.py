"""Signatures of models: bundles of the real program and of all kinds of keys hold; every other one is refused."""

from __future__ import annotations

import base64
import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pydantic import TypeAdapter

from appliance.common import model_signature
from appliance.common.catalog import SIGNATURE, check_files, read_model
from appliance.common.errors import ConfigError, ModelSignatureError
from appliance.common.model_keys import ModelKey
from appliance.common.model_signature import check_signature, hashed_files, read_bundle, with_signer
from isolation.keys.public_key import MAX_KEY_CHARS, PublicKeyError, public_key_of
from tests.appliance.common.audit.test_statement import mutated
from tests.appliance.common.bundles import PrivateKey, bundle, pem, sign_folder, statement
from tests.observers import observer

HERE = Path(__file__).parent

RECORDED = HERE / "signed_model"
"""A model that model-signing 1.1.1 has signed."""

SIGNER = (HERE / "signer.pub").read_text()

OTHER = ec.derive_private_key(7, ec.SECP256R1())
"""A key that has signed nothing that is recorded."""

KEYS: dict[str, Callable[[], PrivateKey]] = {
    "P-256": lambda: OTHER,
    "P-384": lambda: ec.derive_private_key(7, ec.SECP384R1()),
    "P-521": lambda: ec.derive_private_key(7, ec.SECP521R1()),
    "Ed25519": lambda: ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the recorded model that may be changed."""
    return shutil.copytree(RECORDED, tmp_path / "m", copy_function=shutil.copyfile)


def check(folder: Path, *keys: str) -> str:
    """The signer of a folder's files."""
    return check_signature("m", folder, hashed_files(read_model("m", folder)), keys or (SIGNER,))


def test_what_the_real_program_signed_holds(folder: Path) -> None:
    """A recorded bundle, with the key as PEM and in one line, and beside another one. The signer is told by the name
    that the bundle itself has for its key. A README may change: no sandbox gets it."""
    line = "".join(SIGNER.splitlines()[1:-1])
    said = json.loads((folder / SIGNATURE).read_text())["verificationMaterial"]["publicKey"]["hint"]
    for keys in ((SIGNER,), (line,), (pem(OTHER), line)):
        assert check(folder, *keys) == said
    (folder / "README.md").write_text("changed")
    assert check(folder) == said


@pytest.mark.full
@pytest.mark.parametrize("curve", ["secp256r1", "secp384r1"])
def test_the_real_program_signs_what_holds_here(folder: Path, tmp_path: Path, curve: str) -> None:
    """A bundle that is made now; one changed byte of the weights is refused by both."""
    program = observer("model_signing")
    key = ec.generate_private_key(ec.SECP256R1() if curve == "secp256r1" else ec.SECP384R1())
    form = PrivateFormat.TraditionalOpenSSL
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    (tmp_path / "key.pub").write_text(pem(key))
    place = str(folder / SIGNATURE)
    signing = ["sign", "key", str(folder), "--private_key", str(tmp_path / "key.pem"), "--signature", place]
    verifying = ["verify", "key", str(folder), "--public_key", str(tmp_path / "key.pub"), "--signature", place]
    subprocess.run([program, *signing], check=True, capture_output=True)
    assert check(folder, pem(key)) == public_key_of(pem(key)).id
    assert subprocess.run([program, *verifying], check=False, capture_output=True).returncode == 0
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{ ")
    with pytest.raises(ModelSignatureError, match=r"model\.safetensors is not the file that was signed"):
        check(folder, pem(key))
    assert subprocess.run([program, *verifying], check=False, capture_output=True).returncode != 0


@pytest.mark.parametrize("kind", KEYS)
def test_each_kind_of_key_signs(folder: Path, kind: str) -> None:
    """Three curves and Ed25519; with the key of another kind alone none holds."""
    key = KEYS[kind]()
    sign_folder(folder, key)
    assert check(folder, pem(key)) == public_key_of(pem(key)).id
    with pytest.raises(ModelSignatureError, match="not signed by any of the keys"):
        check(folder, SIGNER)


def changed(folder: Path) -> None:
    """Change a file of the text sandbox."""
    (folder / "tokenizer.json").write_text("{}")


def added(folder: Path) -> None:
    """Add a file that the text sandbox would get."""
    (folder / "chat_template.jinja").write_text("x")


def more_weights(folder: Path) -> None:
    """Add a file that the engine would get."""
    (folder / "more.safetensors").write_text("x")


def removed(folder: Path) -> None:
    """Remove a file that was signed."""
    (folder / "1_Pooling/config.json").unlink()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed, "tokenizer.json is not the file that was signed: its SHA-256 is"),
        (added, "chat_template.jinja is not among the files that were signed"),
        (more_weights, "more.safetensors is not among the files that were signed"),
        (removed, "pooling.json was signed, and is not there"),
    ],
)
def test_other_files_than_the_signed_ones_are_refused(
    folder: Path, change: Callable[[Path], None], problem: str
) -> None:
    """A changed file, one more that a sandbox would get, one fewer: the message names it, and the bundle."""
    check(folder)
    change(folder)
    with pytest.raises(ModelSignatureError, match=problem) as refused:
        check(folder)
    assert str(folder / SIGNATURE) in refused.value.message


def test_a_missing_signature_and_another_signer_are_told(folder: Path) -> None:
    """The first with the command that signs; the second with the keys that may sign, and the one that it names."""
    said = public_key_of(SIGNER).id[:16]
    with pytest.raises(ModelSignatureError, match=rf"keys that must sign .*says that it is by {said}"):
        check(folder, pem(OTHER))
    (folder / SIGNATURE).unlink()
    with pytest.raises(ModelSignatureError, match=r"there is no .*model\.sig; sign it with: model_signing"):
        check(folder)


def test_a_model_is_not_started_unless_it_is_signed(folder: Path) -> None:
    """What is checked before each boot has the signer, or refuses; without keys nothing is asked (control)."""
    files = read_model("m", folder)
    check_files(with_signer(files, ()), files.digest)
    signed = with_signer(files, [SIGNER])
    check_files(signed, files.digest)
    assert signed.signer == public_key_of(SIGNER).id
    refused = with_signer(files, [pem(OTHER)])
    with pytest.raises(ModelSignatureError, match="model m: .* does not hold"):
        check_files(refused, files.digest)


def test_a_bundle_that_is_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    """The folder is a stranger's; a link within it is followed (control)."""
    (folder / SIGNATURE).rename(folder / "kept.sig")
    (folder / SIGNATURE).symlink_to("kept.sig")
    check(folder)
    (folder / SIGNATURE).unlink()
    (folder / "kept.sig").rename(tmp_path / "away.sig")
    (folder / SIGNATURE).symlink_to(tmp_path / "away.sig")
    with pytest.raises(ConfigError, match="a link out of the model's folder"):
        check(folder)


DIGESTS = {"config.json": "ab" * 32, "model.safetensors": "cd" * 32, "tokenizer.json": "ef" * 32}
GOOD = statement(DIGESTS)
FILES = {"method": "files"}
ROW = {"name": "a", "algorithm": "sha256", "digest": "ab" * 32}

MALFORMED: dict[str, dict[str, Any]] = {
    "shards": bundle(statement(DIGESTS, predicate={"serialization": {"method": "shards"}, "resources": []}), OTHER),
    "another hash": bundle(
        statement(DIGESTS, predicate={"serialization": FILES, "resources": [ROW | {"algorithm": "blake3"}]}), OTHER
    ),
    "a file twice": bundle(statement(DIGESTS, predicate={"serialization": FILES, "resources": [ROW, ROW]}), OTHER),
    "another root": bundle(statement(DIGESTS, subject=[{"name": "m", "digest": {"sha256": "00" * 32}}]), OTHER),
    "two subjects": bundle(statement(DIGESTS, subject=GOOD["subject"] * 2), OTHER),
    "an older form": bundle(statement(DIGESTS, predicateType="https://model_signing/Digests/v0.1"), OTHER),
    "another type": bundle(statement(DIGESTS, _type="https://in-toto.io/Statement/v0.1"), OTHER),
    "another payload": bundle(GOOD, OTHER, payloadType="text/plain"),
    "another bundle": bundle(GOOD, OTHER, mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2"),
    "no signature": bundle(GOOD, OTHER, signatures=[]),
    "a certificate": bundle(GOOD, OTHER, verificationMaterial={"certificate": {"rawBytes": ""}}),
    "spaces in base64": bundle(GOOD, OTHER, payload=" " + bundle(GOOD, OTHER)["dsseEnvelope"]["payload"]),
    "nothing": {},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_other_forms_are_refused_though_their_signature_holds(name: str) -> None:
    """Each is signed by the key that must sign; the form that is read passes (control)."""
    keys = [public_key_of(pem(OTHER))]
    assert read_bundle(json.dumps(bundle(GOOD, OTHER)).encode(), keys).digests == DIGESTS
    with pytest.raises(ModelSignatureError):
        read_bundle(json.dumps(MALFORMED[name]).encode(), keys)


def test_a_bundle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes, or more files, are refused before anything of them is built."""
    data, keys = json.dumps(bundle(GOOD, OTHER)).encode(), [public_key_of(pem(OTHER))]
    read_bundle(data, keys)
    monkeypatch.setattr(model_signature, "MAX_SIGNED_FILES", 2)
    with pytest.raises(ModelSignatureError, match="not about whole files"):
        read_bundle(data, keys)
    monkeypatch.setattr(model_signature, "MAX_SIGNATURE_BYTES", 100)
    with pytest.raises(ModelSignatureError, match="more than 100 bytes"):
        read_bundle(data, keys)


def forged(count: int, seed: int) -> tuple[int, int]:
    """How many of so many random changes of the recorded bundle were refused, and how many of the others, which change
    what is not signed, say the same of the same signer. Half of the changes are within the signed statement."""
    chance, data, keys = random.Random(seed), (RECORDED / SIGNATURE).read_bytes(), [public_key_of(SIGNER)]
    whole, refused, same = read_bundle(data, keys), 0, 0
    envelope = json.loads(data)
    payload = base64.b64decode(envelope["dsseEnvelope"]["payload"])
    for number in range(count):
        if number % 2:
            envelope["dsseEnvelope"]["payload"] = base64.b64encode(mutated(payload, chance)).decode()
            tried = json.dumps(envelope).encode()
        else:
            tried = mutated(data, chance)
        try:
            same += read_bundle(tried, keys) == whole
        except ModelSignatureError:
            refused += 1
    return refused, same


def test_no_change_of_a_bundle_says_something_else() -> None:
    """2,000 random changes: refused, or the very same statement of the same key."""
    refused, same = forged(2_000, 1)
    assert refused + same == 2_000
    assert refused > 1_800


@pytest.mark.full
def test_no_change_of_a_hundred_thousand_says_something_else() -> None:
    """The same with 100,000 changes."""
    refused, same = forged(100_000, 2)
    assert refused + same == 100_000


def test_a_key_that_is_no_point_of_its_curve_signs_nothing(folder: Path) -> None:
    """The configuration looks at a key's form alone; what has the form and is none is told where it is used."""
    wrong = "".join(SIGNER.splitlines()[1:-1])[:-8] + "AAAAAA=="
    with pytest.raises(ModelSignatureError, match="a key that must sign is none: not a public key"):
        check(folder, wrong)


@pytest.mark.parametrize("kind", KEYS)
def test_the_configuration_takes_each_kind_of_key(kind: str) -> None:
    """As PEM and in one line, and gives the line; a private key, another curve and half a key are refused."""
    text = pem(KEYS[kind]())
    line = public_key_of(text).line
    reader = TypeAdapter(ModelKey)
    assert (reader.validate_python(text), reader.validate_python(line)) == (line, line)
    for wrong in (line[:-4], "", "x", pem(ec.derive_private_key(7, ec.SECP256K1()))):
        with pytest.raises(ValueError, match="not a public key"):
            reader.validate_python(wrong)


RSA = rsa.generate_private_key(65_537, 2_048).public_key()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ab" * 32,
        "AAAA",
        "-----BEGIN PRIVATE KEY-----",
        SIGNER.replace("M", "N", 1),
        SIGNER + SIGNER,
        "A" * (MAX_KEY_CHARS + 1),
        RSA.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
        pem(ec.derive_private_key(7, ec.SECP256K1())),
    ],
    ids=["empty", "hexadecimal", "short", "private", "damaged", "two", "long", "rsa", "curve"],
)
def test_other_keys_are_refused(text: str) -> None:
    """No key, a damaged one, two, another curve, another method; one of P-256 is read (control)."""
    assert len(public_key_of(SIGNER).line) == 124
    with pytest.raises(PublicKeyError, match="public key"):
        public_key_of(text)
