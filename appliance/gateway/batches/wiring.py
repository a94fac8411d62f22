"""Files and batches of one gateway: its parts, made together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial

from appliance.common.batch_status import BatchQueue
from appliance.common.batches import messages
from appliance.common.batches.values import MAX_OPEN_IN_ALL
from appliance.common.control import Control
from appliance.common.errors import ApplianceError, UnavailableError
from appliance.common.keys import KeyTable
from appliance.gateway.batches.kept_work import KeptWork
from appliance.gateway.batches.line_calls import LineCalls
from appliance.gateway.batches.room import Room
from appliance.gateway.batches.runner import BatchRunner
from appliance.gateway.front.auth import holds
from appliance.gateway.generate_request import Principal
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.request.withdrawal import caller_withdrawn
from appliance.gateway.sandboxes.store_link import StoreDeniedError, StoreLink
from policy.model import PolicySet, Retention


def epoch_of(ledger: Ledger, tenant: str) -> bytes:
    """Return a tenant's namespace key; empty while the policy does not let it be served in this region."""
    known = ledger.policy.tenants.get(tenant)
    elsewhere = known is not None and known.regions and ledger.region not in known.regions
    return b"" if elsewhere else ledger.namespaces.get(tenant, b"")


MAX_ROWS = 20
"""Batches that are shown one by one."""


class Batches:
    """Files and batches of a gateway."""

    def __init__(
        self, service: GatewayService, tell: Callable[[Control], None], keys: Callable[[], KeyTable], *, wanted: bool
    ) -> None:
        """``keys`` gives those in force; ``wanted``: whether the configuration has files and batches."""
        self.link = StoreLink(tell, wanted=wanted)
        self._wanted = wanted
        self._service = service
        ledger = service.ledger

        def withdrawn(principal: Principal) -> ApplianceError | None:
            in_force = holds(principal, keys(), datetime.now(UTC))
            return caller_withdrawn(principal, ledger.policy, credential_holds=in_force)

        room = Room(
            ledger, service.model_sandboxes, service.tenant_sandboxes, service.routing.asleep, service.operator_drain
        )
        self._runner = BatchRunner(self.link, LineCalls(service, withdrawn), room, service.count)
        policy, changed = (lambda: ledger.policy), self._runner.changed

        self._work = KeptWork(self.link, policy, changed, service.count, partial(epoch_of, ledger))

    @property
    def work(self) -> KeptWork | None:
        """What the front end asks; None where no files are kept."""
        return self._work if self._wanted else None

    def queue(self, figures: Mapping[str, int]) -> BatchQueue | None:
        """Return the batches that are not over, and what is kept by the supervisor's ``figures``; None where no files
        are kept, or nothing is known of them yet."""
        if not self._wanted or not figures:
            return None
        rows = self._runner.views(MAX_OPEN_IN_ALL)
        return BatchQueue(
            open=figures["open_batches"],
            waiting_lines=figures["waiting_lines"],
            running_lines=self._runner.running_lines,
            oldest_s=float(figures["oldest_s"]),
            files=figures["files"],
            responses=figures["responses"],
            stored_bytes=figures["bytes"],
            max_bytes=figures["max_bytes"],
            stuck=sum(one.stuck for one in rows),
            rows=rows[:MAX_ROWS],
        )

    async def run(self) -> None:
        """Run batches until cancelled."""
        try:
            await self._runner.run()
        finally:
            self.link.close()

    async def follow(self, policy: PolicySet) -> None:
        """Have the supervisor remove what it keeps of tenants of which nothing may be kept under a policy."""
        tenants = [name for name, one in policy.tenants.items() if one.retention is Retention.NONE]
        if not self._wanted or not tenants:
            return
        try:
            await self.link.ask(messages.ForgetTenants(tenants), messages.Accepted)
        except (UnavailableError, StoreDeniedError):
            self.link.on_up()
