"""Writes docs/reference/ and the gateway's OpenAPI document from the code: ``python -m appliance.operator.reference
[DIR]``; with a folder, the pages alone. A tool of development."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.gateway.http.app import DOCUMENT
from appliance.operator.reference import cli, configuration, grpc, http, metrics, policy
from appliance.operator.reference.openapi import document

PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration.render,
    "policy.md": policy.render,
    "http.md": http.render,
    "grpc.md": grpc.render,
    "metrics.md": metrics.render,
    "cli.md": cli.render,
}
"""File name to what writes its text."""

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"


def main(folder: Path = FOLDER) -> None:
    """Write every page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    if not sys.argv[1:]:
        DOCUMENT.write_text(document.render())
