"""Weights that leave a template for a file, which its copies have mapped in place of memory.

The host makes an empty file of a fixed size beside the checkpoint and mounts it read-only into the template; no sandbox
ever has it writable. The template sends the bytes over one connection, the host writes them, says so, and the template
maps the file over the very addresses where its weights were. gVisor saves no page of such a mapping, and a restore
copies none: pages come from the host's page cache. The host does not interpret the bytes; they are the checkpoint's, as
its image is: made by a sandbox that has served nobody, with a digest in the account.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from isolation.ipc.listener import is_admissible
from isolation.ipc.weights_names import HUGE_BYTES, WRITTEN

_log = logging.getLogger(__name__)

_FILE_MODE = 0o444
_SOCKET_MODE = 0o666
"""The guest's uid is none of the host's; the kernel's word on the peer decides."""
_LOOK_S = 0.25
"""Seconds between two looks whether the template is still wanted."""


def _bind(server: socket.socket, path: Path) -> None:
    """Bind at a path of any length: a socket's address has 107 bytes at the most, the folder's descriptor few."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    os.chmod(path, _SOCKET_MODE)


class WeightsFile:
    """The host's side for one template; a context manager, whose end closes the connection."""

    def __init__(self, path: Path, socket_path: Path, most: int) -> None:
        """Make the file, of ``most`` bytes without room on the disk, and listen. Raises: OSError: it cannot be made."""
        self.path = path
        self.filled = False
        """Whether the template's weights are in the file."""
        self._most = most
        self._stop = threading.Event()
        self._peers: Collection[int] = ()
        self._thread: threading.Thread | None = None
        with ExitStack() as undo:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
            undo.callback(os.close, self._fd)
            os.fchmod(self._fd, _FILE_MODE)
            os.ftruncate(self._fd, most)
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            _bind(self._socket, socket_path)
            self._socket.settimeout(_LOOK_S)
            self._socket.listen(1)
            undo.pop_all()

    def serve(self, peers: Collection[int]) -> None:
        """Take the bytes of the first connection of one of these processes, in a thread."""
        self._peers = peers
        self._thread = threading.Thread(target=self._run, name="weights file", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # The template waits for an answer: it must get one once there are descriptors.
                _log.warning("a template's weights cannot be taken yet: %s", error)
                self._stop.wait(_LOOK_S)
                continue
            with connection:
                if is_admissible(connection, self._peers):
                    try:
                        self._take(connection)
                    except OSError as error:
                        _log.warning("a template's weights stay in its image, which is larger: %s", error)
                        os.ftruncate(self._fd, 0)  # The image needs the room.
                    return

    def _take(self, connection: socket.socket) -> None:
        """Write what comes, in pieces of a huge page; without the answer the guest keeps its memory.

        Raises:
            OSError: the guest has left, sends more than the file may have, or the disk does not take it.
        """
        connection.settimeout(_LOOK_S)
        room, have, at = memoryview(bytearray(HUGE_BYTES)), 0, 0
        while not self._stop.is_set():
            try:
                count = connection.recv_into(room[have:])
            except TimeoutError:
                continue
            have += count
            if at + have > self._most:
                raise OSError(errno.EFBIG, f"they have more than {self._most} bytes")
            if have < HUGE_BYTES and count:
                continue
            self._write(room[:have], at)
            at, have = at + have, 0
            if count == 0:
                # A restore maps what was mapped, and no byte behind it.
                os.ftruncate(self._fd, at)
                self.filled = at > 0
                connection.sendall(WRITTEN)
                return

    def _write(self, piece: memoryview, at: int) -> None:
        """Write all of a piece. Raises: OSError: the disk does not take it."""
        while piece:  # A disk that is nearly full takes a part, and says so with the next call alone.
            written = os.pwrite(self._fd, piece, at)
            piece, at = piece[written:], at + written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        try:
            if kind is None and not self.filled:
                # The mount is part of the image, so a copy needs a file: an empty one.
                os.ftruncate(self._fd, 0)
        finally:
            os.close(self._fd)
