"""Names of what lies in the run directory; read by both host processes."""

CONTROL_SOCKET = "control.sock"
"""The socket on which the supervisor waits for the gateway."""

OPERATOR_SOCKET = "operator.sock"
"""The socket on which it hears the operator's commands about tenants' keys; the gateway cannot open it."""
