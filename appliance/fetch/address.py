"""Addresses of sources, as an operator writes them. Pure.

/srv/models/llama  s3://BUCKET/PATH  gs://BUCKET/PATH  az://CONTAINER/PATH  https://HOST/PATH
hf://OWNER/MODEL  hf://OWNER/MODEL@REVISION
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from appliance.common.errors import ModelSourceError

FORMS = "a folder, s3://, gs://, az://, https:// or hf://OWNER/MODEL"

SCHEMES = ("s3", "gs", "az", "https", "http", "hf")

MAX_ADDRESS = 1_024
"""Most characters of an address."""

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")

_LABEL = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model is taken from."""

    text: str
    """The address as it is shown, without credentials."""
    scheme: str
    """One of ``SCHEMES``; ``file`` for a folder."""
    host: str = ""
    """Bucket, container, host with port, or OWNER/MODEL of a hub."""
    path: str = ""
    """Folder of the model below that, without slashes at its ends."""
    revision: str = ""
    """Revision at a hub."""

    @property
    def label(self) -> str:
        """A name for the model: the last part of the address."""
        last = (self.path or self.host).rstrip("/").rpartition("/")[2]
        return _LABEL.sub("-", last).strip("-._")[:128]


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        ModelSourceError: it is of no known form, or has credentials in it.
    """
    if len(text) > MAX_ADDRESS or not text.isprintable() or not text:
        raise ModelSourceError(f"an address of a source has 1 to {MAX_ADDRESS} printable characters: {FORMS}")
    if "://" not in text:
        folder = Path(text).absolute()
        return Address(str(folder), "file", path=str(folder))
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        raise ModelSourceError(f"there is no source {scheme}://; name {FORMS}")
    if scheme == "hf":
        return _hub(text)
    try:
        parts = urlsplit(text)
        host = parts.netloc
    except ValueError as error:
        raise ModelSourceError(f"the address {text[:80]} is malformed: {error}") from error
    if "@" in host or parts.query or parts.fragment:
        raise ModelSourceError(
            "an address of a source has no user, no ? and no #: addresses stand in notes and logs; put credentials "
            "into the file that model_cache.sources names"
        )
    path = parts.path.strip("/")
    if not host or (any(part in ("", ".", "..") for part in path.split("/")) and path):
        raise ModelSourceError(f"the address {text[:80]} names no folder; write it as {scheme}://HOST/PATH")
    return Address(f"{scheme}://{host}/{path}".rstrip("/"), scheme, host, path)


def without_credentials(text: str) -> str:
    """An address as it may be recorded, whether it is one or not: what it may have of credentials is left out."""
    try:
        return parse_address(text).text
    except ModelSourceError:
        return text.partition("://")[0][:16] if "://" in text else text[:MAX_ADDRESS]


def _hub(text: str) -> Address:
    name, at, revision = text.removeprefix("hf://").partition("@")
    if not _REPOSITORY.fullmatch(name) or (at and not _REVISION.fullmatch(revision)):
        raise ModelSourceError(f"{text[:80]} is no model of a hub; write it as hf://OWNER/MODEL@REVISION")
    return Address(text, "hf", host=name, revision=revision or "main")
