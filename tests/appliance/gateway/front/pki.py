"""Certificates for the mTLS tests."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from appliance.common.listen_config import TlsConfig


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass(frozen=True)
class Authority:
    """A certificate authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, name: str) -> Authority:
        """Self-signed."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        # What RFC 5280 asks of an authority, and Python 3.13 verifies by default: its key's use and identifier.
        others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
        use = dict.fromkeys(others.split(), False)
        builder = (
            _builder(subject, subject, key)
            .add_extension(x509.BasicConstraints(True, 0), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **use), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names: x509.GeneralName, days: int = 1) -> tuple[bytes, bytes]:
        """Key and certificate (PEM) of a leaf with these alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf")])
        builder = _builder(subject, self.certificate.subject, key, days).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        leaf = builder.sign(self.key, hashes.SHA256())
        return _pem(key), leaf.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


@dataclass(frozen=True)
class Pki:
    """An authority and the server's files."""

    authority: Authority
    files: TlsConfig

    @classmethod
    def create(cls, folder: Path) -> Pki:
        """Write the server's files into ``folder``."""
        authority = Authority.create("athanor test")
        key, certificate = authority.issue(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        files = TlsConfig(certificate=folder / "server.pem", key=folder / "server.key", client_ca=folder / "ca.pem")
        files.certificate.write_bytes(certificate)
        files.key.write_bytes(key)
        assert files.client_ca is not None
        files.client_ca.write_bytes(authority.pem)
        return cls(authority, files)
