"""Names that host and guest share when weights leave a template for a file (``isolation.ipc.weights_file``)."""

TARGET = "/prepared"
"""Where the file is mounted."""

SOCKET_NAME = "weights.sock"
"""Socket of the host, in the template's socket directory."""

FILE_NAME = "weights"
"""The file's name in a checkpoint's folder."""

WRITTEN = b"\1"
"""The host's answer: all bytes are in the file."""
