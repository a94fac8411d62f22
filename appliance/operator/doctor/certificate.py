"""What is to be told of the TLS files: when the certificate ends, and whether the key belongs to it."""

from __future__ import annotations

import ssl
from pathlib import Path

from appliance.common.certificate_dates import read_validity
from appliance.common.errors import reason_of
from appliance.operator.doctor.facts import Certificate


def read_certificate(path: Path, key: Path, authority: Path | None) -> Certificate:
    """Facts about the TLS files; problems are part of the result."""
    try:
        begins, ends = read_validity(path)
    except OSError as error:
        return Certificate(path=str(path), problem=f"cannot read {path}: {reason_of(error)}")
    except ValueError as error:
        return Certificate(path=str(path), problem=f"{path}: {error}")
    return Certificate(
        path=str(path),
        not_before=begins,
        not_after=ends,
        key_problem=_key_problem(path, key),
        authority_problem="" if authority is None else _authority_problem(authority),
    )


def _key_problem(path: Path, key: Path) -> str:
    try:
        # A key with a password would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"{key} is not the key of {path}"
        return f"{key} cannot be used with {path}: {(error.reason or 'unreadable').lower().replace('_', ' ')}"
    except OSError as error:
        return f"cannot read {key}: {reason_of(error)}"
    return ""


def _authority_problem(path: Path) -> str:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        return f"{path} holds no certificate of an authority"
    except OSError as error:
        return f"cannot read {path}: {reason_of(error)}"
    return ""
