"""Section ``external`` of a model: the endpoint of a cluster that computes it, outside of this appliance."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from appliance.common.config_section import SECONDS, Section, Unit

EXTERNAL = "external"
"""Runner of a model that an endpoint outside of the appliance computes."""


class ExternalConfig(Section):
    """Endpoint of a model that another cluster computes (docs/external-models.md)."""

    url: str = Field(min_length=1, max_length=2_048)
    """Address below which the endpoint has /completions, such as https://cluster.example.com/v1. http is taken for an
    address of this machine alone."""
    model: str = Field(min_length=1, max_length=512)
    """Name of the model there."""
    api_key_file: Path | None = Field(default=None, strict=False)
    """File with the key that the endpoint asks for, read for every request by the gateway's user. Left out: no key."""
    ca_file: Path | None = Field(default=None, strict=False)
    """PEM file of the authorities that the endpoint is verified with. Left out: those of the machine."""
    timeout_s: Annotated[float, Field(ge=0.1, le=600), SECONDS] = 60.0
    """Longest time without a token, from the request to the endpoint on; then the request fails."""
    max_concurrent: Annotated[int, Field(ge=1, le=512), Unit("outputs")] = 32
    """Most outputs that the endpoint computes at once; others wait here, tenant by tenant in turn."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        check_url(self.url)
        if self.ca_file is not None and urlsplit(self.url).scheme != "https":
            raise ValueError("ca_file verifies https, and the url is http")
        return self


def check_url(url: str) -> None:
    """Check the address of an endpoint.

    Raises:
        ValueError: it is no https address, and no http address of this machine.
    """
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} has characters that no address has")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username is not None:
        raise ValueError(f"{url!r} is no https address, such as https://cluster.example.com/v1")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} has a query or a fragment; give the address below which /completions is")
    _ = parts.port  # raises ValueError where it is none
    if parts.scheme == "http" and not _is_here(parts.hostname):
        raise ValueError(f"{url!r} is not encrypted and not on this machine; take https")


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
