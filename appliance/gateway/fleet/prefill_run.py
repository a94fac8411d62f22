"""A prompt that another host has asked for, from the own policy's decision to its first token.

The asking host has admitted the request, counts it against the tenant's limits and settles it. Here it runs as a
request of that tenant for one token, with the tenant's weight and at most its priority, and is neither charged nor
counted against limits. Its blocks go to the fleet's store as those of each request of the tenant do.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from appliance.common.errors import PermissionDeniedError, QuarantinedError, UnavailableError
from appliance.common.kv_store_state import FleetKeyState
from appliance.gateway.request.accounts import Account
from appliance.gateway.request.denials import denial
from appliance.gateway.request.ledger import Ledger, first_access
from appliance.gateway.request.lifecycle import PRIORITIES, SessionDependencies, left_us
from appliance.gateway.request.operator_drain import OperatorDrain, check_taking
from appliance.gateway.request.suspects import Standing, fingerprint
from appliance.gateway.sandboxes.engine_link import EngineFullError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_sandboxes import EngineVisit
from appliance.gateway.sandboxes.stream import EngineGoneError, TokenStream
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Finish, Priority
from isolation.ipc.sampling import Sampling
from policy.decision import Obligations
from policy.evaluate import evaluate
from policy.kept import splits
from policy.request import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """What another host has asked for."""

    request_id: str
    tenant: str
    model: str
    alias: str
    model_digest: str
    policy_digest: str
    token_ids: array[int]
    """Typecode ``I``."""
    deterministic: bool
    priority: Priority
    until: float
    """Deadline in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """What was computed."""

    blocks: int
    """Whole KV blocks of the prompt."""
    cached_tokens: int


class PrefillRuns:
    """Computes prompts for other hosts in this host's engines."""

    def __init__(
        self, dependencies: SessionDependencies, drain: OperatorDrain, keys: Callable[[], FleetKeyState]
    ) -> None:
        """``keys`` tells whether this host has the keys under which its fleet shares KV."""
        self._dependencies = dependencies
        self._drain = drain
        self._keys = keys

    def permit(self, asked: AskedPrompt) -> Obligations:
        """Return what the policy in force here asks for.

        Raises:
            ApplianceError: it does not let the tenant have the prompt computed here, or nothing is computed now.
        """
        ledger = self._dependencies.ledger
        check_taking(self._drain, self._dependencies.audited_calls)
        known = ledger.policy.tenants.get(asked.tenant)
        if known is None or ledger.policy.digest != asked.policy_digest:
            raise PermissionDeniedError("the hosts have different policies; put one in force on both")
        if not splits(known) or asked.deterministic:
            raise PermissionDeniedError("this tenant's KV, or that of this class of sampling, stays on its host")
        if self._keys() is not FleetKeyState.HELD:
            raise UnavailableError("this host has not the fleet's keys now", retry_after_s=RETRY_AFTER_S)
        model = self._dependencies.models.get(asked.model)
        if model is None or model.digest != asked.model_digest or model.sleep_state.asleep:
            raise PermissionDeniedError("this host does not serve these files under the model's name, or they sleep")
        obligations = _decided(ledger, asked)
        if obligations.isolation_class.pads:
            raise PermissionDeniedError("the tenant's class is computed on its own host")
        return obligations

    async def run(self, asked: AskedPrompt) -> ComputedPrompt:
        """Compute the prompt. Cancelling the task ends it within one step.

        Raises:
            ApplianceError: the policy denies, or it cannot be computed here.
        """
        obligations = self.permit(asked)
        dependencies = self._dependencies
        model = dependencies.models[asked.model]
        ready = await model.limits_by(asked.until)
        most = max(asked.token_ids, default=ready.vocab_size)
        if most >= ready.vocab_size or len(asked.token_ids) >= ready.max_context:
            raise PermissionDeniedError("the prompt has ids that the model has not, or more than its context")
        submit = self._submit(asked, obligations)
        mark = fingerprint(asked.tenant, asked.model, submit)
        standing = dependencies.suspects[asked.model].standing(mark, time.monotonic())
        if standing is Standing.QUARANTINED:
            raise QuarantinedError("the engine ended twice while computing this prompt; it will not be run again")
        suspect, alone = standing is not Standing.CLEAN, standing is Standing.ALONE_ONLY
        async with model.enter_engine(asked.until, suspect=suspect, alone_only=alone) as visit:
            cached = await self._follow(visit, replace(submit, deadline_us=left_us(asked.until)), mark)
        dependencies.suspects[asked.model].cleared(mark)
        return ComputedPrompt(len(asked.token_ids) // ready.block_size, min(cached, len(asked.token_ids)))

    def _submit(self, asked: AskedPrompt, obligations: Obligations) -> Submit:
        return Submit(
            request=self._dependencies.next_id(),
            namespace=self._dependencies.ledger.namespaces[asked.tenant],
            token_ids=asked.token_ids,
            max_tokens=1,
            sampling=Sampling(temperature=0.0),
            ignore_eos=True,
            weight=obligations.weight,
            priority=max(PRIORITIES[obligations.priority], asked.priority),
        )

    async def _follow(self, visit: EngineVisit, submit: Submit, mark: bytes) -> int:
        """Wait for the first token; returns the tokens that were cached."""
        try:
            stream = visit.engine.submit(submit, mark, every_step=True)  # another request waits for its one token
        except EngineFullError as error:
            raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
        try:
            while not stream.received and stream.finish is Finish.NONE:
                stream.raise_if_lost()
                await stream.wake.wait()
                stream.wake.clear()
        except EngineGoneError as error:
            raise UnavailableError("the engine ended while it computed the prompt") from error
        finally:
            visit.engine.abort(stream)
        return _cached(stream)


def _cached(stream: TokenStream) -> int:
    return 0 if stream.started is None else stream.started.cached_tokens


def _decided(ledger: Ledger, asked: AskedPrompt) -> Obligations:
    """Return what the policy's rules grant, whatever is left of the tenant's limits: the host that admitted the request
    settles these.

    Raises:
        ApplianceError: a rule denies.
    """
    policy, now = ledger.policy, time.monotonic()
    known = policy.tenants[asked.tenant]
    access = first_access(asked.tenant, asked.model, 1, 1, None, asked.alias)
    access = replace(access, input_tokens=max(1, len(asked.token_ids)))
    if known.hours:
        access = replace(access, unix_s=ledger.spends.now)
    if known.regions or known.model_regions:
        access = replace(access, region=ledger.region)
    fresh = Account.begin(known.limits, now)
    usage = Usage(concurrency=0, request_bucket=fresh.requests, token_bucket=fresh.tokens)
    decision = evaluate(policy, access, usage, now)
    if decision.obligations is None:
        raise denial(decision)
    return decision.obligations
