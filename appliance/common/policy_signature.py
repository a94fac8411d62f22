"""Signatures of a policy: Ed25519 over the texts of all its files, in the file ``policy.yaml.sig`` beside it.

What is signed are the texts and not the policy's digest: that one differs between releases of the appliance, and a
signature must outlive an upgrade. Files are named by what they are to the policy (``policy``, ``policy.d/10-a.yaml``,
``public/help.txt``), so a policy may be signed under one path and used under another.

A signature does not grow old: a user who can write the files can put back an older policy that was signed as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath

from appliance.common.errors import ConfigError, os_errors_as, reason_of
from appliance.common.policy_history import relative
from appliance.common.signature_lines import MAX_BYTES, described, holding, read_lines, signed_by, write_lines
from isolation.host.atomic_file import write_whole
from isolation.keys.signing import SigningKey
from policy.files import drop_ins
from policy.loader import Source

DOMAIN = b"athanor policy signature 1\n"
"""Before what is signed: no signature of an image or of an audit log is one of a policy."""

ENDING = ".sig"
MODE = 0o644

FILE, FOLDER = "policy", "policy.d"
"""Names of a policy's file and of its folder of drop-ins in what is signed."""


def signature_file(policy: Path) -> Path:
    """Return the path of the signatures of a policy, which is a file or a folder."""
    return policy.with_name(policy.name + ENDING)


def signed_bytes(sources: Sequence[Source], policy: Path) -> bytes:
    """Return what is signed of a policy, as its sources were read from a path: a digest and a name for each file."""
    files, _ = relative(sources, policy)
    folder = drop_ins(policy).name
    lines = sorted((_name(name, policy.name, folder), text) for name, text in files.items())
    told = (f"{hashlib.sha256(text.encode()).hexdigest()} {name}\n" for name, text in lines)
    return DOMAIN + "".join(told).encode()


def sign_policy(sources: Sequence[Source], policy: Path, key: SigningKey) -> Path:
    """Add a signature beside a policy, in place of an older one of the same key, and drop those that hold no more;
    returns the path of the signatures.

    Raises:
        ConfigError: the file of signatures cannot be read or written, or has too many.
    """
    path, message = signature_file(policy), signed_bytes(sources, policy)
    known = _read(path)
    held = {public: known[public] for public in holding(known, message)}
    try:
        signatures = signed_by(key, message, held)
    except ValueError as error:
        raise ConfigError(f"{policy} cannot be signed: {error}") from error
    with os_errors_as(f"cannot write {path}"):
        write_whole(path, write_lines(signatures), MODE)
    return path


def signature_text(sources: Sequence[Source], policy: Path, key: SigningKey) -> str:
    """Return the text of the file of signatures of a policy that is signed by one key alone: one that is not written
    yet, so that no other signature can be of it."""
    return write_lines(signed_by(key, signed_bytes(sources, policy), {})).decode()


def policy_signers(sources: Sequence[Source], policy: Path) -> tuple[str, ...]:
    """Return the public keys, in hex, whose signatures beside a policy hold.

    Raises:
        ConfigError: the file of signatures cannot be read, or is malformed.
    """
    return holding(_read(signature_file(policy)), signed_bytes(sources, policy))


def check_signed(sources: Sequence[Source], policy: Path, keys: Collection[str]) -> None:
    """Demand a signature by one of the keys, where there are any.

    Raises:
        ConfigError: there is none, or the file of signatures cannot be used.
    """
    if not keys:
        return
    found = policy_signers(sources, policy)
    if not set(found) & set(keys):
        raise ConfigError(
            f"the policy {policy} is {described(found)} as it is now, and not by any key of policy_keys: "
            f"sign it with one of them: athanor policy sign {policy} --key FILE"
        )


def _name(name: str, file: str, folder: str) -> str:
    first, *rest = PurePosixPath(name).parts
    if not rest:
        return FILE if name == file else name
    return "/".join((FOLDER if first == folder else first, *rest))


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            return read_lines(file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no list of signatures; remove it, and sign the policy again") from error
