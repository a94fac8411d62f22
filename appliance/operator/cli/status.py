"""``athanor status``: sandboxes, tenants and policy of a running appliance."""

from __future__ import annotations

from appliance.operator.cli.admin_client import ask, read
from appliance.operator.cli.options import FIND, Admin, Output
from appliance.operator.cli.terminal import Format, output, print_data

EXAMPLES = """
athanor status | the appliance on this machine
athanor status --admin unix:/run/athanor/admin.sock | over its socket
athanor status -o json | for scripts
"""


def status(admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Show sandboxes, tenants and policy."""
    import time

    from appliance.common.status import ApplianceStatus
    from appliance.operator.cli.status_view import status_view

    answer = ask(admin, "/status")
    found = read(ApplianceStatus, answer)
    if not print_data(answer.body, output_format):
        console = output()
        console.print(status_view(found, time.time(), console.width))
