"""The stage of the sessions' tests, for all tests of requests."""

from tests.appliance.gateway.request.test_session import stage

__all__ = ["stage"]
