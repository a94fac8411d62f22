"""What the front ends ask of the gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from appliance.gateway.generate_request import (
    AttestRequest,
    CallContext,
    Embeddings,
    EmbedRequest,
    Event,
    GenerateRequest,
    Principal,
    RateState,
    Routable,
    ScoreRequest,
    Scores,
    Sink,
    Tokenized,
    TokenizerRequest,
)
from appliance.gateway.model_card import ModelCard
from appliance.gateway.tenant_account import TenantLimits, TenantUsed


class Service(Protocol):
    """What the front ends ask of the gateway: the one session object behind gRPC and HTTP."""

    def routed(self, principal: Principal, request: Routable) -> Routable:
        """The request with the model that serves it, where it names a route of the policy; else as it is. A front end
        asks before anything else, since the answer names the model."""
        ...

    def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event, None]:
        """Run the request: ``Started``, ``PromptTokens`` where asked for, ``Delta`` and ``ChoiceFinished``
        ..., ``Finished``.

        With a sink, deltas are written to it between the two other events, from the moment at which the event after
        ``Started`` is asked for; a session may still give some as events. All of it is in order.
        Closing the iterator (``aclose``) or cancelling its task stops compute within one step.

        Raises:
            ApplianceError: typed, from the closed list, at any point of the iteration.
        """
        ...

    async def embed(self, principal: Principal, request: EmbedRequest, context: CallContext) -> Embeddings:
        """Make a vector of each text. Cancelling its task stops compute within one step.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    async def score(self, principal: Principal, request: ScoreRequest, context: CallContext) -> Scores:
        """Score each pair of a query and a document, or classify each text. Cancelling its task stops compute within
        one step.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    async def tokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> Tokenized:
        """Give the token ids of a prompt.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    async def detokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> str:
        """Give the text of token ids, without special tokens; what is no whole character shows as U+FFFD.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    async def attest(self, principal: Principal, request: AttestRequest, context: CallContext) -> str:
        """Give the signed text of an attestation (``appliance.common.audit.attestation``).

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    def models(self, principal: Principal) -> tuple[ModelCard, ...]:
        """The models that this principal may use, by name."""
        ...

    def limits(self, principal: Principal) -> TenantLimits:
        """Give the tenant's limits, and what is left of them now.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        ...

    async def usage(self, principal: Principal, end_user: str = "") -> TenantUsed:
        """Give what the tenant has used in this day and month; of its end users, where the digest of a name is given
        (``appliance.gateway.front.end_user``), what this one has used.

        Raises:
            ApplianceError: typed, from the closed list.
        """
        ...

    def rates(self, principal: Principal) -> RateState:
        """What is left of the tenant's rates now."""
        ...

    def pads(self, principal: Principal) -> bool:
        """Whether sizes and moments of this principal's answers shall tell nothing, by the policy in force."""
        ...

    def authenticate(self, credential: str, address: str) -> Principal | None:
        """The principal behind an already verified credential, by the policy in force; None if it names none, or its
        tenant's credentials are not taken from this address."""
        ...

    def record_refusal(self, context: CallContext, error: Exception, caller: Principal | None) -> str:
        """Make the trace, metric and log line of a call that ended before a session began (bad body, no
        credential); gives its request id."""
        ...
