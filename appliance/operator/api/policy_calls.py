"""The methods of ``athanor.policy.v1``, by the functions of ``athanor policy``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.errors import ConfigError, InvalidRequestError, os_errors_as
from appliance.common.policy_history import Version
from appliance.operator.api.commands import commanding, problems_of, run_command
from appliance.operator.api.drafts import MAX_NAME_CHARS, Draft, draft
from appliance.operator.api.generated import policy_pb2 as pb
from appliance.operator.api.method import ChangeTurn, Method, Work
from appliance.operator.cli.policy import check_policy
from appliance.operator.cli.policy_cases import run as run_cases
from appliance.operator.cli.policy_diff import diff
from appliance.operator.cli.policy_explain import explain
from appliance.operator.cli.policy_init import DEFAULT_PATH, DEFAULT_TENANT, first_text, schema_beside
from appliance.operator.cli.policy_sources import read
from appliance.operator.cli.policy_versions import (
    NewPolicy,
    changed_by,
    given,
    kept_history,
    put_policy,
    restored,
    version_before,
)
from appliance.operator.cli.terminal import Format
from policy.case_schema import case_schema_text
from policy.changes import Change, changes
from policy.errors import PolicyError
from policy.feature import Feature
from policy.loader import load_policy
from policy.model import PolicySet
from policy.schema import schema_text

SERVICE = "athanor.policy.v1.PolicyService"

MAX_FAILURES = 100
"""Failed cases that an answer tells; it has the number of all."""

CASES = "cases"
"""Name of a request's file of cases in its problems."""

MAX_PATH_CHARS = 256
"""Most characters of the path by which a first policy's comments name it."""

MS = 1_000
"""Milliseconds in a second."""

_DIRECTIONS = {"wider": pb.DIRECTION_WIDER, "narrower": pb.DIRECTION_NARROWER}
_EFFECTS = {"allow": pb.EFFECT_ALLOW, "wait": pb.EFFECT_WAIT, "deny": pb.EFFECT_DENY}


def methods() -> dict[str, Method]:
    """Return the methods by name, without those of a trial (``shadow_calls``)."""
    return {
        "Check": Method(request=pb.CheckRequest, answer=_check),
        "Diff": Method(request=pb.DiffRequest, answer=_diff),
        "Explain": Method(request=pb.ExplainRequest, answer=_explain),
        "Test": Method(request=pb.TestRequest, answer=_test),
        "Apply": Method(turn=ChangeTurn.POLICY, request=pb.ApplyRequest, answer=_apply, subject="expected_digest"),
        "History": Method(request=pb.HistoryRequest, answer=_history),
        "Rollback": Method(turn=ChangeTurn.POLICY, request=pb.RollbackRequest, answer=_rollback, subject="version"),
        "Schema": Method(request=pb.SchemaRequest, answer=_schema),
        "Init": Method(request=pb.InitRequest, answer=_init),
    }


@contextmanager
def _policy_of(files: Sequence[pb.PolicyFile], configured: Path) -> Iterator[Draft]:
    """The policy of a request; without files the configured one."""
    if files:
        with draft(files, configured) as made:
            yield made
    else:
        yield Draft(configured.parent, configured)


def _check(asked: pb.CheckRequest, work: Work) -> pb.CheckResponse:
    with _policy_of(asked.files, work.config().policy) as one:
        found = run_command(
            check_policy, [one.policy], work.config_path, problems=True, strict=asked.strict, output_format=Format.JSON
        ).data
        problems, warnings = found.get("problems", ()), found.get("warnings", ())
        return pb.CheckResponse(
            ok=bool(found["ok"]) and not (asked.strict and warnings),
            digest=found.get("digest", ""),
            problems=_problems(one, problems),
            warnings=_problems(one, warnings),
            tenants=sorted(found.get("tenants", ())),
        )


def _problems(one: Draft, rows: Iterable[Mapping[str, Any]]) -> list[pb.Problem]:
    return [
        pb.Problem(
            file=one.shown(row["file"]),
            line=row["line"],
            column=row["column"],
            path=row["path"],
            message=one.shown(row["message"]),
        )
        for row in rows
    ]


def read_through(one: Draft, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document of a command, unless it tells the problems of a policy.

    Raises:
        InvalidRequestError: it does.
    """
    if lines := problems_of(found):
        raise InvalidRequestError(one.shown("\n".join(lines)), param="files")
    return found


def _diff(asked: pb.DiffRequest, work: Work) -> pb.DiffResponse:
    if not asked.files:
        raise InvalidRequestError("the new policy has no files", param="files")
    configured = work.config().policy
    with draft(asked.files, configured) as new, _policy_of(asked.old_files, configured) as old:
        found = run_command(
            diff,
            [old.policy, new.policy],
            config=work.config_path,
            since=asked.since or "24h",
            no_replay=asked.no_replay,
            directory=None,
            problems=True,
            output_format=Format.JSON,
        ).data
        found = read_through(new, found)
        return pb.DiffResponse(
            old_digest=found["old_digest"],
            new_digest=found["new_digest"],
            changes=[_change(row) for row in found["changes"]],
            replay=None if asked.no_replay else _replay(found["replay"]),
        )


def _change(row: Mapping[str, Any]) -> pb.Change:
    direction = _DIRECTIONS.get(row["direction"], pb.DIRECTION_OTHER)
    return pb.Change(subject=row["subject"], kind=row["kind"], path=row["path"], direction=direction, text=row["text"])


def _replay(found: Mapping[str, Any]) -> pb.Replay:
    if found["problem"]:
        return pb.Replay(problem=found["problem"])
    refused = [
        pb.ReplayedRule(tenant=row["tenant"], rule=row["rule"], requests=row["requests"]) for row in found["refused"]
    ]
    return pb.Replay(
        since=Timestamp(seconds=int(found["since"])),
        requests=found["requests"],
        sentences=found["sentences"],
        refused=refused,
        lost=found["lost"],
    )


_AS_THEY_ARE = (
    *("running", "queued", "content_bytes", "kv_tokens_held", "end_user_running"),
    *("spent_today", "spent_this_month"),
)
"""Fields of ``ExplainRequest`` that are the command's options as they are; 0 where they are not there."""

_NAMES = ("unready", "busy", "asleep", "external", "fields", "roles")
"""Fields that are lists of names."""


def _explain(asked: pb.ExplainRequest, work: Work) -> pb.ExplainResponse:
    caller = asked.WhichOneof("caller")
    if caller is None or not getattr(asked, caller):
        raise InvalidRequestError("tenant or credential must name the caller", param="tenant")
    if not asked.model:
        raise InvalidRequestError("a model must be named", param="model")
    options: dict[str, Any] = {caller: getattr(asked, caller)}
    for there in (
        "input_tokens",
        "max_tokens",
        "region",
        "requests_left",
        "tokens_left",
        "input_tokens_left",
        "output_tokens_left",
        "end_user_requests_left",
        "end_user_output_left",
    ):
        options[there] = getattr(asked, there) if asked.HasField(there) else None
    options |= {name: getattr(asked, name) for name in _AS_THEY_ARE}
    options |= {name: list(getattr(asked, name)) for name in _NAMES}
    if asked.HasField("input_tokens") and not asked.input_tokens:
        raise InvalidRequestError("a prompt has at least one token", param="input_tokens")
    options["at"] = _moment(asked.at) if asked.HasField("at") else None
    with _policy_of(asked.files, work.config().policy) as one:
        found = run_command(
            explain,
            one.policy,
            model=asked.model,
            choices=asked.choices or 1,
            feature=_feature(asked.feature),
            address=asked.address or None,
            problems=True,
            output_format=Format.JSON,
            **options,
        ).data
        return _explanation(one, read_through(one, found))


def _test(asked: pb.TestRequest, work: Work) -> pb.TestResponse:
    if not asked.cases:
        raise InvalidRequestError("there are no cases", param="cases")
    with (
        _policy_of(asked.files, work.config().policy) as one,
        tempfile.TemporaryDirectory(prefix="athanor-cases-") as made,
    ):
        path = Path(made) / CASES
        with os_errors_as("cannot write the cases"):
            path.write_text(asked.cases, encoding="utf-8", newline="")
        try:
            found = run_command(run_cases, [path], policy=one.policy, problems=True, output_format=Format.JSON).data
        except ConfigError as error:
            raise InvalidRequestError(one.shown(error.message.replace(f"{made}/", "")), param="cases") from error
        if lines := problems_of(found):
            raise InvalidRequestError(one.shown("\n".join(lines).replace(f"{made}/", "")), param="cases")
        failed = [row for row in found["cases"] if not row["passed"]]
        return pb.TestResponse(
            ok=not failed,
            cases=len(found["cases"]),
            failed=len(failed),
            failures=[_failed(row) for row in failed[:MAX_FAILURES]],
        )


def _failed(row: Mapping[str, Any]) -> pb.FailedCase:
    problems = [
        pb.Problem(file=CASES, line=one["line"], column=one["column"], path=one["path"], message=one["message"])
        for one in row["problems"]
    ]
    return pb.FailedCase(name=row["name"], line=row["line"], problems=problems)


def _moment(at: Timestamp) -> str:
    """Return a time as the command takes it."""
    try:
        return f"{at.ToDatetime():%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError):
        raise InvalidRequestError("at is no time of the years 1 to 9999", param="at") from None


def _feature(name: str) -> Feature | None:
    try:
        return Feature(name) if name else None
    except ValueError:
        known = ", ".join(one.value for one in Feature)
        raise InvalidRequestError(f"feature {name[:40]!r}: known are {known}", param="feature") from None


def _explanation(one: Draft, found: Mapping[str, Any]) -> pb.ExplainResponse:
    origin, route, grant = found["origin"], found["route"], found["obligations"]
    return pb.ExplainResponse(
        effect=_EFFECTS[found["effect"]],
        reason=found["reason"],
        rule=found["rule"],
        message=found["message"],
        policy_digest=found["policy_digest"],
        tenant=found["tenant"] or "",
        limit=found["limit"],
        actual=found["actual"],
        retry_after_seconds=found["retry_after_s"],
        origin=None if origin is None else pb.Origin(**(origin | {"file": one.shown(origin["file"])})),
        max_output_tokens=0 if grant is None else grant["max_output_tokens"],
        chosen_model="" if route is None else route["model"],
    )


def _present(configured: Path, expected: str) -> PolicySet | None:
    """The policy on the disk; None where it has problems.

    Raises:
        ConfigError: it has not the digest that the caller expects, or cannot be read.
    """
    try:
        found = load_policy(read(configured))
    except PolicyError:
        found = None
    digest = "" if found is None else found.digest
    if expected and digest != expected:
        raise ConfigError(f"the policy on the disk has the digest {digest or 'of none'}, not {expected[:64]}")
    return found


def _changes(old: PolicySet | None, new: PolicySet) -> list[pb.Change]:
    return _told(() if old is None else changes(old, new))


def _told(told: Sequence[Change]) -> list[pb.Change]:
    rows = ({"subject": one.subject, "kind": one.kind.value, "path": one.path} for one in told)
    more = ({"direction": one.direction.value, "text": one.sentence} for one in told)
    return [_change(row | rest) for row, rest in zip(rows, more, strict=True)]


def _put(target: NewPolicy, work: Work, *, wait: bool, validate_only: bool) -> tuple[Any, list[str]]:
    """Put a policy in force, now or later; gives the outcome and what the appliance said."""
    if validate_only:
        return pb.OUTCOME_VALIDATED, []
    if not wait:
        work.later = partial(_put_later, target, work)
        return pb.OUTCOME_STARTED, []
    return _put_now(target, work)


def _put_later(target: NewPolicy, work: Work) -> None:
    _put_now(target, work)


def _put_now(target: NewPolicy, work: Work) -> tuple[Any, list[str]]:
    config, outcome = work.config(), None
    with commanding() as heard:
        outcome = put_policy(config, target, config.listen.admin)
    return (pb.OUTCOME_WRITTEN if outcome is None else pb.OUTCOME_IN_FORCE), heard.lines


def _apply(asked: pb.ApplyRequest, work: Work) -> pb.ApplyResponse:
    configured = work.config().policy
    old = _present(configured, asked.expected_digest)
    if not asked.files:
        raise InvalidRequestError("the new policy has no files", param="files")
    check_alone(asked.files, configured)
    with draft(asked.files, configured) as one:
        target = _target(one, configured)
    outcome, messages = _put(target, work, wait=asked.wait, validate_only=asked.validate_only)
    return pb.ApplyResponse(
        outcome=outcome, digest=target.policy.digest, changes=_changes(old, target.policy), messages=messages
    )


def check_alone(files: Sequence[pb.PolicyFile], configured: Path) -> None:
    """Check that a request to replace a policy's file names no drop-ins, which stay as they are.

    Raises:
        InvalidRequestError: it does.
    """
    other = [one.name for one in files if one.name not in ("", configured.name, f"{configured.name}.sig")]
    if configured.is_file() and other:
        raise InvalidRequestError(
            f"{other[0]} stays as it is: the file {configured.name} alone is replaced, with its signatures",
            param="files",
        )


def _target(one: Draft, configured: Path) -> NewPolicy:
    """The policy of a request, beside the drop-ins that stay.

    Raises:
        InvalidRequestError: it has problems.
    """
    target: NewPolicy | None = None
    with commanding(problems=True) as heard:
        target = given(one.policy, configured)
    if target is None:
        raise InvalidRequestError(one.shown("\n".join(problems_of(heard.data))), param="files")
    return target


def _history(asked: pb.HistoryRequest, work: Work) -> pb.HistoryResponse:
    with commanding():
        kept = kept_history(work.config())
    numbers = kept.numbers()
    if asked.HasField("version"):
        one = kept.read(asked.version)
        earlier = [number for number in numbers if number < one.number]
        found, note = changed_by(kept.read(earlier[0]) if earlier else None, one)
        told = _version(one, texts=True)
        told.changes.extend(_told(found))
        told.note = note
        return pb.HistoryResponse(versions=[told])
    chosen = numbers[: asked.limit] if asked.limit else numbers
    return pb.HistoryResponse(versions=[_version(kept.read(one), texts=False) for one in chosen])


def _version(one: Version, *, texts: bool) -> pb.PolicyVersion:
    since = Timestamp(seconds=one.since_ms // MS, nanos=one.since_ms % MS * MS * MS)
    files = one.files.items() if texts else ((name, "") for name in one.named)
    named = [pb.PolicyFile(name=name, text=text) for name, text in files]
    return pb.PolicyVersion(version=one.number, since=since, digest=one.digest, files=named, by=one.by)


def _rollback(asked: pb.RollbackRequest, work: Work) -> pb.RollbackResponse:
    config = work.config()
    old = _present(config.policy, asked.expected_digest)
    target: NewPolicy | None = None
    with commanding():
        kept = kept_history(config)
        chosen = kept.read(asked.version if asked.HasField("version") else version_before(kept))
        target = restored(chosen, config.policy)
    assert target is not None, "a version that cannot be restored ends the block with an error"
    outcome, messages = _put(target, work, wait=asked.wait, validate_only=asked.validate_only)
    return pb.RollbackResponse(
        outcome=outcome,
        version=chosen.number,
        digest=target.policy.digest,
        changes=_changes(old, target.policy),
        messages=messages,
    )


def _schema(asked: pb.SchemaRequest, _work: Work) -> pb.SchemaResponse:
    return pb.SchemaResponse(json_schema=case_schema_text() if asked.cases else schema_text())


def _init(asked: pb.InitRequest, _work: Work) -> pb.InitResponse:
    if len(asked.tenant) > MAX_NAME_CHARS:  # The error of the command repeats it, and an error is in headers.
        raise InvalidRequestError(f"tenant has more than {MAX_NAME_CHARS} characters", param="tenant")
    path = asked.path or str(DEFAULT_PATH)
    if len(path) > MAX_PATH_CHARS or not path.isprintable() or not Path(path).name:
        # Comments have it: a line break would end them.
        raise InvalidRequestError(
            f"path is no path of a file: 1 to {MAX_PATH_CHARS} printable characters that end in its name", param="path"
        )
    with commanding():
        text = first_text(Path(path), asked.tenant or DEFAULT_TENANT)
    return pb.InitResponse(policy=text, json_schema=schema_text(), schema_name=schema_beside(Path(path)).name)
