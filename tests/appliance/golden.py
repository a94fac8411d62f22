"""Texts that are compared whole with a file, because how they look is the point.

To renew one, delete its file and run the test: it writes the file and fails, so that the change is
looked at before it counts.
"""

from __future__ import annotations

from pathlib import Path


def check(file: Path, text: str) -> None:
    """Fail unless ``text``, without spaces at the ends of lines, is what ``file`` holds."""
    found = "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
        raise AssertionError(f"{file.name} was missing and is now written: look at it, run again")
    assert found == file.read_text(encoding="utf-8"), f"compare with {file.name}:\n{found}"
