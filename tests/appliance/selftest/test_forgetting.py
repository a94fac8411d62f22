"""G9 as a customer runs it: canaries in a real appliance, sealed objects, and the scanner itself."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.selftest import g9_forgetting
from appliance.selftest.canary import (
    NOTHING,
    Hits,
    Wanted,
    draw,
    scan_folder,
    scan_memory,
    scan_nameless_files,
    used_ranges,
)
from appliance.selftest.g9_forgetting import memory_rows
from appliance.selftest.g9_sealed import sealed_rows
from appliance.selftest.result import Result


def told(rows: list[Result]) -> dict[str, str]:
    """Verdicts by id; figures show when a test fails."""
    for row in rows:
        print(row)
    return {row.id: row.verdict for row in rows}


def test_sealed_objects_are_rejected_and_forgotten() -> None:
    """Every flipped, cut, moved and replayed object is refused and nothing opens after a shred; controls open."""
    verdicts = told(sealed_rows(20))
    assert set(verdicts) == {"G9.blobs", "G9.blobs.control", "G9.shred", "G9.shred.control"}
    assert set(verdicts.values()) == {"pass"}


def test_ids_are_found_once_wherever_they_lie_among_zeros() -> None:
    """Ranges of zeros are left out of the search for ids, which are mostly zeros themselves: at every border of such a
    range they are found, once, as they are in a memory that has no zeros. Control: without them nothing is."""
    wanted = replace(draw(1), ids=(7, 256, 0, 65_536, 1, 2, 3, 1 << 20))
    step, needles = len(NOTHING), wanted.id_needles()
    for fill in (b"\0", b"x"):
        for needle in needles:
            for at in (0, step - len(needle), step - 4, step - 1, step, 2 * step - 8, 4 * step - len(needle)):
                memory = bytearray(fill * (4 * step))
                memory[at : at + len(needle)] = needle
                assert found_ids(bytes(memory), wanted) == 1, (fill, len(needle), at)
        assert found_ids(fill * (4 * step), wanted) == 0
    assert list(used_ranges(bytes(3 * step))) == []
    assert list(used_ranges(bytes(step) + b"x" + bytes(step))) == [(step, 2 * step + 1)]


def found_ids(memory: bytes, wanted: Wanted) -> int:
    """How often the ids are found in a nameless file."""
    fd, ids = os.memfd_create("probe"), Hits()
    try:
        os.write(fd, memory)
        scan_nameless_files(os.getpid(), wanted, Hits(), ids, set())
    finally:
        os.close(fd)
    return ids.total


REQUESTS = 2
"""Requests with a grammar of thousands of characters, and as many with a long prompt, before the search of `make test`:
each has its own canaries, and one that stayed would be found."""


@pytest.mark.runsc
@pytest.mark.timeout(300)
def test_no_canary_is_left(runsc_path: Path, demos_section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds after the last answer, and after the last deletion, no canary is found anywhere, and the scanner
    finds those that may stay or that are not deleted yet. The sandboxes begin with the demos' base, as those of every
    appliance do after its first start."""
    base = {name: value for name, value in demos_section.items() if name == "checkpoints"}
    monkeypatch.setattr(g9_forgetting, "REQUESTS", REQUESTS)
    verdicts = told(memory_rows(full=False, sandbox=base))
    if os.geteuid() == 0:
        both = {f"G9.{what}{end}" for what in ("canaries", "ids", "deleted") for end in ("", ".control")}
        assert set(verdicts) == {*both, "G9.cores"}
        assert set(verdicts.values()) == {"pass"}


@pytest.mark.runsc
@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_canary_is_left_in_full(runsc_path: Path) -> None:
    """The same with more requests, and every form of a canary."""
    verdicts = told([*memory_rows(full=True), *sealed_rows(500)])
    assert set(verdicts.values()) == {"pass"}


def test_the_scanner_finds_what_is_there(tmp_path: Path) -> None:
    """Positive control: a canary in our own memory, in a nameless file, in a mapped and in a plain one, in any form;
    none once they are gone."""
    wanted = draw(2)
    ids = Hits()
    wide = wanted.canaries[0].encode("utf-32-le")
    (tmp_path / "log").write_bytes(b"x" * 100 + wanted.canaries[1].encode("utf-16-le"))
    fd = os.memfd_create("probe")
    try:
        os.write(fd, bytes(1 << 20) + wanted.canaries[0].encode())
        found = [Hits(), Hits(), Hits()]
        scan_nameless_files(os.getpid(), wanted, found[1], ids, set())
        scan_folder(tmp_path, wanted, found[2])
        if os.geteuid() == 0 or os.access("/proc/self/mem", os.R_OK):
            with (tmp_path / "log").open("rb") as log:
                maps = [mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) for _ in range(2)]
            scan_memory(os.getpid(), wanted, found[0], ids)
            of_file = [count for place, count in found[0].places.items() if place.endswith(str(tmp_path / "log"))]
            assert found[0].total > sum(of_file)
            assert of_file == [1], "both mappings are the file's pages"
            for one in maps:
                one.close()
        assert (found[1].total > 0, found[2].total) == (True, 1)
        assert len(wide) == 4 * len(wanted.canaries[0])
    finally:
        os.close(fd)
    (tmp_path / "log").unlink()
    gone = Hits()
    scan_folder(tmp_path, wanted, gone)
    scan_nameless_files(os.getpid(), wanted, gone, ids, set())
    assert gone.total == 0
