"""``athanor status``: sandboxes, tenants and policy of a running appliance."""

from __future__ import annotations

from appliance.cli.admin_client import ask
from appliance.cli.options import FIND, Admin, Output
from appliance.cli.terminal import Format, output, print_data

EXAMPLES = """
athanor status | the appliance on this machine
athanor status --admin unix:/run/athanor/admin.sock | over its socket
athanor status -o json | for scripts
"""


def status(admin: Admin = FIND, output_format: Output = Format.TABLE) -> None:
    """Show sandboxes, tenants and policy."""
    import time

    from appliance.cli.read import read
    from appliance.cli.status_view import status_view
    from appliance.status import ApplianceStatus

    answer = ask(admin, "/status")
    found = read(ApplianceStatus, answer)
    if output_format is not Format.TABLE:
        print_data(answer.body, output_format)
        return
    output().print(status_view(found, time.time()))
