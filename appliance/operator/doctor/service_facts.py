"""Looks at what a configuration names: addresses, files, file systems, collectors. Changes nothing."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from appliance.common import notify
from appliance.common.addresses import listens_on_loopback, split_address
from appliance.common.catalog import find_files, read_model
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.errors import ApplianceError, ConfigError, reason_of
from appliance.common.form_cache import read_forms
from appliance.common.image.check import check, resolve
from appliance.common.kv_store_config import carrier_socket
from appliance.common.listen_config import MAX_SOCKET_PATH
from appliance.common.model_signature import with_signer
from appliance.common.policy_signature import check_signed
from appliance.operator import kernels
from appliance.operator.doctor.account import look_at_account, with_witnesses
from appliance.operator.doctor.carrier import carrier_problem
from appliance.operator.doctor.certificate import read_certificate
from appliance.operator.doctor.endpoint import endpoint_problem
from appliance.operator.doctor.facts import (
    EXPIRY_DAYS,
    Access,
    CardFacts,
    Certificate,
    Disk,
    Exporter,
    GpuKernelFacts,
    Image,
    Kernels,
    Model,
    Policy,
    Port,
    Refusal,
    Running,
    ServiceFacts,
    ServiceUnit,
)
from appliance.operator.doctor.fleet_store import store_problem
from appliance.operator.doctor.gpu_kernel_facts import look_at_cards, look_at_gpu_kernels
from appliance.operator.doctor.holders import holder
from appliance.operator.doctor.needs import SERVICE_CREDENTIALS
from appliance.operator.doctor.operator_api import look_at_operator_api
from appliance.operator.doctor.reach import reach
from appliance.operator.doctor.remote_operators import look_at_remote_operators
from appliance.operator.doctor.unit_checks import settings_beyond
from appliance.operator.doctor.units import environment_of, look_at_units
from appliance.operator.install.packaged_image import find_packaged
from appliance.operator.install.rendering import GATEWAY_UNIT
from appliance.supervisor.layout import engine_place, role_threads
from appliance.supervisor.ranks import rank_problem
from isolation.errors import RootfsError
from isolation.gpu.gpu_facts import GpuFacts
from isolation.ipc.messages import Role
from policy.errors import PolicyError
from policy.files import overlooked, read_sources
from policy.loader import load_policy
from policy.references import dangling

CONNECT_S = 2.0
"""Patience for a collector; one in the same house answers within milliseconds."""

MAX_PURPOSES = 4
"""Most purposes of one file system that are named in one finding."""

PEPPER_SOURCE = Path("/etc/athanor/pepper")
"""From where the gateway's unit loads the pepper."""

GATEWAY_USER = "athanor-gateway"
"""User of the gateway's unit, as it is shipped."""

OTLP = "OTEL_EXPORTER_OTLP_{signal}ENDPOINT"


INSTALLED = Path("/etc/athanor/athanor.yaml")
"""Configuration of the units as they are shipped."""


NO_GPUS = GpuFacts()


def look_at_service(
    config: ApplianceConfig,
    path: Path,
    running: Running,
    units: tuple[ServiceUnit, ...] | None = None,
    options: Sequence[str] = (),
    gpus: GpuFacts = NO_GPUS,
) -> ServiceFacts:
    """Gather the facts about what a configuration names.

    Args:
        config: the configuration.
        path: its file.
        running: the appliance that runs with it.
        units: our systemd units; None: systemd is asked.
        options: ``KEY=VALUE`` that the configuration was read with.
        gpus: of the machine.
    """
    cards = _cards(config, gpus, running)
    units = tuple(unit for unit in (look_at_units() if units is None else units) if _concerns(unit, path))
    environments = {unit.name: environment_of(unit) for unit in units}
    tried, refusals, untried = _tried(config, path, units)
    threads, rank_problems = _threads(config)
    return ServiceFacts(
        # Facts are packed for support: of variables, which may hold a collector's password, only the names go along.
        units=tuple(replace(unit, environment=tuple((name, "") for name, _ in unit.environment)) for unit in units),
        refusals=refusals,
        tried=tried,
        untried=untried,
        own_settings=settings_beyond(units, environments, str(path), tuple(options)),
        config=str(path),
        unsafe=config.sandbox.unsafe_no_sandbox,
        sandbox_bytes=config.sandbox.memory_bytes,
        ports=tuple(_kept(port, units) for port in _ports(config)),
        tls=None if (tls := config.listen.tls) is None else read_certificate(tls.certificate, tls.key, tls.client_ca),
        disks=tuple(_disks(config)),
        access=tuple(_access(config, path)),
        policy=look_at_policy(config),
        models=tuple(_model(model, config.keys_for(model), on_card=bool(gpus.cards)) for model in config.models),
        kernels=_kernels(config),
        image=_image(config),
        exporters=tuple(find_exporters(_exporting(environments))),
        running=running,
        gpu_kernels=_gpu_kernels(config, cards),
        cards=cards,
        threads=threads,
        rank_problems=rank_problems,
        forms=_forms(config),
        operator_api=look_at_operator_api(config),
        remote_operators=look_at_remote_operators(config, {one.name for one in units}),
        operators_tls=_operators_tls(config),
        carrier_problem=carrier_problem(carrier_socket(config.kv_store, config.run_dir)) if config.kv_store else None,
        store_problem=store_problem(config.fleet) if config.fleet is not None and config.fleet.store else None,
        account=None if config.audit is None else with_witnesses(look_at_account(config.audit.directory), config.audit),
    )


def _cards(config: ApplianceConfig, gpus: GpuFacts, running: Running) -> tuple[CardFacts, ...]:
    """The card that each model would get, and those that it has while the appliance runs."""
    return tuple(
        replace(one, now=tuple(card for model, card in running.engine_cards if model == one.model))
        for one in look_at_cards(config.models, gpus, running=running.answers)
    )


def _gpu_kernels(config: ApplianceConfig, cards: Iterable[CardFacts]) -> tuple[GpuKernelFacts, ...]:
    """Compiled kernels of the models with a GPU; of one that no card has room for the rows, and so the kernels, are not
    known."""
    rows, refused = {one.model: one.rows for one in cards}, {one.model for one in cards if one.problem}
    models = (model for model in config.models if model.name not in refused)
    return tuple(filter(None, (look_at_gpu_kernels(config, model, rows.get(model.name, 0)) for model in models)))


def _concerns(unit: ServiceUnit, path: Path) -> bool:
    """Whether a unit serves this configuration, or ought to."""
    return path == INSTALLED or any(Path(word).resolve() == path.resolve() for word in unit.command if "/" in word)


def _tried(config: ApplianceConfig, path: Path, units: tuple[ServiceUnit, ...]) -> tuple[int, tuple[Refusal, ...], str]:
    """Number of paths that were tried as the users of the units, those that failed, and why none was tried."""
    found: list[Refusal] = []
    tried = 0
    for unit in units:
        try:
            number, refused = reach(config, path, unit)
        except PermissionError:
            return 0, (), "only root can try what the services' users may read and write"
        tried += number
        found += refused
    return tried, tuple(found), ""


def _exporting(environments: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """OpenTelemetry's variables of the gateway: its unit's where there is one, drop-ins included, else our own."""
    unit = environments.get(GATEWAY_UNIT)
    if unit is None:
        return notify.telemetry_environment()
    return {name: value for name, value in unit.items() if name.startswith("OTEL_")}


def _kept(port: Port, units: tuple[ServiceUnit, ...]) -> Port:
    """Mark the HTTP socket that systemd keeps for the gateway: its holder is systemd, or not shown to us."""
    systemd = port.holder in ("", "process 1 (systemd)", "process 1 (init)")
    keeps = any(unit.name == GATEWAY_UNIT and unit.kept for unit in units)
    return replace(port, kept=port.name.endswith("http") and port.in_use and systemd and keeps)


def _threads(config: ApplianceConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Plan the engines' threads as a supervisor started from here would; engines on equal nodes have one line. Then
    why engines of several ranks would not be started."""
    plans = [
        (model, role_threads(config, Role.ENGINE, engine_place(config, model), model.ranks)) for model in config.models
    ]
    problems = (rank_problem(model, plan) for model, plan in plans)
    return tuple(dict.fromkeys(plan.reason for _, plan in plans)), tuple(filter(None, problems))


def _forms(config: ApplianceConfig) -> tuple[str, ...]:
    """Newest remembered trial of each served model, for people; none where the file cannot be read."""
    try:
        cache = config.sandbox.form_cache
        kept = read_forms(cache, shown_only=True) if cache is not None else ()
    except (OSError, ValueError):
        return ()
    newest = {one.model: f"{one.model}: {one.said}; tried on {one.tried}" for one in kept}
    return tuple(newest[model.name] for model in config.models if model.name in newest)


def _ports(config: ApplianceConfig) -> Iterator[Port]:
    listen = config.listen
    groups = {f"tenants.{own.tenant}.{name}": own.group or "" for own in listen.tenants for name, _ in own.addresses}
    for name, address in listen.addresses():
        if name in groups and address.startswith("unix:"):
            yield own_socket(name, address, groups[name])
        elif address.startswith("unix:"):
            too_long = len(os.fsencode(address.removeprefix("unix:"))) > MAX_SOCKET_PATH
            problem = f"the path has more than {MAX_SOCKET_PATH} bytes" if too_long else ""
            yield Port(name=name, address=address, problem=problem)
        else:
            bare = name == "metrics" and listen.metrics_token is None and not listens_on_loopback(address)
            yield replace(_port(name, address), open=bare)


def own_socket(name: str, address: str, group: str) -> Port:
    """Look whether a tenant's Unix socket belongs, or will belong, to its group, and is safe in its folder."""
    from appliance.gateway.front.own_listeners import OTHERS_WRITE, group_number

    path = Path(address.removeprefix("unix:"))
    number = group_number(group)
    made = f"install -d -m 2750 -o {GATEWAY_USER} -g {group} {path.parent}"
    if number is None:
        return Port(name=name, address=address, problem=f"there is no group {group}", mend=f"groupadd --system {group}")
    try:
        folder = path.parent.stat()
        given = path.stat().st_gid == number if path.is_socket() else None
    except OSError as error:
        return Port(name=name, address=address, problem=f"{path.parent}: {reason_of(error)}", mend=made)
    if folder.st_uid not in _gateway_users():
        problem = f"{path.parent} belongs to another user, who could put a socket of their own there"
        return Port(name=name, address=address, problem=problem, mend=f"chown {GATEWAY_USER} {path.parent}")
    if folder.st_mode & OTHERS_WRITE:
        problem = f"{path.parent} is writable for others than its owner, who could put a socket of their own there"
        return Port(name=name, address=address, problem=problem, mend=f"chmod go-w {path.parent}")
    inherits = bool(folder.st_mode & stat.S_ISGID) and folder.st_gid == number
    if given or (given is None and (inherits or os.getgid() == number)):
        return Port(name=name, address=address)
    whose = "is" if given is not None else "would be"
    return Port(name=name, address=address, problem=f"the socket {whose} of another group than {group}", mend=made)


def _gateway_users() -> frozenset[int]:
    """Users as which the gateway may run, and root: of the folder of its socket, another owner could replace it."""
    users = {0, os.geteuid()}
    with suppress(KeyError):
        users.add(pwd.getpwnam(GATEWAY_USER).pw_uid)
    return frozenset(users)


def _port(name: str, address: str) -> Port:
    """Try to bind it, as the gateway will."""
    host, number = split_address(address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
            return Port(name=name, address=address, problem=reason_of(error))
        return Port(name=name, address=address, in_use=True, holder=holder(number))
    return Port(name=name, address=address)


def _disks(config: ApplianceConfig) -> Iterator[Disk]:
    """Each file system once, with what of ours is written there."""
    places = [(config.run_dir, "sockets and bundles"), (Path("/var/log"), "logs")]
    if config.audit is not None:
        places.append((config.audit.directory, "audit log"))
    if config.keys is not None:
        places.append((config.keys.keyring, "keyring"))
    if config.batches is not None:
        places.append((config.batches.directory, "files and batches"))
    if config.sandbox.checkpoints is not None:
        places.append((config.sandbox.checkpoints, "checkpoints"))
    if config.sandbox.spill is not None and config.sandbox.spill.directory is not None:
        places.append((config.sandbox.spill.directory, "spilled KV"))
    caches = [path.parent for path in (config.digest_cache, config.sandbox.form_cache) if path is not None]
    places += [(folder, "cache of digests and forms") for folder in caches[:1]]
    if config.model_cache is not None:
        places.append((config.model_cache.directory, "cache of models"))
    places += [(model.folder, f"model {model.name}") for model in config.models]
    found: dict[int, tuple[Path, list[str]]] = {}
    for path, purpose in places:
        # Not Path.exists, which raises where a folder on the way is closed to us.
        there = next((one for one in (path, *path.parents) if os.path.exists(one)), Path("/"))
        found.setdefault(there.stat().st_dev, (there, []))[1].append(purpose)
    for there, purposes in found.values():
        seen = os.statvfs(there)
        more = f" and {len(purposes) - MAX_PURPOSES} more" if len(purposes) > MAX_PURPOSES else ""
        yield Disk(
            path=str(there),
            purpose=", ".join(purposes[:MAX_PURPOSES]) + more,
            free=seen.f_bavail * seen.f_frsize,
            total=seen.f_blocks * seen.f_frsize,
            free_inodes=seen.f_favail if seen.f_files else -1,
        )


def _access(config: ApplianceConfig, path: Path) -> Iterator[Access]:
    pepper = pepper_of(config)
    yield _mode(path, "configuration", secret=False)
    yield _mode(config.policy, "policy", secret=False)
    yield _mode(config.credentials, "key table", secret=True)
    if pepper is not None:
        yield _mode(pepper, "pepper", secret=True)
    listen = config.listen
    secrets = [(listen.metrics_token, "token of the metrics listener"), (listen.fleet_key, "fleet's key")]
    if config.fleet is not None:
        secrets.append((config.fleet.store_password, "password of the fleet's store"))
    for file, purpose in secrets:
        if file is not None and not str(file).startswith(SERVICE_CREDENTIALS):
            yield _mode(file, purpose, secret=True)
    if config.listen.tls is not None:
        yield _mode(config.listen.tls.key, "private key", secret=True)
    if config.remote_operators is not None:
        yield _mode(config.remote_operators.tls.key, "operators' private key", secret=True)
    folders = [(model.folder, f"model {model.name}") for model in config.models]
    folders += [
        (place, name) for place, name in ((config.sandbox.kernels, "kernels"), (config.sandbox.image, "image")) if place
    ]
    for folder, purpose in folders:
        if os.path.exists(folder):
            yield _mode(folder, purpose, secret=False)


def _operators_tls(config: ApplianceConfig) -> Certificate | None:
    if (remote := config.remote_operators) is None:
        return None
    return read_certificate(remote.tls.certificate, remote.tls.key, remote.tls.client_ca)


def _mode(path: Path, purpose: str, *, secret: bool) -> Access:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        return Access(path=str(path), purpose=purpose, mode=0, secret=secret, problem=reason_of(error))
    return Access(path=str(path), purpose=purpose, mode=mode, secret=secret)


def pepper_of(config: ApplianceConfig) -> Path | None:
    """Path of the pepper for this user; None where only the service can see it."""
    if not str(config.pepper).startswith(SERVICE_CREDENTIALS):
        return config.pepper
    return PEPPER_SOURCE if PEPPER_SOURCE.exists() else None


def look_at_policy(config: ApplianceConfig) -> Policy:
    """Load it as the gateway would, and compare its credentials with the key table."""
    from datetime import UTC, datetime, timedelta

    from appliance.common.credentials import read_key_table

    where = str(config.policy)
    try:
        sources = read_sources(config.policy)
        loaded = load_policy(sources)
        check_signed(sources, config.policy, config.policy_keys)
        beside = tuple(overlooked(config.policy))
    except PolicyError as error:
        return Policy(path=where, problems=tuple(map(str, error.problems)))
    except ConfigError as error:
        return Policy(path=where, problems=(error.message,))
    except OSError as error:
        return Policy(path=where, problems=(f"cannot read {error.filename or where}: {reason_of(error)}",))
    pepper = pepper_of(config)
    readable = pepper is not None and os.access(pepper, os.R_OK)
    models, issuers = [model.name for model in config.models], [issuer.name for issuer in config.tokens]
    found = Policy(
        path=where,
        digest=loaded.digest,
        tenants=tuple(loaded.tenants),
        keys_unseen=not readable,
        missing=tuple(map(str, dangling(loaded, models, None, issuers=issuers))),
        overlooked=beside,
        unsafe=tuple(name for name, tenant in loaded.tenants.items() if tenant.unsafe_allow_all),
    )
    if pepper is None or not readable:
        return found
    try:
        table = read_key_table(config.credentials, pepper)
    except ConfigError as error:
        return replace(found, keys_problem=error.message)
    now = datetime.now(UTC)
    valid = {f"key:{key_id}" for key_id in table.in_force(now)}
    named = {name for name in loaded.principals if name.startswith("key:")}
    ends = {f"key:{key_id}": record.expires for key_id, record in table.records.items() if record.expires is not None}
    soon = now + timedelta(days=EXPIRY_DAYS)
    return replace(
        found,
        missing_keys=tuple(sorted(named - valid)),
        unused_keys=tuple(sorted(valid - named)),
        expiring_keys=tuple(
            f"{name} ({ends[name]:%Y-%m-%d})" for name in sorted(named & valid & ends.keys()) if ends[name] < soon
        ),
    )


def _model(model: ModelConfig, keys: tuple[str, ...], *, on_card: bool) -> Model:
    null, external = model.runner == "null", model.external is not None
    try:
        engine, _ = find_files(model.name, model.folder, external=external)
        weights = sum(path.stat().st_size for name, path in engine if name.endswith(".safetensors"))
        found = read_model(model.name, model.folder, external=external) if model.digest or keys else None
        files = None if found is None else with_signer(found, keys)
    except ConfigError as error:
        return Model(name=model.name, problem=error.message, null=null)
    except OSError as error:
        return Model(name=model.name, problem=f"{error.filename}: {reason_of(error)}", null=null)
    return Model(
        name=model.name,
        weight_bytes=weights,
        kv_bytes=model.kv_bytes,
        adapter_bytes=model.adapter_bytes if model.adapters else 0,
        on_card=on_card and model.gpu != "off",
        int8=model.weights == "int8",
        null=null,
        external="" if model.external is None else model.external.url,
        endpoint_problem="" if model.external is None else endpoint_problem(model.external),
        path=str(model.folder),
        pinned=model.digest,
        digest="" if files is None else files.digest,
        signer="" if files is None else files.signer,
        unsigned="" if files is None else files.unsigned,
    )


def _kernels(config: ApplianceConfig) -> Kernels:
    folder = config.sandbox.kernels
    if folder is None:
        return Kernels()
    if not kernels.is_there(folder):
        return Kernels(path=str(folder), problem=f"there are none in {folder}")
    return Kernels(path=str(folder), stale=not kernels.is_current(folder), best=kernels.best_for(folder))


def _image(config: ApplianceConfig) -> Image:
    pinned, packaged = config.sandbox.image_digest, ""
    try:
        if (brought := find_packaged()) is not None:
            packaged = brought.digest
        found = resolve(config)
        path, pinned = found.sandbox.image, found.sandbox.image_digest
        manifest = check(found)
    except (RootfsError, ApplianceError) as error:
        named = config.sandbox.image or config.sandbox.image_store
        return Image(path=str(named), pinned=pinned, packaged=packaged, problem=str(error).partition("\n")[0])
    if path is None or manifest is None:
        return Image(packaged=packaged)
    return Image(path=str(path), digest=manifest.digest, pinned=pinned, packaged=packaged)


def find_exporters(environment: dict[str, str]) -> Iterator[Exporter]:
    """The collectors that OpenTelemetry's variables name, each tried."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    common = environment.get(OTLP.format(signal=""), "")
    for signal in ("traces", "metrics"):
        endpoint = environment.get(OTLP.format(signal=f"{signal.upper()}_"), "") or common
        if endpoint and environment.get(f"OTEL_{signal.upper()}_EXPORTER", "").lower() != "none":
            yield Exporter(signal=signal, endpoint=endpoint, problem=_reach(endpoint))


def _reach(endpoint: str) -> str:
    """Reason why no connection can be made there; empty when one can."""
    try:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return "not an http or https URL"
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except ValueError:
        return "not a URL"
    except OSError as error:
        return reason_of(error)
    return ""
