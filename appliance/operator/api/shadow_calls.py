"""The methods of ``athanor.policy.v1`` about a policy that is tried without effect, by ``athanor policy shadow``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.errors import InvalidRequestError
from appliance.operator.api.commands import run_command
from appliance.operator.api.drafts import draft
from appliance.operator.api.generated import policy_pb2 as pb
from appliance.operator.api.method import ChangeTurn, Method, Work
from appliance.operator.api.policy_calls import check_alone, read_through
from appliance.operator.cli.policy_shadow import shadow
from appliance.operator.cli.terminal import Format


def methods() -> dict[str, Method]:
    """Return the methods by name."""
    return {
        "GetShadow": Method(request=pb.GetShadowRequest, answer=_get),
        "SetShadow": Method(turn=ChangeTurn.POLICY, request=pb.SetShadowRequest, answer=_set),
        "ClearShadow": Method(turn=ChangeTurn.POLICY, request=pb.ClearShadowRequest, answer=_clear),
    }


def _run(work: Work, new: Path | None = None, *, off: bool = False) -> Any:
    """Run the command, and return its document: the trial, or the problems of ``new``.

    Raises:
        ApplianceError: the command failed.
    """
    admin = work.config().listen.admin
    return run_command(
        shadow, new, off, config=work.config_path, admin=admin, output_format=Format.JSON, problems=True
    ).data


def _get(_asked: pb.GetShadowRequest, work: Work) -> pb.GetShadowResponse:
    return pb.GetShadowResponse(shadow=_trial(_run(work)))


def _set(asked: pb.SetShadowRequest, work: Work) -> pb.SetShadowResponse:
    configured = work.config().policy
    if not asked.files:
        raise InvalidRequestError("the policy to try has no files", param="files")
    check_alone(asked.files, configured)
    with draft(asked.files, configured) as one:
        found = read_through(one, _run(work, one.policy))
    return pb.SetShadowResponse(shadow=_trial(found))


def _clear(_asked: pb.ClearShadowRequest, work: Work) -> pb.ClearShadowResponse:
    _run(work, off=True)
    return pb.ClearShadowResponse()


def _trial(found: Mapping[str, Any]) -> pb.Shadow:
    told = pb.Shadow(digest=found["digest"], problems=found["problems"], verdicts=found["verdicts"])
    told.differences.extend(
        pb.ShadowDifference(tenant=row["tenant"], verdict=row["verdict"], rule=row["rule"], requests=row["requests"])
        for row in found["rows"]
    )
    if found["digest"]:
        told.since.CopyFrom(Timestamp(seconds=int(found["since"])))
    return told
