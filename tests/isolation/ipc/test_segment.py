"""The segment: seals that hold, layouts that are checked."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isolation.ipc import segment
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.segment import (
    MAX_ARENAS,
    MAX_LAYOUT_BYTES,
    MAX_SEGMENT_BYTES,
    PAGE_BYTES,
    Arena,
    Layout,
    standard_layout,
)

SMALL = Layout(1, (Arena("a", 0, PAGE_BYTES), Arena("b", 2 * PAGE_BYTES, PAGE_BYTES)))


@pytest.fixture
def sealed():
    """A sealed memfd of the small layout."""
    memfd = segment.create(SMALL)
    yield memfd
    os.close(memfd)


@pytest.fixture
def unsealed():
    """A memfd of the same size that may still be sealed, but is not."""
    memfd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, SMALL.size)
    yield memfd
    os.close(memfd)


@pytest.mark.parametrize("length", [0, SMALL.size - 1, SMALL.size + 1])
def test_a_sealed_memfd_keeps_its_size(sealed, unsealed, length):
    """Nobody can shrink or grow a segment; the control shows that an unsealed one gives way."""
    with pytest.raises(PermissionError):
        os.ftruncate(sealed, length)
    with pytest.raises(PermissionError):
        os.posix_fallocate(sealed, 0, SMALL.size + 1)
    assert os.fstat(sealed).st_size == SMALL.size
    os.ftruncate(unsealed, length)
    assert os.fstat(unsealed).st_size == length


def test_only_sealed_memory_of_the_right_size_is_mapped(sealed, unsealed, tmp_path):
    """The host maps no unsealed memfd, no plain file and no memfd smaller than its layout."""
    segment.map_segment(sealed, SMALL).close()
    with pytest.raises(RemoteProtocolError, match="unsealed"):
        segment.map_segment(unsealed, SMALL)
    larger = Layout(1, (Arena("a", 0, SMALL.size + PAGE_BYTES),))
    with pytest.raises(RemoteProtocolError, match="layout"):
        segment.map_segment(sealed, larger)
    with (tmp_path / "file").open("wb+") as file, pytest.raises(RemoteProtocolError, match="sealable"):
        segment.map_segment(file.fileno(), SMALL)


def test_arenas_are_parts_of_shared_memory(sealed):
    """Two mappings see the same bytes, an arena begins where the layout says, and a name that is
    not there is our own mistake."""
    first, second = segment.map_segment(sealed, SMALL), segment.map_segment(sealed, SMALL)
    with first.arena("b") as mine, second.arena("b") as its:
        assert mine.nbytes == PAGE_BYTES
        mine[:5] = b"hello"
        assert its[:5].tobytes() == b"hello"
    assert os.pread(sealed, 5, 2 * PAGE_BYTES) == b"hello"
    with pytest.raises(LocalProtocolError, match="no arena c"):
        first.arena("c")
    first.close()
    second.close()


def test_standard_layout():
    """Both rings come first, others behind them, lengths rounded up to pages."""
    layout = standard_layout(("kv", 1), ("masks", 3 * PAGE_BYTES))
    assert [arena.name for arena in layout.arenas] == [segment.HOST_TO_GUEST, segment.GUEST_TO_HOST, "kv", "masks"]
    assert [arena.length for arena in layout.arenas[2:]] == [PAGE_BYTES, 3 * PAGE_BYTES]
    assert layout.size == 2 * (segment.RING_BYTES + PAGE_BYTES) + 4 * PAGE_BYTES


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True), st.integers(1, 1 << 34)),
        max_size=MAX_ARENAS - 2,
        unique_by=lambda pair: pair[0],
    )
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_layout_round_trip(others):
    """A layout survives its encoding, within the stated size; cut anywhere it is refused."""
    layout = standard_layout(*others)
    data = layout.encode()
    assert len(data) <= MAX_LAYOUT_BYTES
    assert Layout.decode(data) == layout
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            Layout.decode(data[:end])
    with pytest.raises(RemoteProtocolError):
        Layout.decode(data + b"\0")


@pytest.mark.parametrize(
    "arenas",
    [
        (),
        (Arena("a", 0, 0),),
        (Arena("a", 0, PAGE_BYTES - 1),),
        (Arena("a", 1, PAGE_BYTES),),
        (Arena("a", -PAGE_BYTES, PAGE_BYTES),),
        (Arena("A", 0, PAGE_BYTES),),
        (Arena("a\n", 0, PAGE_BYTES),),
        (Arena("a" * 33, 0, PAGE_BYTES),),
        (Arena("a", 0, PAGE_BYTES), Arena("b", 0, PAGE_BYTES)),
        (Arena("a", 0, PAGE_BYTES), Arena("a", PAGE_BYTES, PAGE_BYTES)),
        (Arena("a", 0, MAX_SEGMENT_BYTES + PAGE_BYTES),),
        tuple(Arena(f"a{n}", n * PAGE_BYTES, PAGE_BYTES) for n in range(MAX_ARENAS + 1)),
    ],
)
def test_layouts_outside_the_bounds_are_refused(arenas):
    """Empty, unaligned, overlapping, ill-named, too many or too large: no such layout exists."""
    with pytest.raises(ValueError):
        Layout(1, arenas)


def test_changed_layouts_are_refused_or_whole():
    """5,000 random changes of an encoded layout give a valid layout or RemoteProtocolError."""
    rng = random.Random(4)
    data = standard_layout(("kv", 1 << 20)).encode()
    refused = 0
    for _ in range(5_000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            assert Layout.decode(bytes(changed)).encode() == changed
        except RemoteProtocolError:
            refused += 1
    assert refused > 1_000


def test_create_leaves_no_descriptor_behind_when_it_fails(monkeypatch):
    """A segment that cannot be sealed is closed again."""
    before = set(os.listdir("/proc/self/fd"))

    def refuse(*_arguments):
        raise OSError("no seals")

    monkeypatch.setattr(segment.fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="no seals"):
        segment.create(SMALL)
    assert set(os.listdir("/proc/self/fd")) == before
