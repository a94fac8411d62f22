"""The methods of ``athanor.policy.v1`` over the real socket, real files and a real admin listener."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.shadow_status import ShadowRow, ShadowStatus
from appliance.common.status import ReloadOutcome
from appliance.operator.api.commands import commanding
from appliance.operator.api.generated import policy_pb2 as pb
from appliance.operator.cli.policy_init import init
from appliance.operator.cli.terminal import Format
from policy.changes import changes
from policy.files import Source
from policy.loader import load_policy
from policy.schema import schema_text
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.operator.api.place import NEW, POLICY, Client, Place, a_place, calling

SERVICE = pb.DESCRIPTOR.services_by_name["PolicyService"]


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


def files(text: str, name: str = "") -> list[pb.PolicyFile]:
    """A policy of one file."""
    return [pb.PolicyFile(name=name, text=text)]


async def refusal(client: Client, method: str, request: object) -> grpc.aio.AioRpcError:
    """The error of a call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client(SERVICE, method, request)  # type: ignore[arg-type]
    return caught.value


async def test_check_tells_problems_and_what_holds(place: Place) -> None:
    """The configured policy and a good one are ok, with their tenants; a bad one is an answer with line and column in
    the names of the request, and nothing on the disk has changed."""
    async with calling(place) as client:
        configured = await client(SERVICE, "Check")
        good = await client(SERVICE, "Check", pb.CheckRequest(files=files(NEW)))
        bad = await client(SERVICE, "Check", pb.CheckRequest(files=files("version: 1\ntenants: {a: {modles: []}}\n")))
        strict = await client(SERVICE, "Check", pb.CheckRequest(files=files(NEW), strict=True))
    assert (configured.ok, configured.digest, list(configured.tenants)) == (True, place.digest, ["alpha"])
    assert good.ok and good.digest != configured.digest
    assert not bad.ok and bad.problems[0].file == "policy.yaml" and bad.problems[0].line == 2
    assert "'alpha-1'" in " ".join(one.message for one in good.warnings) and not strict.ok
    assert place.policy.read_text() == POLICY


async def test_explain_names_the_rule(place: Place) -> None:
    """A request at the limit is told to be refused or to wait by the rule, with its place; one within it is served."""
    asked = {"tenant": "alpha", "model": "athanor-mini", "input_tokens": 5}
    async with calling(place) as client:
        served = await client(SERVICE, "Explain", pb.ExplainRequest(**asked))
        busy = await client(SERVICE, "Explain", pb.ExplainRequest(**asked, running=4))
        other = await client(SERVICE, "Explain", pb.ExplainRequest(**asked, running=4, files=files(NEW)))
        nobody = await refusal(client, "Explain", pb.ExplainRequest(model="athanor-mini"))
        unknown = await refusal(client, "Explain", pb.ExplainRequest(**asked, feature="flight"))
    assert served.effect == pb.EFFECT_ALLOW and served.max_output_tokens > 0 and served.origin.line == 3
    assert (busy.effect, busy.rule, busy.limit) == (pb.EFFECT_DENY, "tenants.alpha.limits.concurrency", 4)
    assert other.effect == pb.EFFECT_ALLOW
    assert nobody.code() is unknown.code() is grpc.StatusCode.INVALID_ARGUMENT


RULED = """version: 1
prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 1}]}
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    networks: ["10.0.0.0/8"]
    hours: ["mon-fri 08:00-18:00"]
    regions: [eu]
    external: refuse
    content: {denied_fields: [seed], roles: [user], max_request_bytes: 100}
    end_users: {concurrency: 2, requests_per_minute: 5, output_tokens_per_minute: 50}
    limits:
      input_tokens_per_minute: 500
      output_tokens_per_minute: 500
      kv_tokens: 1000
      spend_per_day: 2
      spend_per_month: 3
"""
WEDNESDAY = 1_795_600_800
"""2026-11-25 10:00 UTC."""


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        pytest.param({"address": "192.0.2.1"}, "networks", id="address"),
        pytest.param({"at": Timestamp(seconds=WEDNESDAY + 12 * 3600)}, "hours", id="at"),
        pytest.param({"region": "us"}, "regions", id="region"),
        pytest.param({"external": ["athanor-mini"]}, "external", id="external"),
        pytest.param({"fields": ["seed"]}, "content.denied_fields[0]", id="fields"),
        pytest.param({"roles": ["system"]}, "content.roles", id="roles"),
        pytest.param({"content_bytes": 101}, "content.max_request_bytes", id="content-bytes"),
        pytest.param({"input_tokens_left": 4}, "limits.input_tokens_per_minute", id="input-tokens-left"),
        pytest.param({"output_tokens_left": 4}, "limits.output_tokens_per_minute", id="output-tokens-left"),
        pytest.param({"kv_tokens_held": 995}, "limits.kv_tokens", id="kv-tokens-held"),
        pytest.param({"end_user_running": 2}, "end_users.concurrency", id="end-user-running"),
        pytest.param({"end_user_requests_left": 0}, "end_users.requests_per_minute", id="end-user-requests-left"),
        pytest.param({"end_user_output_left": 1}, "end_users.output_tokens_per_minute", id="end-user-output-left"),
        pytest.param({"spent_today": 2.0}, "limits.spend_per_day", id="spent-today"),
        pytest.param({"spent_this_month": 3.0}, "limits.spend_per_month", id="spent-this-month"),
    ],
)
async def test_explain_takes_what_rules_look_at(place: Place, asked: dict[str, Any], rule: str) -> None:
    """Each kind of rule is named as that which denies a request with one thing changed that it looks at. Control: the
    request without the change is served."""
    inside = {"address": "10.1.2.3", "at": Timestamp(seconds=WEDNESDAY), "region": "eu", "roles": ["user"]}
    whole = {"tenant": "alpha", "model": "athanor-mini", "input_tokens": 5, "max_tokens": 10, **inside}
    async with calling(place) as client:
        served = await client(SERVICE, "Explain", pb.ExplainRequest(**whole, files=files(RULED)))
        denied = await client(SERVICE, "Explain", pb.ExplainRequest(**(whole | asked), files=files(RULED)))
    assert served.effect == pb.EFFECT_ALLOW, served.message
    assert (denied.effect, denied.rule) == (pb.EFFECT_DENY, f"tenants.alpha.{rule}"), denied.message


@pytest.mark.parametrize(
    "asked",
    [
        {"address": "here"},
        {"fields": ["colour"]},
        {"roles": ["king"]},
        {"spent_today": -1.0},
        {"spent_today": math.nan},
        {"spent_today": 1e10},
        {"spent_this_month": 1e300},
        {"input_tokens": 0},
        {"at": Timestamp(seconds=1 << 60)},
        {"at": Timestamp(seconds=253_402_300_799)},
        {"at": Timestamp(seconds=1, nanos=-5)},
    ],
    ids=[
        *("address", "field", "role", "amount", "no-number", "amount-beyond-the-book", "amount-beyond-integers"),
        *("no-prompt", "time", "last-second-of-9999", "nanoseconds"),
    ],
)
async def test_what_explain_cannot_ask_is_refused(place: Place, asked: dict[str, Any]) -> None:
    """An address, field, role, amount or time that is none is the caller's mistake, not a decision."""
    async with calling(place) as client:
        refused = await refusal(client, "Explain", pb.ExplainRequest(tenant="alpha", model="m", **asked))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT


CASES = """cases:
  - name: four run
    ask: {tenant: alpha, model: m}
    use: {running: 4}
    expect: deny
  - name: it is never allowed
    ask: {tenant: alpha, model: m}
    expect: {effect: deny, rule: tenants.alpha.models}
"""


async def test_cases_are_decided(place: Place) -> None:
    """The configured policy and one of the request; a failed case is told with its place, by the names of the request.
    A policy that the cases name is not read, and what is no case, or no policy, is the caller's mistake."""
    secret = place.folder / "secret.yaml"
    secret.write_text("password: x\n")
    many = "cases:\n" + "".join(
        f"  - {{name: c{n}, ask: {{tenant: alpha, model: m}}, expect: deny}}\n" for n in range(150)
    )
    async with calling(place) as client:
        configured = await client(SERVICE, "Test", pb.TestRequest(cases=CASES))
        other = await client(SERVICE, "Test", pb.TestRequest(cases=CASES, files=files(NEW)))
        named = await client(SERVICE, "Test", pb.TestRequest(cases=f"policy_file: {secret}\n{CASES}"))
        bounded = await client(SERVICE, "Test", pb.TestRequest(cases=many))
        wrong = await refusal(client, "Test", pb.TestRequest(cases="cases: 3"))
        no_policy = await refusal(client, "Test", pb.TestRequest(cases=CASES, files=files("version: 2")))
        empty = await refusal(client, "Test", pb.TestRequest())
    assert (configured.ok, configured.cases, configured.failed) == (False, 2, 1)
    (failed,) = configured.failures
    assert (failed.name, failed.line, failed.problems[0].file) == ("it is never allowed", 6, "cases")
    assert (failed.problems[0].line, "expected deny, found allow" in failed.problems[0].message) == (8, True)
    assert (other.failed, named.failed) == (2, 1)
    assert (bounded.failed, len(bounded.failures)) == (150, 100)
    assert {one.code() for one in (wrong, no_policy, empty)} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert "cases:1:8: must be a list, found 3" in wrong.details()
    assert str(place.folder) not in wrong.details() + no_policy.details() and "/tmp" not in wrong.details()


async def test_diff_tells_changes_and_refuses_bad_policies(place: Place) -> None:
    """The sentences of ``athanor policy diff``, from the configured policy or another; a policy with problems is the
    caller's mistake."""
    async with calling(place) as client:
        found = await client(SERVICE, "Diff", pb.DiffRequest(files=files(NEW)))
        back = await client(SERVICE, "Diff", pb.DiffRequest(files=files(POLICY), old_files=files(NEW), no_replay=True))
        bad = await refusal(client, "Diff", pb.DiffRequest(files=files("version: 2")))
        named = await refusal(client, "Diff", pb.DiffRequest(files=files(NEW, "../policy.yaml")))
    (change,) = found.changes
    assert (change.subject, change.direction) == ("alpha", pb.DIRECTION_WIDER)
    assert found.replay.problem and not back.HasField("replay")
    assert [one.direction for one in back.changes] == [pb.DIRECTION_NARROWER]
    assert bad.code() is named.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "policy.yaml:1" in (bad.details() or "")


async def test_apply_puts_a_policy_in_force_or_changes_nothing(place: Place, appliance: FakeAppliance) -> None:
    """A dry run and a wrong digest write nothing; an apply writes and reloads; one that the appliance refuses leaves
    the files as they were."""
    wanted = pb.ApplyRequest(files=files(NEW), wait=True, expected_digest=place.digest)
    async with calling(place) as client:
        dry = await client(SERVICE, "Apply", pb.ApplyRequest(files=files(NEW), validate_only=True))
        assert dry.outcome == pb.OUTCOME_VALIDATED and place.policy.read_text() == POLICY and not appliance.reloads
        done = await client(SERVICE, "Apply", wanted)
        assert done.outcome == pb.OUTCOME_IN_FORCE and place.policy.read_text() == NEW
        assert [one.subject for one in done.changes] == ["alpha"] and appliance.reloads == 1
        stale = await refusal(client, "Apply", wanted)
        appliance.outcome = ReloadOutcome(ok=False, digest="", message="no", problems=("the gateway refuses it",))
        refused = await refusal(client, "Apply", pb.ApplyRequest(files=files(POLICY), wait=True))
        drop_in = await refusal(
            client, "Apply", pb.ApplyRequest(files=[*files(NEW, "policy.yaml"), *files("", "policy.d/a.yaml")])
        )
    assert stale.code() is refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "the gateway refuses it" in (refused.details() or "") and place.policy.read_text() == NEW
    assert drop_in.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_apply_that_nobody_waits_for_is_carried_to_its_end(place: Place) -> None:
    """The answer comes at once; by the end of the service, which waits for it, the policy is there."""
    async with calling(place) as client:
        begun = await client(SERVICE, "Apply", pb.ApplyRequest(files=files(NEW)))
        assert begun.outcome == pb.OUTCOME_STARTED
    assert place.policy.read_text() == NEW


async def test_history_and_rollback(appliance: FakeAppliance) -> None:
    """Both versions are told, the newest first, with who put them in force; texts and changes only of the one that is
    asked for. A rollback writes the earlier one back. Without an audit log there is no history; with one, and nothing
    that takes entries, nothing is changed."""
    appliance.reset()
    with a_place(appliance.url, audit=True) as place:
        place.keep(1_000)
        place.policy.write_text(NEW)
        place.keep(2_500, "user 0, logged in as 1000")
        async with calling(place) as client:
            found = await client(SERVICE, "History")
            one = await client(SERVICE, "History", pb.HistoryRequest(version=1))
            two = await client(SERVICE, "History", pb.HistoryRequest(version=2))
            dry = await refusal(client, "Rollback", pb.RollbackRequest(wait=True))
        assert [version.version for version in found.versions] == [2, 1]
        assert found.versions[0].since.ToMilliseconds() == 2_500 and not found.versions[0].files[0].text
        assert one.versions[0].files[0].text == POLICY
        assert [version.by for version in found.versions] == ["user 0, logged in as 1000", ""]
        assert (list(one.versions[0].changes), one.versions[0].note) == ([], "the oldest version that is kept")
        expected = changes(load_policy([Source("p", POLICY)]), load_policy([Source("p", NEW)]))
        assert [change.text for change in two.versions[0].changes] == [change.sentence for change in expected] != []
        assert not found.versions[0].changes
        assert dry.code() is grpc.StatusCode.UNAVAILABLE and place.policy.read_text() == NEW
    with a_place(appliance.url) as place:
        async with calling(place) as client:
            nothing = await refusal(client, "History", pb.HistoryRequest())
    assert nothing.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_schema_is_that_of_the_command(place: Place) -> None:
    """The same text; the schema of cases is another one."""
    async with calling(place) as client:
        found = await client(SERVICE, "Schema")
        cases = await client(SERVICE, "Schema", pb.SchemaRequest(cases=True))
    assert found.json_schema == schema_text()
    assert json.loads(cases.json_schema) != json.loads(found.json_schema)


async def test_init_gives_what_the_command_writes(place: Place, tmp_path: Path) -> None:
    """Policy and schema are the files of ``athanor policy init``; Check takes the policy as it is, and the names of the
    schema agree. What is no tenant's id and no path is refused, with a path whose line break would end a comment, and
    an id that would not fit the headers that errors are in."""
    asked = tmp_path / "drafts.yaml"
    with commanding():
        init(asked, "acme", Format.TABLE)
    async with calling(place) as client:
        found = await client(SERVICE, "Init", pb.InitRequest(tenant="acme", path=str(asked)))
        plain = await client(SERVICE, "Init")
        checked = await client(SERVICE, "Check", pb.CheckRequest(files=files(plain.policy)))
        tenant = await refusal(client, "Init", pb.InitRequest(tenant="Acme Inc"))
        long = await refusal(client, "Init", pb.InitRequest(tenant="a" * 100_000))
        schema = await refusal(client, "Init", pb.InitRequest(path="a/policy.schema.json"))
        lines = await refusal(client, "Init", pb.InitRequest(path="a\ntenants: {}"))
        folder = await refusal(client, "Init", pb.InitRequest(path="/"))
    assert found.policy == asked.read_text() and found.json_schema == (tmp_path / found.schema_name).read_text()
    assert checked.ok and list(checked.tenants) == ["alpha"] and f"$schema=./{plain.schema_name}" in plain.policy
    assert (tenant.code(), "no tenant id" in str(tenant.details())) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    assert schema.code() is lines.code() is folder.code() is long.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert place.policy.read_text() == POLICY and not place.policy.with_name(found.schema_name).exists()


async def test_a_policy_is_tried_and_no_longer(place: Place, appliance: FakeAppliance) -> None:
    """SetShadow writes the policy beside the configured one and reloads; GetShadow has what the listener counts;
    ClearShadow removes it and reloads. A policy with problems, and one with a drop-in beside it, write nothing and are
    errors, as is a refused reload."""
    shadow = place.folder / "policy.shadow.yaml"
    row = ShadowRow("alpha", "refuses", "tenants.alpha.models", 7)
    tried = {"digest": "ab" * 32, "since": 1_790_000_000.5, "verdicts": {"agrees": 3, "refuses": 7}, "rows": (row,)}
    async with calling(place) as client:
        none = (await client(SERVICE, "GetShadow")).shadow
        empty = await refusal(client, "SetShadow", pb.SetShadowRequest())
        bad = await refusal(client, "SetShadow", pb.SetShadowRequest(files=files("version: 1\ntenants: {a: 3}\n")))
        both = [*files(NEW, "policy.yaml"), *files(NEW, "policy.d/more.yaml")]
        more = await refusal(client, "SetShadow", pb.SetShadowRequest(files=both))
        assert (shadow.exists(), appliance.reloads) == (False, 0)
        appliance.shadow = ShadowStatus(file=str(shadow), **tried)
        begun = (await client(SERVICE, "SetShadow", pb.SetShadowRequest(files=files(NEW)))).shadow
        assert (shadow.read_text(), place.policy.read_text(), appliance.reloads) == (NEW, POLICY, 1)
        got = (await client(SERVICE, "GetShadow")).shadow
        appliance.outcome = ReloadOutcome(ok=False, digest="", message="no", problems=("keys.json: gone",))
        refused = await refusal(client, "SetShadow", pb.SetShadowRequest(files=files(NEW)))
        appliance.reset()
        await client(SERVICE, "ClearShadow")
        assert (shadow.exists(), appliance.reloads) == (False, 1)
        await client(SERVICE, "ClearShadow")
    assert (none.digest, none.HasField("since")) == ("", False)
    assert empty.code() is bad.code() is more.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "policy.yaml:2" in str(bad.details())
    assert begun == got and got.differences[0].rule == "tenants.alpha.models" and got.verdicts["refuses"] == 7
    assert got.since.seconds == 1_790_000_000
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION and "keys.json: gone" in str(refused.details())


async def test_a_shadow_that_does_not_hold_beside_the_drop_ins_is_told(place: Place, appliance: FakeAppliance) -> None:
    """The problems of a policy that the appliance did not take are an answer, without a digest."""
    appliance.shadow = ShadowStatus(file="f", problems=("policy.d/a.yaml:1:1: a tenant twice",))
    async with calling(place) as client:
        found = (await client(SERVICE, "SetShadow", pb.SetShadowRequest(files=files(NEW)))).shadow
    assert (list(found.problems), found.digest) == (["policy.d/a.yaml:1:1: a tenant twice"], "")


async def test_an_error_of_many_problems_reaches_its_caller(place: Place) -> None:
    """A policy with so many problems that all of them do not fit the headers of an answer: the first ones are told,
    with the number of characters that are not."""
    tenants = "".join(f"  tenant-{number}: {{modles: []}}\n" for number in range(400))
    async with calling(place) as client:
        many = await refusal(client, "SetShadow", pb.SetShadowRequest(files=files(f"version: 1\ntenants:\n{tenants}")))
    assert many.code() is grpc.StatusCode.INVALID_ARGUMENT, many.details()
    assert "policy.yaml:3:" in str(many.details()) and "more characters" in str(many.details())
