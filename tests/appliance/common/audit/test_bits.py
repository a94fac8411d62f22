"""What a lenient reader would pass over is a change like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.verify import verify
from appliance.selftest.g10_account import write_log


def spare_bits(path: Path) -> None:
    """The last digit of a root has two bits that no byte takes: 44 digits, the last an equals sign."""
    note = path.with_suffix(files.CHECKPOINT_SUFFIX)
    lines = note.read_text().split("\n")
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    signed = lines[4]
    at = len(signed.rstrip("=")) - 1
    lines[4] = signed[:at] + digits[digits.index(signed[at]) ^ 1] + signed[at + 1 :]
    note.write_text("\n".join(lines))


def another_tree(path: Path) -> None:
    """A digit of a subtree in the header."""
    head, rest = path.read_text().split("\n", 1)
    at = head.index('"peaks":["') + len('"peaks":["')
    digit = "0" if head[at] != "0" else "1"
    path.write_text(f"{head[:at]}{digit}{head[at + 1 :]}\n{rest}")


def capitals(path: Path) -> None:
    """The same subtrees with capital digits."""
    head, rest = path.read_text().split("\n", 1)
    before, mark, peaks = head.partition('"peaks":')
    path.write_text(f"{before}{mark}{peaks.upper()}\n{rest}")


def spaces(path: Path) -> None:
    """The same header with a space in it."""
    head, rest = path.read_text().split("\n", 1)
    path.write_text(f"{head.replace(':', ': ', 1)}\n{rest}")


@pytest.mark.parametrize("change", [spare_bits, another_tree, capitals, spaces])
def test_it_is_not_passed_over(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A later segment so changed does not verify; control: untouched it does."""
    verifier, notes = write_log(tmp_path / "log")
    assert verify(tmp_path / "log", verifier, [notes[-1]]).sound
    change(files.segment_paths(tmp_path / "log")[1])
    assert not verify(tmp_path / "log", verifier, [notes[-1]]).sound
