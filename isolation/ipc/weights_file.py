"""Weights that leave a template for a file, which its copies have mapped in place of memory.

The host makes an empty file of a fixed size beside the checkpoint and mounts it read-only into the template; no sandbox
ever has it writable. The template sends the bytes over one connection, the host writes them, says so, and the template
maps the file over the very addresses where its weights were. gVisor saves no page of such a mapping, and a restore
copies none: pages come from the host's page cache. The host does not interpret the bytes; they are the checkpoint's, as
its image is: made by a sandbox that has served nobody, with a digest in the account.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from isolation.ipc.listener import is_admissible
from isolation.ipc.weights_names import WRITTEN

_PIECE_BYTES = 1 << 20
_FILE_MODE = 0o444
_SOCKET_MODE = 0o666
"""The guest's uid is none of the host's; the kernel's word on the peer decides."""
_LOOK_S = 0.25
"""Seconds between two looks whether the template is still wanted."""


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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        os.fchmod(self._fd, _FILE_MODE)
        os.ftruncate(self._fd, most)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(socket_path))
        os.chmod(socket_path, _SOCKET_MODE)
        self._socket.settimeout(_LOOK_S)
        self._socket.listen(1)

    def serve(self, peers: Collection[int]) -> None:
        """Take the bytes of the first connection of one of these processes, in a thread."""
        self._peers = peers
        self._thread = threading.Thread(target=self._run, name="weights file", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # Also the time-out.
                continue
            with connection:
                if is_admissible(connection, self._peers):
                    self._take(connection)
                    return

    def _take(self, connection: socket.socket) -> None:
        """Write what comes, at most the file's size; without the answer the guest keeps its memory."""
        connection.settimeout(_LOOK_S)
        room, at = bytearray(_PIECE_BYTES), 0
        while not self._stop.is_set():
            try:
                count = connection.recv_into(room)
            except TimeoutError:
                continue
            except OSError:
                return
            if count == 0:
                # A restore maps what was mapped, and no byte behind it.
                os.ftruncate(self._fd, at)
                self.filled = at > 0
                connection.sendall(WRITTEN)
                return
            if at + count > self._most:
                return
            os.pwrite(self._fd, memoryview(room)[:count], at)
            at += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        os.close(self._fd)
        if kind is None and not self.filled:
            # The mount is part of the image, so a copy needs a file: an empty one.
            os.truncate(self.path, 0)
