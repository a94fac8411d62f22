"""The methods of ``athanor.admin.v1`` over the real socket, real files and a real admin listener."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
import pytest

from appliance.common.account_roles import Roles
from appliance.common.credentials import read_key_table
from appliance.common.operator_roles import OperatorRole
from appliance.operator.api.front import OperatorFront
from appliance.operator.api.generated import admin_pb2 as pb
from appliance.operator.api.method import ChangeTurn
from appliance.operator.api.server import serving
from tests.appliance.admin_server import LIVE, FakeAppliance, serve_admin
from tests.appliance.operator.api.place import OWN_POOL, Client, Place, a_place, calling

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]


@pytest.fixture(scope="module")
def appliance() -> Iterator[FakeAppliance]:
    """An admin listener on loopback."""
    fake = FakeAppliance()
    with serve_admin(fake):
        yield fake


@pytest.fixture
def place(appliance: FakeAppliance) -> Iterator[Place]:
    """A fresh configuration and policy."""
    appliance.reset()
    with a_place(appliance.url) as found:
        yield found


async def refusal(client: Client, method: str, request: object) -> grpc.aio.AioRpcError:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client(SERVICE, method, request)  # type: ignore[arg-type]
    return caught.value


def holds(place: Place, key: str) -> bool:
    """Whether a key is one of the table, by what is written."""
    table = read_key_table(place.folder / "keys.json", place.folder / "pepper")
    return table.verify(key, datetime.now(UTC)) is not None


async def test_server_info_tells_state_and_roles(place: Place, appliance: FakeAppliance) -> None:
    """What runs, and what the caller may do; without an appliance the version and the roles are still told."""
    async with calling(place) as client:
        found = await client(SERVICE, "GetServerInfo")
    assert (found.running, found.ready, found.draining) == (True, True, False)
    assert list(found.models) == ["athanor-mini"] and found.policy_digest == appliance.status.policy.digest
    assert list(found.roles) == [pb.ROLE_VIEWER, pb.ROLE_OPERATOR, pb.ROLE_SECURITY]
    with a_place("127.0.0.1:9") as alone:
        async with calling(alone) as client:
            silent = await client(SERVICE, "GetServerInfo")
            refused = await refusal(client, "Drain", pb.DrainRequest())
    assert silent.version == found.version and not silent.running
    assert refused.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_begins_and_ends(place: Place, appliance: FakeAppliance) -> None:
    """Server info tells it meanwhile."""
    async with calling(place) as client:
        assert (await client(SERVICE, "Drain")).running_requests == 1 and appliance.draining
        info = await client(SERVICE, "GetServerInfo")
        assert info.draining and not info.ready
        assert (await client(SERVICE, "Resume")).ready and not appliance.draining


async def test_tenants_with_keys_and_running_requests(place: Place) -> None:
    """One tenant of the policy with what is known of it, its settings with their places, and no other tenant."""
    async with calling(place) as client:
        found = await client(SERVICE, "ListTenants")
        one = await client(SERVICE, "GetTenant", pb.GetTenantRequest(tenant="alpha"))
        other = await refusal(client, "GetTenant", pb.GetTenantRequest(tenant="gamma"))
        unnamed = await refusal(client, "GetTenant", pb.GetTenantRequest())
    (row,) = found.tenants
    assert (row.tenant, row.running_requests, row.keys) == ("alpha", 3, 0)
    assert not row.HasField("requests_today") and found.policy_digest == place.digest
    settings = {one.name: one for one in one.settings}
    assert settings["limits.concurrency"].value == "4" and "policy.yaml:3" in settings["limits.concurrency"].origin
    assert (other.code(), unnamed.code()) == (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)


async def test_credentials_tell_their_secret_once(place: Place) -> None:
    """A key is in the answer that makes it, holds by the table, and no list has it; a rotation gives another, after
    which both hold; a revoked one holds no more."""
    async with calling(place) as client:
        made = await client(SERVICE, "CreateCredential", pb.CreateCredentialRequest(tenant="alpha", id="ci"))
        rotated = await client(SERVICE, "RotateCredential", pb.RotateCredentialRequest(id="ci", overlap="1h"))
        again = await refusal(client, "CreateCredential", pb.CreateCredentialRequest(tenant="alpha", id="ci"))
        listed = await client(SERVICE, "ListCredentials", pb.ListCredentialsRequest(tenant="alpha"))
        both = [holds(place, one.key) for one in (made, rotated)]
        revoked = await client(SERVICE, "RevokeCredential", pb.RevokeCredentialRequest(ids=["ci"]))
        none = await refusal(client, "RevokeCredential", pb.RevokeCredentialRequest())
        scope = await refusal(client, "CreateCredential", pb.CreateCredentialRequest(tenant="alpha", scopes=["fly"]))
    assert (made.id, made.credential, both) == ("ci", "key:ci", [True, True]) and made.key != rotated.key
    assert rotated.HasField("old_until")
    assert [(one.id, one.state) for one in listed.credentials] == [
        ("alpha-0", "active"),
        ("ci", "active"),
        ("ci", "old"),
    ]
    text = str(listed) + (place.folder / "keys.json").read_text()
    assert not any(secret.rpartition("_")[2] in text for secret in (made.key, rotated.key))
    assert list(revoked.revoked) == ["ci"] and not holds(place, rotated.key)
    assert none.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert again.code() is scope.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_live_requests_are_listed_and_ended(place: Place, appliance: FakeAppliance) -> None:
    """By tenant, without content; one that is over cannot be ended."""
    async with calling(place) as client:
        found = await client(SERVICE, "ListRequests")
        none = await client(SERVICE, "ListRequests", pb.ListRequestsRequest(tenant="beta"))
        await client(SERVICE, "CancelRequest", pb.CancelRequestRequest(id=LIVE.id))
        over = await refusal(client, "CancelRequest", pb.CancelRequestRequest(id=LIVE.id))
    (one,) = found.requests
    assert (one.id, one.tenant, one.output_tokens) == (LIVE.id, "alpha", 3) and not none.requests
    assert over.code() is grpc.StatusCode.NOT_FOUND and not appliance.live


async def test_models_are_listed_and_changes_refused_as_by_the_commands(place: Place) -> None:
    """A model of one's own file is not removed, a folder without one not added, and one that is not served neither
    sleeps nor wakes; the files are as before."""
    before = place.config.read_text()
    async with calling(place) as client:
        found = await client(SERVICE, "ListModels")
        removed = await refusal(client, "RemoveModel", pb.RemoveModelRequest(name="athanor-mini"))
        added = await refusal(client, "AddModel", pb.AddModelRequest(name="new", path=str(place.folder)))
        asleep = [await refusal(client, "SleepModel", pb.SleepModelRequest(name="none"))]
        asleep.append(await refusal(client, "WakeModel", pb.WakeModelRequest(name="none")))
    assert [(one.name, one.state) for one in found.models] == [("athanor-mini", "serving")]
    assert removed.code() is added.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert [one.code() for one in asleep] == [grpc.StatusCode.NOT_FOUND] * 2
    assert place.config.read_text() == before and not (place.folder / "models.d").exists()


async def test_keys_of_a_model_are_a_matter_of_security(place: Place) -> None:
    """The role operator may not say whose signature a model needs: with a key of its own, any files would be served.
    With the role security beside it the call gets as far as one without the setting does (control)."""
    answers = []
    for roles in ((OperatorRole.OPERATOR,), (OperatorRole.OPERATOR, OperatorRole.SECURITY)):
        held = Roles(frozenset(), frozenset((role, os.geteuid()) for role in roles))
        async with calling(place, held) as client:
            for settings in (["signed_by=[own]"], ["kv_bytes=1000000"]):
                asked = pb.AddModelRequest(name="new", path=str(place.folder), settings=settings)
                answers.append(await refusal(client, "AddModel", asked))
    codes = [answer.code() for answer in answers]
    assert codes == [grpc.StatusCode.PERMISSION_DENIED, *[grpc.StatusCode.FAILED_PRECONDITION] * 3]
    assert "AddModel with signed_by needs the role security" in (answers[0].details() or "")
    assert not (place.folder / "models.d").exists()


async def test_a_change_without_its_caller_keeps_its_place(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves while its change waits frees no place among the calls before that has ended: it is held with
    its message. Control: behind its end the next call is served."""
    monkeypatch.setattr("appliance.operator.api.shares.MAX_CALLS", 1)
    roles = Roles(frozenset({os.geteuid()}))
    front, address = OperatorFront(place.config), f"unix:{place.socket}"
    async with serving(place.socket, front, roles, 5.0), grpc.aio.insecure_channel(address, OWN_POOL) as channel:
        client, turn = Client(channel), front._turns[ChangeTurn.REQUESTS]
        async with turn:
            change = channel.unary_unary(f"/{SERVICE.full_name}/Drain")(b"")
            async with asyncio.timeout(20):
                while not front._running:
                    await asyncio.sleep(0.01)
            change.cancel()
            for _ in range(3):
                refused = await refusal(client, "GetServerInfo", pb.GetServerInfoRequest())
                assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with asyncio.timeout(20):
            while front._running:
                await asyncio.sleep(0.01)
        assert (await client(SERVICE, "GetServerInfo")).draining


async def test_forgetting_needs_keys(place: Place) -> None:
    """Where the configuration keeps nothing of tenants, there is nothing to destroy, and the answer says so."""
    async with calling(place) as client:
        refused = await refusal(client, "ForgetTenant", pb.ForgetTenantRequest(tenant="alpha"))
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION and "no keys" in (refused.details() or "")


async def test_each_call_is_told_to_the_metrics(place: Place, appliance: FakeAppliance) -> None:
    """Method and status of each, refused ones too; reflection is none of them."""
    async with calling(place) as client:
        await client(SERVICE, "ListModels")
        await refusal(client, "GetTenant", pb.GetTenantRequest())
    told = [(one.method.rpartition("/")[2], one.outcome) for one in appliance.called]
    assert told == [("ListModels", "OK"), ("GetTenant", "INVALID_ARGUMENT")]
