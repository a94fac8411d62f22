"""The methods of ``athanor.admin.v1``, by the functions of ``athanor tenant``, ``key``, ``model`` and ``status``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.errors import ConfigError, InvalidRequestError, StoredNotFoundError
from appliance.common.live_requests import DrainStatus, LiveRequests
from appliance.common.operator_roles import OperatorRole, require
from appliance.common.status import ApplianceStatus
from appliance.common.version import VERSION
from appliance.operator.api.commands import commanding, run_command
from appliance.operator.api.generated import admin_pb2 as pb
from appliance.operator.api.method import ChangeTurn, Method, Work
from appliance.operator.cli import key, key_list, model_serving, model_sleep, tenant, tenant_list, tenant_show
from appliance.operator.cli.admin_client import UnreachableError, ask, read, try_ask
from appliance.operator.cli.key_in_force import wait_for
from appliance.operator.cli.model_states import served_rows
from appliance.operator.cli.tenant_change import key_files_of
from appliance.operator.cli.terminal import Format

SERVICE = "athanor.admin.v1.AdminService"

SIGNED_BY = "signed_by"
"""Setting of a model that names the keys that must have signed it."""

NOT_FOUND = 404
"""Status of an answer about a request that is over."""

T = TypeVar("T")

_ROLES = {
    OperatorRole.VIEWER: pb.ROLE_VIEWER,
    OperatorRole.OPERATOR: pb.ROLE_OPERATOR,
    OperatorRole.SECURITY: pb.ROLE_SECURITY,
}


def methods() -> dict[str, Method]:
    """Return the methods by name."""
    requests: dict[str, Any] = {"turn": ChangeTurn.REQUESTS}
    models: dict[str, Any] = {"turn": ChangeTurn.MODELS, "subject": "name"}
    keys: dict[str, Any] = {"turn": ChangeTurn.KEYS}
    return {
        "GetServerInfo": Method(request=pb.GetServerInfoRequest, answer=_info),
        "Drain": Method(**requests, request=pb.DrainRequest, answer=_drain),
        "Resume": Method(**requests, request=pb.ResumeRequest, answer=_resume),
        "ListTenants": Method(request=pb.ListTenantsRequest, answer=_tenants),
        "GetTenant": Method(request=pb.GetTenantRequest, answer=_tenant, subject="tenant"),
        # Without a subject: beside the order's entry, which has a pseudonym, a name would say whose that was.
        "ForgetTenant": Method(**keys, request=pb.ForgetTenantRequest, answer=_forget),
        "ListCredentials": Method(request=pb.ListCredentialsRequest, answer=_keys, subject="tenant"),
        "CreateCredential": Method(**keys, request=pb.CreateCredentialRequest, answer=_create, subject="tenant"),
        "RevokeCredential": Method(**keys, request=pb.RevokeCredentialRequest, answer=_revoke, subject="ids"),
        "RotateCredential": Method(**keys, request=pb.RotateCredentialRequest, answer=_rotate, subject="id"),
        "ListRequests": Method(request=pb.ListRequestsRequest, answer=_requests, subject="tenant"),
        "CancelRequest": Method(**requests, request=pb.CancelRequestRequest, answer=_cancel, subject="id"),
        "ListModels": Method(request=pb.ListModelsRequest, answer=_models),
        "AddModel": Method(**models, request=pb.AddModelRequest, answer=_add),
        "RemoveModel": Method(**models, request=pb.RemoveModelRequest, answer=_remove),
        "SleepModel": Method(**models, request=pb.SleepModelRequest, answer=_sleep),
        "WakeModel": Method(**models, request=pb.WakeModelRequest, answer=_wake),
    }


def _named(value: str, field: str) -> str:
    """Return a name of the request.

    Raises:
        InvalidRequestError: it is empty.
    """
    if not value:
        raise InvalidRequestError(f"{field} must be named", param=field)
    return value


def _asked(work: Work, kind: type[T], path: str, method: str = "GET", *statuses: int) -> T:
    """What the gateway's admin listener answers.

    Raises:
        UnavailableError: nothing answers.
        ConfigError: it refuses.
    """
    found: list[T] = []
    with commanding():
        found.append(read(kind, ask(work.config().listen.admin, path, method), *statuses))
    return found[0]


def _moment(text: str | None) -> Timestamp | None:
    if text is None:
        return None
    found = Timestamp()
    found.FromDatetime(datetime.fromisoformat(text))
    return found


def _info(_asked_for: pb.GetServerInfoRequest, work: Work) -> pb.GetServerInfoResponse:
    answer = pb.GetServerInfoResponse(version=VERSION, roles=sorted(_ROLES[one] for one in work.roles))
    admin = work.config().listen.admin
    try:
        try_ask(admin, "/health/live")
    except UnreachableError:
        return answer
    status, drain = _asked(work, ApplianceStatus, "/status"), _asked(work, DrainStatus, "/drain")
    answer.running, answer.draining = True, drain.draining
    answer.ready = not drain.draining and all(one.state == "ready" for one in status.models)
    answer.started_at.FromMilliseconds(round(status.started_at * 1_000))
    answer.sandbox, answer.policy_digest = status.sandbox, status.policy.digest
    answer.models.extend(one.name for one in status.models if not one.tenant)
    answer.running_requests = drain.running
    return answer


def _drain(_asked_for: pb.DrainRequest, work: Work) -> pb.DrainResponse:
    return pb.DrainResponse(running_requests=_asked(work, DrainStatus, "/drain", "POST").running)


def _resume(_asked_for: pb.ResumeRequest, work: Work) -> pb.ResumeResponse:
    drain = _asked(work, DrainStatus, "/resume", "POST")
    status = _asked(work, ApplianceStatus, "/status")
    return pb.ResumeResponse(ready=not drain.draining and all(one.state == "ready" for one in status.models))


def _tenants(_asked_for: pb.ListTenantsRequest, work: Work) -> pb.ListTenantsResponse:
    admin = work.config().listen.admin
    found = run_command(tenant_list.list_tenants, config=work.config_path, admin=admin, output_format=Format.JSON).data
    return pb.ListTenantsResponse(
        tenants=[
            pb.Tenant(
                tenant=row["tenant"],
                isolation_class=row["isolation_class"],
                group=row["group"],
                models=row["models"],
                credentials=row["credentials"],
                keys=row["keys"],
                running_requests=row["running"],
                requests_today=row["requests_today"],
                tokens_today=row["tokens_today"],
            )
            for row in found["tenants"]
        ],
        policy_digest=found["policy"],
    )


def _tenant(asked: pb.GetTenantRequest, work: Work) -> pb.GetTenantResponse:
    admin, name = work.config().listen.admin, _named(asked.tenant, "tenant")
    found = run_command(tenant_show.show, name, config=work.config_path, admin=admin, output_format=Format.JSON).data
    return pb.GetTenantResponse(
        tenant=name,
        group=found["group"],
        settings=[_setting(row) for row in found["settings"]],
        credentials=found["credentials"],
        keys=_credentials(found["keys"] or ()),
        sharing_group=found["sharing_group"] or "",
        public_prefixes=found["public_prefixes"],
        running_requests=found["running"],
        today=_use(found["used"]["today"]),
        month=_use(found["used"]["month"]),
        currency=found["currency"],
        policy_digest=found["digest"],
    )


def _setting(row: Mapping[str, Any]) -> pb.TenantSetting:
    origin = row["origin"]
    place = "" if origin is None else f"{origin['file']}:{origin['line']}:{origin['column']}"
    return pb.TenantSetting(name=row["path"], value="" if row["value"] is None else str(row["value"]), origin=place)


def _use(used: Mapping[str, Any] | None) -> pb.TenantUse | None:
    return None if used is None else pb.TenantUse(**used)


def _forget(asked: pb.ForgetTenantRequest, work: Work) -> pb.ForgetTenantResponse:
    name = _named(asked.tenant, "tenant")
    found = run_command(tenant.shred, name, config=work.config_path, yes=True, output_format=Format.JSON).data
    return pb.ForgetTenantResponse(had_key=found["had_key"], objects=found["objects"])


def _credentials(rows: Iterable[Mapping[str, Any]]) -> list[pb.Credential]:
    return [
        pb.Credential(
            id=row["id"],
            tenant=row["tenant"],
            state=row["state"],
            scopes=row["scopes"] or (),
            limited=row["scopes"] is not None,
            created_at=_moment(row["created"]),
            expires_at=_moment(row["expires"]),
            last_used_at=_moment(row["last_used"]),
        )
        for row in rows
    ]


def _keys(asked: pb.ListCredentialsRequest, work: Work) -> pb.ListCredentialsResponse:
    config = work.config()
    uses = None if config.audit is None else config.audit.directory
    found = run_command(key_list.list_keys, config.credentials, uses, asked.tenant, output_format=Format.JSON).data
    return pb.ListCredentialsResponse(credentials=_credentials(found["keys"]))


def _create(asked: pb.CreateCredentialRequest, work: Work) -> pb.CreateCredentialResponse:
    files = key_files_of(work.config())
    found = run_command(
        key.create,
        _named(asked.tenant, "tenant"),
        files.credentials,
        files.pepper,
        key_id=asked.id or None,
        expires=asked.expires or None,
        scope=list(asked.scopes) or None,
        output_format=Format.JSON,
    ).data
    _await(work, files.credentials)
    return pb.CreateCredentialResponse(id=found["id"], credential=found["credential"], key=found["key"])


def _revoke(asked: pb.RevokeCredentialRequest, work: Work) -> pb.RevokeCredentialResponse:
    config = work.config()
    found = run_command(
        key.revoke, list(asked.ids), asked.tenant, config.credentials, config.listen.admin, Format.JSON
    ).data
    _await(work, config.credentials)
    return pb.RevokeCredentialResponse(revoked=found["revoked"])


def _rotate(asked: pb.RotateCredentialRequest, work: Work) -> pb.RotateCredentialResponse:
    config = work.config()
    files = key_files_of(config)
    found = run_command(
        key.rotate,
        _named(asked.id, "id"),
        files.credentials,
        files.pepper,
        overlap=asked.overlap or key.DEFAULT_OVERLAP,
        expires=asked.expires or None,
        replace=asked.replace,
        admin=config.listen.admin,
        output_format=Format.JSON,
    ).data
    _await(work, files.credentials)
    return pb.RotateCredentialResponse(id=found["id"], key=found["key"], old_until=_moment(found["old_until"]))


def _await(work: Work, credentials: Path) -> None:
    """Wait until the key table is in force, where an appliance runs; that it is not is no failure of the change."""
    digest = hashlib.sha256(credentials.read_bytes()).hexdigest()
    with suppress(ConfigError):  # written, and the appliance has a problem of its own, which status and doctor tell
        run_command(wait_for, work.config().listen.admin, credentials, digest)


def _requests(asked: pb.ListRequestsRequest, work: Work) -> pb.ListRequestsResponse:
    found = _asked(work, LiveRequests, f"/requests?tenant={quote(asked.tenant, safe='')}")
    return pb.ListRequestsResponse(
        requests=[
            pb.LiveRequest(
                id=one.id,
                tenant=one.tenant,
                model=one.model,
                credential=one.credential,
                state=one.state,
                age_seconds=one.age_s,
                input_tokens=one.input_tokens,
                output_tokens=one.output_tokens,
            )
            for one in found.requests
        ],
        left_out=found.left_out,
    )


def _cancel(asked: pb.CancelRequestRequest, work: Work) -> pb.CancelRequestResponse:
    name = _named(asked.id, "id")
    with commanding():
        answer = ask(work.config().listen.admin, f"/requests/{quote(name, safe='')}/cancel", "POST")
        if answer.status != NOT_FOUND:
            read(LiveRequests, answer)
    if answer.status == NOT_FOUND:
        raise StoredNotFoundError(f"no request {name[:64]} waits or runs", param="id")
    return pb.CancelRequestResponse()


def _models(_asked_for: pb.ListModelsRequest, work: Work) -> pb.ListModelsResponse:
    rows = served_rows(work.config_path)
    fields = ("name", "state", "reason", "written")
    return pb.ListModelsResponse(models=[pb.Model(**{name: row[name] for name in fields}) for row in rows])


def _add(asked: pb.AddModelRequest, work: Work) -> pb.AddModelResponse:
    if any(one.partition("=")[0].strip() == SIGNED_BY for one in asked.settings):
        # It stands in place of the configuration's model_keys: it decides which models may be served.
        require(work.roles, OperatorRole.SECURITY, f"AddModel with {SIGNED_BY}", work.given_by)
    found = run_command(
        model_serving.add,
        _named(asked.name, "name"),
        Path(asked.path) if asked.path else None,
        None,
        asked.digest or None,
        list(asked.settings),
        config=work.config_path,
        admin=None,
        wait=float(asked.wait_seconds),
        dry_run=asked.validate_only,
        yes=True,
        output_format=Format.JSON,
    )
    needs = {name: found.data[name] for name in ("weights_bytes", "kv_bytes", "free_bytes")}
    return pb.AddModelResponse(**needs, messages=found.lines)


def _remove(asked: pb.RemoveModelRequest, work: Work) -> pb.RemoveModelResponse:
    name, wait = _named(asked.name, "name"), float(asked.wait_seconds)
    found = run_command(model_serving.stop, name, config=work.config_path, admin=None, wait=wait, yes=True)
    return pb.RemoveModelResponse(messages=found.lines)


def _sleep(asked: pb.SleepModelRequest, work: Work) -> pb.SleepModelResponse:
    return pb.SleepModelResponse(**_rest(model_sleep.sleep, asked.name, work))


def _wake(asked: pb.WakeModelRequest, work: Work) -> pb.WakeModelResponse:
    return pb.WakeModelResponse(**_rest(model_sleep.wake, asked.name, work))


def _rest(order: Any, name: str, work: Work) -> dict[str, str]:
    admin = work.config().listen.admin
    found = run_command(order, _named(name, "name"), admin=admin, output_format=Format.JSON).data
    if not found["ok"]:
        raise ConfigError(found["message"]) if found["found"] else StoredNotFoundError(found["message"], param="name")
    return {"state": found["state"], "message": found["message"]}
