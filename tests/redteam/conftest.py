"""Real sandboxes for the red team."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from appliance.selftest import intruder
from isolation.gvisor.gvisor_runtime import GvisorRuntime


@pytest.fixture(scope="module")
def gvisor(runsc_path: object) -> Iterator[GvisorRuntime]:
    """Real sandboxes, or a skip with the reason."""
    try:
        with intruder.gvisor() as runtime:
            yield runtime
    except intruder.CannotBeShownError as error:
        pytest.skip(str(error))
