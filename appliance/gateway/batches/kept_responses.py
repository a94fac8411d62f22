"""Stored responses for the front end (``ResponseKeeper``): the policy asked first, then the supervisor's store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

import structlog

from appliance.common.batches import messages
from appliance.common.batches.values import MAX_RESPONSE_BYTES
from appliance.common.errors import ApplianceError, FeatureNotAllowedError
from appliance.gateway.batches.refusals import refusal
from appliance.gateway.generate_request import Principal
from appliance.gateway.sandboxes.store_link import StoreDeniedError, StoreLink
from appliance.gateway.telemetry import names
from policy.kept import keeps_responses
from policy.model import PolicySet, Tenant

log = structlog.get_logger()

Counted = Callable[..., None]
"""Adds to a counter of ``names``."""


class KeptResponses:
    """Responses of tenants, kept by the supervisor."""

    def __init__(
        self, store: StoreLink, policy: Callable[[], PolicySet], count: Counted, epoch: Callable[[str], bytes]
    ) -> None:
        """``policy`` gives the one in force, ``epoch`` a tenant's namespace key."""
        self.epoch = epoch
        self._store = store
        self._policy = policy
        self._count = count
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by tenant: one response of a tenant is on its way from the store at a time, since each may have some
        MiB."""

    def withheld(self, principal: Principal, param: str) -> ApplianceError | None:
        """Return why a caller's responses are not kept; see ``appliance.gateway.stored_work.ResponseKeeper``."""
        policy = self._policy()
        tenant = policy.tenants.get(principal.tenant)
        if tenant is not None and keeps_responses(tenant):
            return None
        allowed = tenant is not None and tenant.features.stored_responses
        why = "nothing of this tenant is kept" if allowed else "this tenant's responses are not kept"
        error = FeatureNotAllowedError(f"{why}; leave {param} out, and send the whole conversation", param=param)
        key = "retention" if allowed else "features.stored_responses"
        return error.by_rule(f"tenants.{principal.tenant}.{key}", policy.digest)

    async def keep(self, principal: Principal, response: str, document: bytes) -> bool:
        """Keep a response; see ``appliance.gateway.stored_work.ResponseKeeper``."""
        tenant = self._policy().tenants.get(principal.tenant)
        kept = False
        # The policy may have changed while the answer was computed.
        if tenant is not None and keeps_responses(tenant) and len(document) <= MAX_RESPONSE_BYTES:
            most = tenant.limits.max_stored_bytes
            call = messages.ResponseKeep(tenant.id, principal.credential, response, most)
            try:
                await self._store.ask(call, messages.Accepted, document)
                kept = True
            except (ApplianceError, StoreDeniedError) as error:
                log.warning("a response is not kept", tenant=principal.tenant, reason=str(error))
        outcome = names.RESPONSE_KEPT if kept else names.RESPONSE_NOT_KEPT
        self._count(names.RESPONSES, tenant=principal.tenant, outcome=outcome)
        return kept

    async def read(self, principal: Principal, response: str, param: str = "id") -> bytes:
        """Return a response; see ``appliance.gateway.stored_work.ResponseKeeper``."""
        tenant = self._allowed(principal, param)
        call = messages.ResponseRead(tenant.id, response, principal.credential)
        async with self._turns.setdefault(tenant.id, asyncio.Lock()):
            try:
                _, document = await self._store.fetch(call, messages.ResponseFound)
            except StoreDeniedError as error:
                raise refusal(error, "response", param) from None
        self._count(names.RESPONSES, tenant=tenant.id, outcome=names.RESPONSE_READ)
        return document

    async def delete(self, principal: Principal, response: str) -> None:
        """Delete a response; see ``appliance.gateway.stored_work.ResponseKeeper``."""
        tenant = self._allowed(principal, "id")
        call = messages.ResponseDelete(tenant.id, response, principal.credential)
        try:
            await self._store.ask(call, messages.Accepted)
        except StoreDeniedError as error:
            raise refusal(error, "response", "id") from None
        self._count(names.RESPONSES, tenant=tenant.id, outcome=names.RESPONSE_DELETED)

    def _allowed(self, principal: Principal, param: str) -> Tenant:
        """Return the caller's tenant.

        Raises:
            FeatureNotAllowedError: its responses are not kept.
        """
        error = self.withheld(principal, param)
        if error is not None:
            raise error
        return self._policy().tenants[principal.tenant]
