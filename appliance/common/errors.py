"""Every error that a caller or an operator can meet, and the one table that maps it to gRPC and HTTP.

Errors that leave the machine come from this closed list (GUARANTEES, mistake 16): the message is written here or by
code that knows only the caller's own request; no exception text, path or other tenant's name is ever put into one.
A test walks the tree and demands a row for each class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class Wire:
    """How an error looks from outside.

    ``grpc`` is the name of a canonical status code; ``http`` a status; ``kind`` and ``code`` are OpenAI's
    ``error.type`` and ``error.code``; ``reason`` is the UPPER_SNAKE reason of google.rpc.ErrorInfo.
    """

    grpc: str
    http: int
    kind: str
    code: str
    reason: str


class ApplianceError(Exception):
    """Base of all. ``message`` is for the caller; ``retry_after_s`` is set where trying again later helps; ``param``
    names the field of the request at fault; ``details`` are short facts (limit, actual) with the unit in the key."""

    wire: ClassVar[Wire]

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rule = ""
        """Path in the policy of what denied, if anything did; for the operator: callers see what ``by_rule`` tells."""
        self.policy = ""
        """Digest of the policy whose rule denied; empty where none did."""
        self.cut_rule = ""
        """Path in the policy of what ended a running request, if anything did. A request that is cut is charged, and
        one with a ``rule`` is a denial."""
        self.cut_policy = ""
        """Digest of the policy that ended a running request; empty where none did."""
        self.refusal = ""
        """Why a credential was refused (``appliance.common.refused_credentials``); for the operator, never for the
        caller."""
        self.retry_after_s = retry_after_s
        self.param = param
        self.details = details or {}

    def by_rule(self, rule: str, policy: str, *, hidden: bool = False) -> Self:
        """Note the rule that denied and the digest of its policy, for span and audit log, and return the error.

        The caller is told both in ``details``, the rule without its tenant's name. ``hidden``: the caller is not told,
        because the rule would tell whether a name that it may not use is a model, a route or nothing.
        """
        self.rule, self.policy = rule, policy
        if not hidden:
            self.details = {**self.details, "rule": _own_path(rule), "policy": policy}
        return self

    def by_cut(self, rule: str, policy: str, *, hidden: bool = False) -> Self:
        """Note the rule that ends a running request and the digest of its policy, and return the error. The caller is
        told as by ``by_rule``."""
        self.cut_rule, self.cut_policy = rule, policy
        if not hidden:
            self.details = {**self.details, "rule": _own_path(rule), "policy": policy}
        return self


def _own_path(rule: str) -> str:
    """Return the path of a rule without the tenant that it is of: ``limits.concurrency``."""
    return rule.split(".", 2)[2] if rule.startswith("tenants.") and rule.count(".") > 1 else rule


class ConfigError(ApplianceError):
    """The machine's configuration cannot be used; reported to the operator at the start."""

    wire = Wire("FAILED_PRECONDITION", 500, "server_error", "configuration_error", "CONFIGURATION_ERROR")


def reason_of(error: OSError) -> str:
    """What the system says of a failed call: "permission denied"."""
    return (error.strerror or str(error)).lower()


@contextmanager
def os_errors_as(problem: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``ConfigError``: the problem, a colon and the system's reason."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem}: {reason_of(error)}") from error


class StartError(ApplianceError):
    """The appliance cannot start or go on: no runsc, a port in use, a model that does not load."""

    wire = Wire("FAILED_PRECONDITION", 500, "server_error", "start_error", "START_ERROR")


class ControlError(StartError):
    """The other host process broke the protocol between the two, or is gone."""


class MessageTooLargeError(ControlError):
    """A message for the other host process is larger than one may be, which is a defect of the sender's bounds."""


class HandOverError(ControlError):
    """The gateway may open no more descriptors and cannot take a sandbox; the message has the limit and the remedy."""


class AuditError(StartError):
    """The audit log cannot be opened; the message says why and what to do."""


class AuditNamesError(Exception):
    """What leads from the audit log's pseudonyms to a tenant cannot be destroyed now; the message says why."""


class UsageError(StartError):
    """The usage book cannot be used; the message says why and what to do."""


class SpillPortError(StartError):
    """An engine's spill channel is not served any more, which ends this life of the engine: the machine refuses what
    the channel needs, or as a class below says. The message says what, and what to do."""


class SpillBreachError(SpillPortError):
    """An engine broke the protocol on its spill channel, which ends this life of the engine."""


class SpillOverrunError(SpillPortError):
    """An engine has read nothing on its spill channel while more changed than may wait. A frozen one reads nothing
    either, so that is no fault of its own."""


class StoreError(StartError):
    """The store of files and batches cannot be used; the message says why and what to do."""


class ModelDigestError(ConfigError):
    """The files of a model are not those that were pinned, or not those that were there at the start."""


class ModelSignatureError(ConfigError):
    """The files of a model are not signed by a key of those that must sign them; the message names the file."""


class ModelSourceError(ConfigError):
    """A model cannot be taken from its source as it is: address, credentials, manifest; the message says what to do."""


class SourceUnavailableError(ModelSourceError):
    """The source of a model does not answer, or breaks off; what has come is kept, and pulled again it is completed."""


class ModelCacheError(ConfigError):
    """The cache of models cannot do what was asked: no such model, no room, in use; the message says what to do."""


class CarrierError(ConfigError):
    """The carrier of sealed KV, or the supervisor as its client, says what the other does not take."""


class MembersError(ConfigError):
    """The list of a fleet's members cannot be used; the message says why and what to do."""


class MembersSignatureError(MembersError):
    """The list of members is not signed by the fleet's authority as it is."""


class DuplicateMemberError(MembersError):
    """Two members of a list have one name or one key."""


class MembersVersionError(MembersError):
    """The list of members is older than one that this host has accepted, or another one of the same version."""


class UnknownMemberError(MembersError):
    """This host is none of the list's members, or the list has other keys for it."""


class AccountNameError(ControlError):
    """A name is none that a policy gives to a tenant or a sharing group; members of a fleet cannot write it."""


class EnvelopeError(MembersError):
    """Bytes from the store are no message of a fleet's member to this host; the message says what they may be."""


class StaleEnvelopeError(EnvelopeError):
    """A message that a member did write to this host, and that is of no use any more."""


class InvalidRequestError(ApplianceError):
    """The request is malformed or a value is out of range."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_value", "INVALID_REQUEST")


class ContextLengthError(InvalidRequestError):
    """Prompt and output do not fit the model's context or the tenant's cap."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded", "CONTEXT_LENGTH_EXCEEDED")


class QuarantinedError(InvalidRequestError):
    """The engine died twice while it served this request; it will not be tried again."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "request_quarantined", "REQUEST_QUARANTINED")


class DeterministicUnavailableError(InvalidRequestError):
    """The model or the machine cannot give the same bits in any batch, and the request or the policy asks for them."""

    wire = Wire(
        "INVALID_ARGUMENT", 400, "invalid_request_error", "deterministic_unavailable", "DETERMINISTIC_UNAVAILABLE"
    )


class InvalidGrammarError(InvalidRequestError):
    """The schema, expression or grammar of the request cannot be used; the message says why."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_grammar", "INVALID_GRAMMAR")


class GrammarTooLargeError(InvalidGrammarError):
    """The grammar has more bytes than allowed."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "grammar_too_large", "GRAMMAR_TOO_LARGE")


class GrammarTooComplexError(InvalidGrammarError):
    """Compiling or following the grammar takes more time or memory than allowed."""

    wire = Wire("INVALID_ARGUMENT", 400, "invalid_request_error", "grammar_too_complex", "GRAMMAR_TOO_COMPLEX")


class PayloadTooLargeError(ApplianceError):
    """The body or the message is larger than the limit."""

    wire = Wire("RESOURCE_EXHAUSTED", 413, "invalid_request_error", "payload_too_large", "PAYLOAD_TOO_LARGE")


class UnauthenticatedError(ApplianceError):
    """No credential, or one that is not known."""

    wire = Wire("UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key", "UNAUTHENTICATED")


class PermissionDeniedError(ApplianceError):
    """The tenant may not do this."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "model_not_allowed", "PERMISSION_DENIED")


class FeatureNotAllowedError(PermissionDeniedError):
    """The tenant may not use this part of the API."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "feature_not_allowed", "FEATURE_NOT_ALLOWED")


class OriginNotAllowedError(PermissionDeniedError):
    """The operator does not let pages of this origin call the API; told to browsers that ask by a preflight."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "origin_not_allowed", "ORIGIN_NOT_ALLOWED")


class ScopeError(PermissionDeniedError):
    """The caller's credential is limited to other operations than this one."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "insufficient_scope", "INSUFFICIENT_SCOPE")


class RoleError(PermissionDeniedError):
    """An operator's role does not reach so far; the message and the detail ``role`` name the role that is needed."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "role_needed", "ROLE_NEEDED")


class DeterministicNotAllowedError(PermissionDeniedError):
    """The policy does not grant deterministic answers to the tenant."""

    wire = Wire("PERMISSION_DENIED", 403, "permission_error", "deterministic_not_allowed", "DETERMINISTIC_NOT_ALLOWED")


class ModelNotFoundError(ApplianceError):
    """No such model here, or none that this tenant may know of."""

    wire = Wire("NOT_FOUND", 404, "invalid_request_error", "model_not_found", "MODEL_NOT_FOUND")


class ModelRemovedError(ModelNotFoundError):
    """The model is being taken away, or was while the request ran; sent again, the request meets no such model."""

    wire = Wire("NOT_FOUND", 404, "invalid_request_error", "model_removed", "MODEL_REMOVED")


class StoredNotFoundError(ApplianceError):
    """No such file, batch or stored response of this tenant."""

    wire = Wire("NOT_FOUND", 404, "invalid_request_error", "object_not_found", "STORED_NOT_FOUND")


class StorageLimitError(ApplianceError):
    """The tenant, or the appliance, keeps as many files, batches or bytes as it may."""

    wire = Wire("RESOURCE_EXHAUSTED", 413, "invalid_request_error", "storage_limit_exceeded", "STORAGE_LIMIT")


class StoredStateError(ApplianceError):
    """The file is in use, or the batch is over."""

    wire = Wire("FAILED_PRECONDITION", 409, "invalid_request_error", "conflict", "STORED_STATE")


class RouteNotFoundError(ApplianceError):
    """No such route."""

    wire = Wire("UNIMPLEMENTED", 404, "invalid_request_error", "unknown_url", "ROUTE_NOT_FOUND")


class MethodNotAllowedError(ApplianceError):
    """The route exists under another method."""

    wire = Wire("UNIMPLEMENTED", 405, "invalid_request_error", "method_not_allowed", "METHOD_NOT_ALLOWED")


class RateLimitedError(ApplianceError):
    """A rate or concurrency limit of the tenant is reached."""

    wire = Wire("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded", "RATE_LIMITED")


class SpendLimitError(ApplianceError):
    """A limit of the tenant's spend is reached, or the request may cost more than is left of it."""

    wire = Wire("RESOURCE_EXHAUSTED", 429, "insufficient_quota", "insufficient_quota", "SPEND_LIMIT_REACHED")


class CancelledError(ApplianceError):
    """The client left."""

    wire = Wire("CANCELLED", 499, "invalid_request_error", "request_cancelled", "CANCELLED")


class UnavailableError(ApplianceError):
    """The model's sandbox cannot serve now: booting, restarting, draining, or full."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "server_is_overloaded", "UNAVAILABLE")


class PolicyChangedError(ApplianceError):
    """The policy changed while the request ran, so that it may not go on as it was begun; sent again it is served under
    the new policy."""

    wire = Wire("ABORTED", 409, "conflict_error", "policy_changed", "POLICY_CHANGED")


class NoPlaceLeftError(UnavailableError):
    """The tenant's class needs sandboxes of its own, and all that there may be are in use."""

    wire = Wire("RESOURCE_EXHAUSTED", 503, "service_unavailable_error", "no_place_left", "NO_PLACE_LEFT")


class ModelAsleepError(UnavailableError):
    """The model sleeps, and will not be awake within the request's deadline or cannot be woken now; Retry-After says
    when it can."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "model_asleep", "MODEL_ASLEEP")


class ModelWakeError(UnavailableError):
    """The model was asleep, and the attempt to wake it for this request failed; another one may do better."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "model_wake_failed", "MODEL_WAKE_FAILED")


class GpuLostError(UnavailableError):
    """The GPU that computed the answer was lost; the message names the card."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "gpu_lost", "GPU_LOST")


class GpuMemoryError(UnavailableError):
    """The model's engine took more than its share of a GPU's memory and was ended; the message names the card."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "gpu_memory_exceeded", "GPU_MEMORY_EXCEEDED")


class ExternalModelError(UnavailableError):
    """The cluster outside of the appliance that computes the model failed, or gave what is no answer."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "external_model_failed", "EXTERNAL_MODEL_FAILED")


class ExternalModelBusyError(UnavailableError):
    """The cluster outside of the appliance that computes the model takes no more requests now."""

    wire = Wire("UNAVAILABLE", 503, "service_unavailable_error", "external_model_busy", "EXTERNAL_MODEL_BUSY")


class ExternalModelLateError(ApplianceError):
    """The cluster outside of the appliance that computes the model gave no token for too long."""

    wire = Wire("DEADLINE_EXCEEDED", 504, "timeout_error", "external_model_late", "EXTERNAL_MODEL_LATE")


class DeadlineExceededError(ApplianceError):
    """The request's deadline passed before its answer was complete."""

    wire = Wire("DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded", "DEADLINE_EXCEEDED")


class InternalError(ApplianceError):
    """A defect of the appliance; the logs have the request id."""

    wire = Wire("INTERNAL", 500, "server_error", "internal_error", "INTERNAL")


class IntegrityError(InternalError):
    """The request's block tables named KV memory that is not its own; nothing of it was read."""

    wire = Wire("INTERNAL", 500, "server_error", "integrity_failure", "INTEGRITY_FAILURE")
