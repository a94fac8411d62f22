"""Endpoints and credentials of sources: a file of the operator's, a list of entries by the beginning of addresses.

    sources:
      - prefix: s3://models/
        endpoint: https://minio.example.net
        access_key_id: athanor
        secret_access_key: ...
      - prefix: hf://
        token: ...

Nothing of it is ever logged, shown, or sent anywhere but to the source itself. A source without an entry is asked with
what the environment has, in the variables that the providers' own tools read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from appliance.common.errors import ModelSourceError, os_errors_as
from appliance.fetch.address import Address
from policy.errors import PolicyError
from policy.positions import load_yaml

MAX_BYTES = 64 << 10
"""Most bytes of the file: 64 entries with long keys."""

ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HF_TOKEN", "HF_ENDPOINT", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")
"""Beginnings of the environment variables that a downloader gets from the command that starts it."""

FIELDS = {
    "s3": frozenset({"region", "access_key_id", "secret_access_key", "session_token", "anonymous"}),
    "gs": frozenset({"service_account", "anonymous"}),
    "az": frozenset({"account_name", "account_key", "anonymous"}),
    "https": frozenset({"token"}),
    "http": frozenset({"token"}),
    "hf": frozenset({"token"}),
}
"""What an entry may have beside prefix, endpoint and plain_http, by the scheme of its prefix."""


class SourceAccess(BaseModel):
    """Endpoint and credentials of the sources whose addresses begin with ``prefix``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prefix: str
    endpoint: str = ""
    """Address of the service, where it is not the provider's own: https://HOST:PORT."""
    plain_http: bool = False
    """Whether the endpoint may be http:// on another machine: bytes and credentials cross the network readable."""
    anonymous: bool = False
    """Whether requests are sent without credentials."""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: SecretStr = SecretStr("")
    session_token: SecretStr = SecretStr("")
    account_name: str = ""
    account_key: SecretStr = SecretStr("")
    service_account: Path | None = Field(default=None, strict=False)
    """File with the key of a service account of Google's."""
    token: SecretStr = SecretStr("")

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        scheme = self.prefix.partition("://")[0]
        if scheme not in FIELDS:
            raise ValueError(f"prefix begins with one of {', '.join(f'{one}://' for one in FIELDS)}")
        odd = self.model_fields_set - FIELDS[scheme] - {"prefix", "endpoint", "plain_http"}
        if odd:
            raise ValueError(f"{scheme}:// has no {', '.join(sorted(odd))}")
        return self


class _SourcesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sources: tuple[SourceAccess, ...] = Field(max_length=64, strict=False)


def read_access(path: Path | None) -> tuple[SourceAccess, ...]:
    """Read the file.

    Raises:
        ModelSourceError: it is malformed, or open to other users. The message shows no value of it.
        ConfigError: it cannot be read.
    """
    if path is None:
        return ()
    with os_errors_as(f"cannot read {path}"):
        mode, data = path.stat().st_mode, path.read_bytes()
    if mode & 0o007:
        raise ModelSourceError(f"{path} is open to every user of this machine; close it with: chmod o= '{path}'")
    try:
        if len(data) > MAX_BYTES:
            raise ValueError
        values, _ = load_yaml(data.decode(), str(path))
    except (ValueError, PolicyError) as error:
        raise ModelSourceError(
            f"{path} is not YAML of at most {MAX_BYTES} bytes; docs/model-cache.md has an example"
        ) from error
    try:
        return _SourcesFile.model_validate(values).sources
    except ValidationError as error:
        # Only where and what kind: an input's value may be a credential.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelSourceError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def access_for(address: Address, entries: tuple[SourceAccess, ...]) -> SourceAccess:
    """The entry with the longest prefix of an address; an empty one where there is none."""
    fitting = [one for one in entries if f"{address.text}/".startswith(one.prefix)]
    return max(fitting, key=lambda one: len(one.prefix), default=SourceAccess(prefix=f"{address.scheme}://"))
