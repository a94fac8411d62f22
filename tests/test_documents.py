"""The documents name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "SECURITY.md", "docs/sampling.md")
PLACES = ("", "appliance/", "engine/", "isolation/", "isolation/ipc/",
          "appliance/api/", "tests/appliance/gateway/", "tests/appliance/api/")
"""Where a path in a document may begin."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_a_document_exists(root: Path, name: str) -> None:
    """What looks like a file or folder of ours is one."""
    text = (root / name).read_text()
    words = re.findall(r"[`(]([a-zA-Z_][\w./-]*(?:\.py|\.md|\.yaml|/))[`)]", text)
    assert words
    made = ("policy.yaml", ".athanor/")
    missing = [
        word for word in words if word not in made and not any((root / place / word).exists() for place in PLACES)
    ]
    assert missing == []


def test_make_targets_in_the_documents_exist(root: Path) -> None:
    """Every `make X` that a document names is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    pattern = re.compile(r"(?:`|^    )make ([a-z]+)", re.MULTILINE)
    named = {word for name in DOCUMENTS for word in pattern.findall((root / name).read_text())}
    assert {"run", "test"} <= named <= targets
