"""Dates of X.509 certificates."""

from __future__ import annotations

from cryptography import x509

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


def validity(pem: bytes) -> tuple[float, float]:
    """Unix times between which the first certificate of a PEM text is valid; other text around it is skipped.

    Raises:
        ValueError: there is none, or it is malformed.
    """
    _, begin, rest = pem.partition(_BEGIN)
    body, end, _ = rest.partition(_END)
    if not begin or not end:
        raise ValueError("no certificate in PEM form")
    try:
        found = x509.load_pem_x509_certificate(begin + body + end)
        return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    except ValueError as error:
        raise ValueError("the certificate is damaged: not an X.509 certificate in DER") from error
