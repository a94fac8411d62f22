"""Pure: facts about who may do what (certificates, keys, policy, files) to findings."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.certificate_dates import DAY_S, RENEW_DAYS, whole_days
from appliance.common.figures import counted
from appliance.operator.doctor.facts import Access, Certificate, Policy, Port, Running, ServiceFacts
from appliance.operator.doctor.finding import Area, Finding, Severity, Subject
from appliance.operator.doctor.remote_operators import check_remote_operators

MAX_NAMES = 4
"""Names listed in one finding."""


def check_access(service: ServiceFacts, now: float) -> Iterator[Finding]:
    """Findings about access rights, keys and certificates at ``now`` (Unix time)."""
    yield check_tls(service.tls, service.ports, now)
    if service.remote_operators is not None:
        yield from check_remote_operators(service.remote_operators)
    if service.operators_tls is not None:
        yield check_certificate(service.operators_tls, Subject(Area.ACCESS, "operators' certificate"), now)
    yield from check_policy(service.policy, service.running)
    bad = [finding for finding in map(check_file, service.access) if finding.level is not Severity.OK]
    yield from bad
    if not bad:
        what = f"nothing is open to others: {counted(len(service.access), 'file or folder', 'files and folders')}"
        yield Subject(Area.ACCESS, "permissions").ok(what)


def check_tls(tls: Certificate | None, ports: tuple[Port, ...], now: float) -> Finding:
    """Whether the certificate is valid for long enough and the key is its own."""
    if tls is None:
        open_to = [
            port.address
            for port in ports
            # Metrics have no prompt and no key of a tenant.
            if port.name != "metrics" and not port.address.startswith(("127.", "[::1]", "localhost:", "unix:"))
        ]
        if open_to:
            return Subject(Area.ACCESS, "certificate").problem(
                f"none, and {', '.join(open_to)} can be reached from outside",
                means="API keys and prompts cross the network in the clear",
                mend="listen: tls: {certificate: FILE, key: FILE}    # in athanor.yaml; or listen on 127.0.0.1",
            )
        return Subject(Area.ACCESS, "certificate").note("none: this machine only")
    return check_certificate(tls, Subject(Area.ACCESS, "certificate"), now)


def check_certificate(tls: Certificate, subject: Subject, now: float) -> Finding:
    """Whether a certificate is valid for long enough and the key is its own."""
    problem = tls.problem or tls.key_problem or tls.authority_problem
    if problem:
        return subject.problem(
            problem,
            means="what serves with it cannot start",
            mend=f"openssl x509 -in {tls.path} -noout -subject -dates",
        )
    renew = f"openssl x509 -in {tls.path} -noout -dates    # renew it: it is taken within seconds"
    if now < tls.not_before or now >= tls.not_after:
        what = "is not valid yet" if now < tls.not_before else f"expired {whole_days(now - tls.not_after)} ago"
        return subject.problem(f"{tls.path} {what}", means="clients refuse to connect", mend=renew)
    days = int((tls.not_after - now) / DAY_S)
    if days < RENEW_DAYS:
        return subject.warning(
            f"{tls.path} expires in {whole_days(tls.not_after - now)}",
            means="clients will refuse to connect then",
            mend=renew,
        )
    return subject.ok(f"valid for {counted(days, 'day')}, with its key")


def check_policy(policy: Policy, running: Running) -> Iterator[Finding]:
    """The policy on disk, the one in force, and the keys that tenants have."""
    check = f"athanor policy check {policy.path}"
    if policy.problems:
        more = f" and {len(policy.problems) - 1} more" if len(policy.problems) > 1 else ""
        yield Subject(Area.ACCESS, "policy").problem(
            policy.problems[0] + more, means="a reload changes nothing; a start fails", mend=check
        )
        return
    what = f"{policy.digest[:12]}, {counted(len(policy.tenants), 'tenant')}"
    if running.reload_error:
        yield Subject(Area.ACCESS, "policy").warning(
            f"the last reload failed: {running.reload_error}",
            means="an older policy is in force",
            mend=f"{check} && athanor reload",
        )
    elif running.answers and running.policy_digest != policy.digest:
        yield Subject(Area.ACCESS, "policy").warning(
            f"{what}; in force is {running.policy_digest[:12]}",
            means="the edited policy is not in force",
            mend=f"{check} && athanor reload",
        )
    elif not policy.tenants:
        yield Subject(Area.ACCESS, "policy").warning(
            f"{policy.digest[:12]}, no tenants",
            means="every request is refused",
            mend="athanor key create TENANT    # then name the key in the policy",
        )
    else:
        yield Subject(Area.ACCESS, "policy").ok(what)
    if policy.overlooked:
        more = f" and {len(policy.overlooked) - 1} more" if len(policy.overlooked) > 1 else ""
        file, _, said = policy.overlooked[0].partition(": ")
        yield Subject(Area.ACCESS, "policy").warning(
            f"{file}: {said}{more}",
            means="what it says is not in force",
            mend=f"mv '{file}' /root    # or let its name end in .yaml, if it belongs to the policy",
        )
    if policy.unsafe:
        yield Subject(Area.ACCESS, "policy").warning(
            f"unsafe_allow_all: {_some(policy.unsafe)}",
            means="whoever calls with their credentials may use every model and feature, without a limit that protects",
            mend=f"{check}    # shows the line: write models and limits in its place",
        )
    if policy.missing:
        yield Subject(Area.ACCESS, "policy").warning(
            _some(policy.missing), means="whoever should call it is refused", mend=check
        )
    yield from _keys(policy)


def _keys(policy: Policy) -> Iterator[Finding]:
    if policy.keys_unseen:
        what = "only the service may read the pepper"
        yield Subject(Area.ACCESS, "keys").note(what, mend="sudo athanor doctor")
    elif policy.keys_problem:
        said, _, mend = policy.keys_problem.partition("; close it with: ")
        yield Subject(Area.ACCESS, "keys").problem(
            said, means="the gateway cannot start", mend=mend or "athanor key create TENANT --credentials FILE"
        )
    elif policy.missing_keys:
        yield Subject(Area.ACCESS, "keys").warning(
            f"no key in force for {_some(policy.missing_keys)}",
            means="whoever should call with it is refused",
            mend=f"athanor key create TENANT --id {policy.missing_keys[0].removeprefix('key:')} --credentials FILE",
        )
    elif policy.expiring_keys:
        first = policy.expiring_keys[0].partition(" ")[0].removeprefix("key:")
        yield Subject(Area.ACCESS, "keys").warning(
            f"soon to expire: {_some(policy.expiring_keys)}",
            means="whoever calls with such a key is refused then",
            mend=f"athanor key rotate {first} --credentials FILE --pepper FILE",
        )
    elif policy.unused_keys:
        yield Subject(Area.ACCESS, "keys").note(
            f"no tenant has {_some(policy.unused_keys)}", means="calls with such a key are refused"
        )
    else:
        yield Subject(Area.ACCESS, "keys").ok("every tenant's key is there")


def check_file(access: Access) -> Finding:
    """Whether strangers on this machine can read a secret or change what we trust."""
    check = access.purpose
    if access.problem:
        return Subject(Area.ACCESS, check).problem(
            f"{access.path}: {access.problem}", means="the appliance cannot start", mend=f"ls -ld {access.path}"
        )
    if access.secret and access.mode & 0o007:
        return Subject(Area.ACCESS, check).problem(
            f"{access.path} is open to every user ({access.mode:04o})",
            means="whoever has an account here can act as a tenant",
            mend=f"chmod o= '{access.path}'",
        )
    if access.mode & 0o002:
        return Subject(Area.ACCESS, check).problem(
            f"every user may write to {access.path} ({access.mode:04o})",
            means="whoever has an account here decides what is served to whom",
            mend=f"chmod o-w '{access.path}'",
        )
    return Subject(Area.ACCESS, check).ok(f"{access.path} {access.mode:04o}")


def _some(names: tuple[str, ...]) -> str:
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
