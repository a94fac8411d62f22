"""Names of what lies in the run directory; read by both host processes."""

CONTROL_SOCKET = "control.sock"
"""The socket on which the supervisor waits for the gateway."""
