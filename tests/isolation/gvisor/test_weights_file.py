"""Weights that leave a template for a file: who may write it, how much, where, and what a copy reads."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.sandbox.attach import send_weights
from engine.sandbox.weights_mapping import file_places, whole_pages
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import Mount
from isolation.host.locked_file import LockedFile
from isolation.ipc.weights_file import WeightsFile
from isolation.ipc.weights_names import FILE_NAME, HUGE_BYTES, SOCKET_NAME, TARGET

MIB = 1 << 20

GUEST = f"""
import ctypes, mmap, os, socket, time
size = 8 << 20
room = mmap.mmap(-1, size)
room.write(bytes(range(256)) * (size >> 8))
at = ctypes.addressof(ctypes.c_char.from_buffer(room))
host = socket.socket(socket.AF_UNIX)
host.connect("/ipc/{SOCKET_NAME}")
host.sendall(memoryview(room))
host.shutdown(socket.SHUT_WR)
assert host.recv(1) == bytes([1])
host.close()
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t) + (ctypes.c_int,) * 3 + (ctypes.c_long,)
file = os.open("{TARGET}", os.O_RDONLY)
assert libc.mmap(at, size, 3, 2 | 16, file, 0) == at
os.close(file)
print("waits", flush=True)
while not os.path.exists("/ipc/go"):
    time.sleep(0.01)
try:
    os.open("{TARGET}", os.O_RDWR)
    writes = "ok"
except OSError as error:
    writes = error.strerror
print("found", room[:size] == bytes(range(256)) * (size >> 8), room[:4] == b"host", writes, flush=True)
"""
"""Sends 8 MiB, maps the file over them; as a copy it says whether they are there, and whether it may write them."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ath-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(("mib", "peer", "kept"), [(3, True, True), (5, True, False), (3, False, False)], ids=str)
def test_only_the_template_fills_the_file_and_no_more_than_it_may(
    folder: Path, mib: int, peer: bool, kept: bool
) -> None:
    """Three of at most four MiB are written and told; five are refused, and so is a process that is not the template:
    the file then is empty, and the sender keeps its memory."""
    data = os.urandom(mib * MIB)
    with WeightsFile(folder / "w", folder / SOCKET_NAME, 4 * MIB) as file:
        file.serve({os.getpid() if peer else 1})
        told: list[bool] = []
        sender = threading.Thread(
            target=lambda: told.append(send_weights(str(folder / SOCKET_NAME), [memoryview(data)]))
        )
        sender.start()
        sender.join(5.0 if peer else 0.5)
    sender.join(5.0)
    assert told == [kept]
    assert (folder / "w").read_bytes() == (data if kept else b"")
    assert (folder / "w").stat().st_mode & 0o777 == 0o444


def test_a_disk_that_takes_a_part_of_the_weights_gets_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that is cut in the last page is no weights: the sender keeps its memory, the file is empty, and the log
    says why. Control: with that page they are written."""
    data, limits = os.urandom(3 * MIB), resource.getrlimit(resource.RLIMIT_FSIZE)
    for place, (room, kept) in enumerate(((3 * MIB - 4096, b""), (3 * MIB, data))):
        path, name = folder / f"w{place}", str(folder / f"s{place}")
        with WeightsFile(path, Path(name), 4 * MIB) as file:
            file.serve({os.getpid()})
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            try:
                assert send_weights(name, [memoryview(data)]) == bool(kept)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == kept
        assert caplog.text.count("stay in its image") == 1


def test_a_file_that_cannot_be_made_leaves_no_descriptor(folder: Path) -> None:
    """Neither its own nor its socket's, where a supervisor that was killed has left something in its place."""
    (folder / SOCKET_NAME).touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="in use"):
        WeightsFile(folder / "w", folder / SOCKET_NAME, MIB)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_host_weights_stay(folder: Path) -> None:
    """An engine that was loaded ahead where no host takes weights is told so at once."""
    assert not send_weights(str(folder / SOCKET_NAME), [memoryview(b"x")])


def test_whole_pages_are_inside_of_large_tensors_and_named_once() -> None:
    """Pages that a tensor shares with something else stay where they are; small tensors stay whole; a tensor that is
    there twice moves once."""
    large, small = torch.zeros(3 * MIB + 100, dtype=torch.uint8), torch.zeros(100)
    found = whole_pages([large[1:], small, large[1:], large[MIB:]])
    assert all(begin % 4096 == end % 4096 == 0 for begin, end in found)
    assert len({page for begin, end in found for page in range(begin, end, 4096)}) * 4096 == sum(
        e - b for b, e in found
    )
    assert large.data_ptr() <= found[0][0] and found[-1][1] <= large.data_ptr() + large.nbytes
    assert sum(end - begin for begin, end in found) > 3 * MIB - 2 * 4096


def test_the_host_writes_whole_huge_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pieces are that come, each write has a whole huge page at its place, and the last one the rest:
    so file systems that can keep huge pages in the page cache."""
    data, writes, write = os.urandom(2 * HUGE_BYTES + 5_000), list[tuple[int, int]](), os.pwrite

    def noted(file: int, piece: memoryview, at: int) -> int:
        writes.append((at, len(piece)))
        return write(file, piece, at)

    monkeypatch.setattr(os, "pwrite", noted)
    with WeightsFile(folder / "w", folder / SOCKET_NAME, 3 * HUGE_BYTES) as file:
        file.serve({os.getpid()})
        pieces = [memoryview(data)[at : at + 70_001] for at in range(0, len(data), 70_001)]
        assert send_weights(str(folder / SOCKET_NAME), pieces)
    assert writes == [(0, HUGE_BYTES), (HUGE_BYTES, HUGE_BYTES), (2 * HUGE_BYTES, 5_000)]
    assert (folder / "w").read_bytes() == data


def test_pages_stand_in_the_file_where_their_addresses_say() -> None:
    """A span with a whole huge page stands at its address within huge pages, one without follows what is before it, and
    none overlap; nothing is wasted between spans that are neighbours in memory but for the page between them."""
    page, base = 4_096, 7 * HUGE_BYTES + 5 * 4_096
    spans = [
        (base, base + 3 * HUGE_BYTES),
        (base + 3 * HUGE_BYTES + page, base + 6 * HUGE_BYTES),
        (base + 8 * HUGE_BYTES, base + 8 * HUGE_BYTES + MIB),
        (base + 9 * HUGE_BYTES + page, base + 11 * HUGE_BYTES),
    ]
    places = file_places(spans)
    assert [(start, end) for start, end, _at in places] == spans
    assert all((start - at) % HUGE_BYTES == 0 for start, end, at in places if end - start > MIB)
    ends = [0, *(at + end - start for start, end, at in places)]
    gaps = [at - end for end, (_start, _end, at) in zip(ends, places, strict=False)]
    assert gaps[:3] == [5 * page, page, 0] and 0 <= gaps[3] < HUGE_BYTES
    assert file_places([(base, base + MIB)]) == [(base, base + MIB, 0)]


def test_a_locked_file_is_in_memory_until_it_is_closed(folder: Path) -> None:
    """The kernel counts its pages as locked, and no longer once it is closed."""

    def locked() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmLck" in line
        )

    (folder / "w").write_bytes(bytes(4 * MIB))
    before, file = locked(), LockedFile(folder / "w")
    assert locked() - before == 4_096
    file.close()
    file.close()
    assert locked() == before
    (folder / "empty").touch()
    with pytest.raises(OSError, match="empty"):
        LockedFile(folder / "empty")


@pytest.mark.runsc
def test_a_copy_maps_what_its_template_has_sent(runtime, make_spec, folder: Path) -> None:
    """Under a real gVisor the image has none of the bytes and the copy reads them from the file, which it cannot write;
    a byte that is changed in the file shows in the next copy, so they do come from there."""
    for name in ("ipc", "met", "image"):
        (folder / name).mkdir(mode=0o755)
    (folder / "met" / "go").write_text("")
    image = folder / "image"
    mounts = [Mount(folder / "ipc", "/ipc"), Mount(image / FILE_NAME, TARGET)]
    with WeightsFile(image / FILE_NAME, folder / "ipc" / SOCKET_NAME, 64 * MIB) as file:
        spec = make_spec("template", GUEST, mounts=mounts)
        save_template(runtime, spec, image, waits_line="waits", timeout_s=30.0, weights=file)
        assert file.filled
    assert (image / FILE_NAME).stat().st_size == 8 * MIB
    told = []
    for name in ("first", "second"):
        lines: list[str] = []
        copy = replace(spec, name=name, mounts=(Mount(folder / "met", "/ipc"), spec.mounts[1]))
        sandbox = runtime.boot(copy, lines.append, image)
        try:
            assert sandbox.wait(30.0) == 0, sandbox.output_tail()
            told.append([line for line in sandbox.output_tail() if line.startswith("found")])
        finally:
            sandbox.delete()
        with (image / FILE_NAME).open("r+b") as changed:
            changed.write(b"host")
    assert told[0] == ["found True False Permission denied"], told
    assert told[1] == ["found False True Permission denied"], told


KEEPS = """
import os, socket, time
room = bytearray(bytes(range(256)) * (8 << 12))
if SENDS:
    with socket.socket(socket.AF_UNIX) as host:
        host.connect("/ipc/SOCKET")
        try:
            host.sendall(room)
            host.shutdown(socket.SHUT_WR)
            told = host.recv(1)
        except OSError:
            told = b""
    assert told == b""
print("waits", flush=True)
while not os.path.exists("/ipc/go"):
    time.sleep(0.01)
print("found", room == bytes(range(256)) * (8 << 12), os.stat("TARGET").st_size, flush=True)
"""
"""Has 8 MiB in its memory, which it sends or does not; as a copy it says whether they are there."""


@pytest.mark.runsc
@pytest.mark.parametrize("sends", [False, True], ids=["nothing", "too much"])
def test_a_copy_has_its_weights_where_the_file_has_none(runtime, make_spec, folder: Path, sends: bool) -> None:
    """Under a real gVisor a template that sends nothing, as that of an engine without compiled kernels, and one that is
    refused are saved with their memory: their copies come up, with an empty file."""
    for name in ("ipc", "met", "image"):
        (folder / name).mkdir(mode=0o755)
    (folder / "met" / "go").write_text("")
    code = KEEPS.replace("SENDS", str(sends)).replace("SOCKET", SOCKET_NAME).replace("TARGET", TARGET)
    image = folder / "image"
    mounts = [Mount(folder / "ipc", "/ipc"), Mount(image / FILE_NAME, TARGET)]
    with WeightsFile(image / FILE_NAME, folder / "ipc" / SOCKET_NAME, 4 * MIB) as file:
        spec = make_spec("template", code, mounts=mounts)
        save_template(runtime, spec, image, waits_line="waits", timeout_s=30.0, weights=file)
        assert not file.filled
    assert (image / FILE_NAME).stat().st_size == 0
    lines: list[str] = []
    copy = replace(spec, name="copy", mounts=(Mount(folder / "met", "/ipc"), spec.mounts[1]))
    sandbox = runtime.boot(copy, lines.append, image)
    try:
        assert sandbox.wait(30.0) == 0, sandbox.output_tail()
        assert any(line.startswith("found True") for line in sandbox.output_tail()), sandbox.output_tail()
    finally:
        sandbox.delete()
