"""Processes of an appliance import the log library without the one that draws tables."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{first}
import structlog
print("rich" in sys.modules, "pygments" in sys.modules)
import rich.table
print(rich.table.Table.__name__, structlog.get_logger().info("x", a=1))
"""


@pytest.mark.parametrize(("ours", "drawn"), [(True, "False False"), (False, "True True")])
def test_rich_is_left_out_and_can_be_had_later(ours: bool, drawn: str) -> None:
    """Control: by itself structlog imports rich, and pygments with it."""
    first = "from appliance.common.log_import import import_structlog; import_structlog()" if ours else ""
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == drawn
    assert done.stdout.splitlines()[-1] == "Table None"


def test_a_supervisor_and_a_downloader_have_no_rich() -> None:
    """Nothing else that they import needs it."""
    program = (
        "import sys\nfrom appliance.common.log_import import import_structlog\nimport_structlog()\n"
        "import appliance.fetch.service, appliance.supervisor.service\nprint('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
