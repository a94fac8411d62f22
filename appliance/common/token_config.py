"""Sections of the configuration about OIDC providers whose tokens are credentials: ``tokens``, those of tenants, and
what these have in common with those of operators (``operator_config``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from appliance.common.config_section import SECONDS, Section


class IssuerConfig(Section):
    """An OIDC provider: how its tokens (JWT) are told from others, and where its keys are."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Name of the issuer in credentials, oidc:NAME:VALUE. It is unique in the list."""
    issuer: str = Field(min_length=1, max_length=512)
    """Exact text of the claim iss."""
    audiences: tuple[Annotated[str, Field(min_length=1, max_length=512)], ...] = Field(
        min_length=1, max_length=16, strict=False
    )
    """Audiences; the claim aud must name one of them exactly."""
    keys_file: Path | None = Field(default=None, strict=False)
    """File of the issuer's public keys (a JWK set), which is read again when it changes."""
    keys_url: str = Field(default="", max_length=2_048)
    """https address of the issuer's public keys, in place of keys_file."""
    keys_ca: Path | None = Field(default=None, strict=False)
    """PEM file of the authorities that keys_url is verified with. Left out: those of the machine."""
    leeway_s: Annotated[int, Field(ge=0, le=300), SECONDS] = 30
    """How far the issuer's clock and this one may be apart."""
    max_age_s: Annotated[int, Field(ge=0, le=31_536_000), SECONDS] = 86_400
    """Longest time from now on for which a token may hold. 0: any."""
    refresh_s: Annotated[int, Field(ge=60, le=604_800), SECONDS] = 3_600
    """How often keys_url is fetched. A token with an unknown key has it fetched earlier, at most every 30 s."""

    @model_validator(mode="after")
    def _found(self) -> Self:
        if (self.keys_file is None) == (not self.keys_url):
            raise ValueError("an issuer has its keys in keys_file or at keys_url: one of the two")
        if self.keys_url:
            _check_https(self.keys_url)
        if self.keys_ca is not None and not self.keys_url:
            raise ValueError("keys_ca verifies keys_url, and there is none")
        return self


class TokenIssuerConfig(IssuerConfig):
    """OIDC providers whose tokens (JWT) are taken as credentials, a list with one entry for each."""

    tenant_claim: str = Field(default="sub", min_length=1, max_length=128)
    """Claim whose exact text is the VALUE of the policy's credential."""
    scope_claim: str = Field(default="", max_length=128)
    """Claim with the scopes that a token is limited to: a list, or words in one text. Words that are no scope here
    count nothing. Empty: a token may do what its tenant may."""


def check_issuers(issuers: Sequence[IssuerConfig]) -> None:
    """Check that no two issuers of a list have one name or one text.

    Raises:
        ValueError: two have.
    """
    for what, texts in (("name", [one.name for one in issuers]), ("issuer", [one.issuer for one in issuers])):
        if len(set(texts)) != len(texts):
            raise ValueError(f"two entries have one {what}")


def _check_https(url: str) -> None:
    """Check the address of an issuer's keys.

    Raises:
        ValueError: it is no https address.
    """
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError(f"{url!r} is no https address, such as https://login.example.com/keys")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} has characters that no address has")
    _ = parts.port  # raises ValueError where it is none
