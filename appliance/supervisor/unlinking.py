"""What comes before a tenant's pseudonyms lead to it no more: all that the log will ever say under them is in it.

An id that stands in the log under a destroyed pseudonym and under the tenant's new one would lead from the one to the
other. So the tenant's own sandboxes end before, whose generations entries name, and entries of its files, batches and
responses that wait in the store's book are written.
"""

from __future__ import annotations

from appliance.common.errors import AuditNamesError
from appliance.supervisor.audit import Recorder
from appliance.supervisor.batches.port import StorePort
from appliance.supervisor.residents import Residents


class Unlinking:
    """Unlinks tenants from the audit log's pseudonyms; its methods run in the supervisor's event loop."""

    def __init__(self, recorder: Recorder, residents: Residents, port: StorePort | None) -> None:
        """``port``: None where no files and batches are kept."""
        self._recorder = recorder
        self._residents = residents
        self._port = port

    async def unlink(self, tenant: str) -> str:
        """Destroy what leads from pseudonyms to a tenant; returns its pseudonym until now, or nothing where it had
        none. Its own sandboxes end, and boot again behind that where they are still needed.

        Raises:
            AuditNamesError: nothing was destroyed, or the disk does not take it; asking again goes on.
        """
        async with self._residents.without(tenant):
            if self._port is not None and not await self._port.flush():
                raise AuditNamesError(
                    f"the pseudonyms of {tenant} stay: entries of its files and batches cannot be written now"
                )
            return await self._recorder.unlink(tenant)
