"""Names that host and guest share when weights leave a template for a file (``isolation.ipc.weights_file``)."""

TARGET = "/prepared"
"""Where the file is mounted."""

SOCKET_NAME = "weights.sock"
"""Socket of the host, in the template's socket directory."""

FILE_NAME = "weights"
"""The file's name in a checkpoint's folder."""

WRITTEN = b"\1"
"""The host's answer: all bytes are in the file."""

HUGE_BYTES = 2 << 20
"""Bytes of a huge page. Written in pieces of this size, a file has huge pages in the page cache of file systems that
keep such (ext4 since Linux 6.16, XFS); 512 MiB are then mapped with 256 page faults in place of 8,192."""
