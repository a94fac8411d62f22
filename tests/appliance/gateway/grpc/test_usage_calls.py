"""athanor.usage.v1 over a real socket: asked once, watched, ended with the credential and with the appliance."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import grpc
import pytest
from google.rpc import error_details_pb2 as details

from appliance.common.errors import UnavailableError
from appliance.common.usage.pseudonyms import name_digest
from appliance.gateway.grpc import usage_calls as module
from appliance.gateway.grpc.generated import usage_pb2 as pb
from appliance.gateway.grpc.generated.usage_pb2_grpc import UsageServiceStub
from tests.appliance.gateway.front.support import MODEL
from tests.appliance.gateway.grpc.grpc_client import detail_of, proof_of, refused


async def ended(call):
    """The error that the next read of a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_limits_and_usage_are_told(running, channel):
    """Units, treatments, exact amounts in billionths, periods as timestamps; an absent time stays absent."""
    stub = UsageServiceStub(channel)
    limits = (await stub.GetLimits(pb.GetLimitsRequest(), metadata=proof_of(running))).limits
    rate, spend = limits.limits
    assert (limits.tenant, limits.currency, rate.name, rate.left) == ("acme", "EUR", "requests_per_minute", 59)
    assert (rate.unit, rate.exceeded) == (pb.UNIT_REQUESTS, pb.EXCEEDED_REFUSE)
    assert (spend.unit, spend.left) == (pb.UNIT_BILLIONTHS, 9_500_000_001)
    usage = (await stub.GetUsage(pb.GetUsageRequest(), metadata=proof_of(running))).usage
    assert [one.model for one in usage.month.models] == [MODEL, ""]
    assert usage.day.begins_at.ToDatetime(UTC) == datetime(2023, 11, 15, tzinfo=UTC)
    first = usage.day.models[0]
    assert (first.requests, first.reasoning_tokens, first.cost) == (3, 15, 1_500_000_000)


async def test_end_users_are_told_by_pseudonym_and_one_by_its_name(running, channel):
    """Rows by pseudonym, the last one all others; a name chooses one, and one that is too long is named."""
    stub = UsageServiceStub(channel)
    usage = (await stub.GetUsage(pb.GetUsageRequest(), metadata=proof_of(running))).usage
    users = [(one.end_user, one.requests, one.reasoning_tokens) for one in usage.day.end_users]
    assert users == [("aa11", 2, 5), ("", 1, 0)]
    named = pb.GetUsageRequest(end_user="ann@example.org")
    usage = (await stub.GetUsage(named, metadata=proof_of(running))).usage
    assert [one.end_user for one in usage.day.end_users] == [name_digest("ann@example.org")]
    error = await refused(stub.GetUsage(pb.GetUsageRequest(end_user="a" * 513), metadata=proof_of(running)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail_of(error, details.BadRequest).field_violations[0].field == "end_user"


async def test_a_watch_tells_at_once_and_after_each_interval(running, channel):
    """Numbered messages, the first without a wait, the others a second apart; leaving ends it."""
    call = UsageServiceStub(channel).WatchUsage(pb.WatchUsageRequest(interval_seconds=1), metadata=proof_of(running))
    loop = asyncio.get_running_loop()
    first, begun = await call.read(), loop.time()
    second = await call.read()
    assert (first.sequence, second.sequence) == (0, 1)
    assert loop.time() - begun >= 0.9
    assert second.limits.tenant == second.usage.tenant == "acme"
    call.cancel()


@pytest.mark.parametrize("interval", [0, 301])
async def test_an_interval_out_of_range_is_named(running, channel, interval):
    """INVALID_ARGUMENT with the field."""
    error = await refused(
        UsageServiceStub(channel).WatchUsage(
            pb.WatchUsageRequest(interval_seconds=interval), metadata=proof_of(running)
        )
    )
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail_of(error, details.BadRequest).field_violations[0].field == "interval_seconds"


async def test_a_revoked_key_ends_a_watch(running, channel, monkeypatch):
    """Between two messages the credential is looked at again; the call ends as one without a credential."""
    monkeypatch.setattr(module, "RECHECK_S", 0.05)
    call = UsageServiceStub(channel).WatchUsage(pb.WatchUsageRequest(interval_seconds=300), metadata=proof_of(running))
    assert (await call.read()).sequence == 0
    running.service.tenants.clear()
    async with asyncio.timeout(5):
        assert (await ended(call)).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_watch_ends_with_the_supervisor_and_with_a_drain(running, channel):
    """UNAVAILABLE with a time to come back, in both cases; a watch that begins in a drain does not begin."""
    stub = UsageServiceStub(channel)
    running.service.script = [UnavailableError("the usage book cannot be read now", retry_after_s=1.0)]
    error = await refused(stub.WatchUsage(pb.WatchUsageRequest(), metadata=proof_of(running)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "usage book" in error.details()
    running.service.script = []
    call = stub.WatchUsage(pb.WatchUsageRequest(interval_seconds=300), metadata=proof_of(running))
    await call.read()
    stopping = asyncio.create_task(running.front_ends.stop(5))
    error = await ended(call)
    await stopping
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()


async def test_padded_tenants_get_messages_of_few_lengths(running, channel):
    """All answers to a tenant of a padded class have one length here; to others (control) they differ."""
    stub = UsageServiceStub(channel)

    async def sizes() -> set[int]:
        limits = await stub.GetLimits(pb.GetLimitsRequest(), metadata=proof_of(running))
        usage = await stub.GetUsage(pb.GetUsageRequest(), metadata=proof_of(running))
        watch = stub.WatchUsage(pb.WatchUsageRequest(), metadata=proof_of(running))
        watched = await watch.read()
        watch.cancel()
        return {limits.ByteSize(), usage.ByteSize(), watched.ByteSize()}

    plain = await sizes()
    running.service.padded.add("acme")
    assert (len(plain), len(await sizes())) == (3, 1)
