"""Every error class reaches both front ends in its own shape."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2 as details

from appliance.common import errors
from appliance.common.errors import ApplianceError, Wire
from appliance.gateway.grpc import error_status
from appliance.gateway.http import header_fields
from appliance.gateway.http.openai_objects import error_object


def _tree(root: type[ApplianceError] = ApplianceError) -> list[type[ApplianceError]]:
    found = list(root.__subclasses__())
    return found + [deeper for kind in found for deeper in _tree(kind)]


CLASSES = sorted(set(_tree()), key=lambda kind: kind.__name__)


def test_the_tree_is_the_modules_own():
    """The closed list is closed: every class stands in ``appliance.common.errors`` and is met by this test."""
    assert {kind.__module__ for kind in CLASSES} == {errors.__name__}
    assert len(CLASSES) >= 16


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_has_a_row_that_both_front_ends_can_send(kind):
    """A canonical gRPC code, an HTTP status in the error range, and OpenAI's object with all four members."""
    assert isinstance(kind.wire, Wire)
    assert kind.wire.grpc in grpc.StatusCode.__members__
    assert kind.wire.grpc != "OK"
    assert 400 <= kind.wire.http < 600
    assert kind.wire.reason == kind.wire.reason.upper()
    assert len(kind.wire.reason) <= 63
    error = kind("a text", param="field", retry_after_s=1.25, details={"limit_tokens": "5"})
    assert set(error_object(error)["error"]) == {"message", "type", "param", "code"}
    assert dict(header_fields.of_error(error))["retry-after-ms"] == "1250"
    status = error_status.status_of(error, "req_1")
    assert status.code == grpc.StatusCode[kind.wire.grpc].value[0]
    kinds = [box.type_url.rpartition(".")[2] for box in status.details]
    assert kinds[:3] == ["ErrorInfo", "RequestInfo", "RetryInfo"]
    info, retry = details.ErrorInfo(), details.RetryInfo()
    status.details[0].Unpack(info)
    status.details[2].Unpack(retry)
    assert (info.domain, info.reason, dict(info.metadata)) == ("athanor", kind.wire.reason, {"limit_tokens": "5"})
    assert retry.retry_delay.ToMilliseconds() == 1_250
    assert ("BadRequest" in kinds) is (kind.wire.grpc == "INVALID_ARGUMENT")
    assert ("QuotaFailure" in kinds) is (kind.wire.grpc == "RESOURCE_EXHAUSTED")
    if "QuotaFailure" in kinds:
        excess = details.QuotaFailure()
        status.details[kinds.index("QuotaFailure")].Unpack(excess)
        subject = "message" if kind is errors.PayloadTooLargeError else "tenant"
        assert [(one.subject, one.description) for one in excess.violations] == [(subject, "a text")]
    assert ("ResourceInfo" in kinds) is issubclass(kind, errors.ModelNotFoundError)


def test_a_denial_names_its_rule_and_its_policy_over_both_apis():
    """The rule comes without its tenant's name, the digest whole; a hidden rule is kept for the operator and told to no
    caller, and an error without a rule says nothing of policies."""
    told = {"x-athanor-rule": "limits.concurrency", "x-athanor-policy": "ab" * 32}
    error = errors.RateLimitedError("slow down", details={"limit": "4"})
    assert error.by_rule("tenants.alpha.limits.concurrency", "ab" * 32) is error
    assert (error.rule, error.policy) == ("tenants.alpha.limits.concurrency", "ab" * 32)
    assert dict(header_fields.of_error(error)) == {"x-should-retry": "false", **told}
    info = details.ErrorInfo()
    error_status.status_of(error, "req_1").details[0].Unpack(info)
    assert dict(info.metadata) == {"limit": "4", "rule": "limits.concurrency", "policy": "ab" * 32}
    assert errors.PolicyChangedError("x").by_rule("routes.fast", "cd").details["rule"] == "routes.fast"
    hidden = errors.PermissionDeniedError("no").by_rule("tenants.alpha.models", "ab" * 32, hidden=True)
    assert (hidden.rule, hidden.policy, hidden.details) == ("tenants.alpha.models", "ab" * 32, {})
    assert dict(header_fields.of_error(errors.RateLimitedError("x"))) == {"x-should-retry": "false"}
