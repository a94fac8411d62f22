"""The page's files: read once, served from memory, each with its digest as ETag."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "web"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is served; another file in the folder is not."""

INDEX = "index.html"

ETAG_CHARS = 32
"""Hex digits of SHA-256 in an ETag."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file; ``etag`` has its quotes."""

    content_type: str
    body: bytes
    etag: str


def read_assets(folder: Path = FOLDER) -> Mapping[str, Asset]:
    """All files by name; there are no folders in it.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        content_type = CONTENT_TYPES.get(path.suffix)
        if content_type is not None and path.is_file():
            body = path.read_bytes()
            found[path.name] = Asset(content_type, body, f'"{hashlib.sha256(body).hexdigest()[:ETAG_CHARS]}"')
    return found


def page_digest(assets: Mapping[str, Asset]) -> str:
    """One digest of all of them: the page's version."""
    return hashlib.sha256("".join(asset.etag for asset in assets.values()).encode()).hexdigest()[:ETAG_CHARS]
