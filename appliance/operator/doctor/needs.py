"""What each service does with which path, from the configuration and the folders of policy and models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.common.catalog import find_files
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.errors import ConfigError
from appliance.common.model_entries import entries_folder
from appliance.common.paths import CONTROL_SOCKET
from appliance.common.policy_signature import signature_file
from appliance.operator.doctor.facts import ServiceUnit
from appliance.operator.doctor.try_access import Use
from policy.files import PUBLIC_FOLDER, drop_ins

SERVICE_CREDENTIALS = "/run/credentials/"
"""Folder of the credentials that systemd loads for one service, while it runs."""


@dataclass(frozen=True, slots=True)
class PathNeed:
    """A path that a service uses."""

    purpose: str
    path: Path
    use: Use


def needs_of(role: str, config: ApplianceConfig, path: Path, devices: tuple[str, ...] = ()) -> list[PathNeed]:
    """Return the paths that a service uses, of a configuration at ``path``; credentials are left
    out, which systemd reads (``named_credentials``).

    Args:
        role: gateway, supervisor or fetch.
        config: the configuration.
        path: its file.
        devices: nodes of the GPUs that its models are given.
    """
    if role == "fetch":
        found = list(_fetch(config))
    else:
        found = [PathNeed("configuration", path, Use.READ), *_entries(path), *_policy(config)]
        found += _gateway(config) if role == "gateway" else _supervisor(config, devices)
    return [one for one in found if not str(one.path).startswith(SERVICE_CREDENTIALS)]


def _entries(path: Path) -> Iterator[PathNeed]:
    folder = entries_folder(path)
    if folder.exists():
        yield from (PathNeed("models' entries", one, Use.READ) for one in (folder, *sorted(folder.glob("*.yaml"))))


def _policy(config: ApplianceConfig) -> Iterator[PathNeed]:
    folder = drop_ins(config.policy)
    for place in dict.fromkeys((config.policy, folder)):
        yield PathNeed("policy", place, Use.READ)
    yield from (PathNeed("policy", file, Use.READ) for file in sorted(folder.glob("*.yaml")))
    if config.policy_keys:
        yield PathNeed("policy's signatures", signature_file(config.policy), Use.READ)
    for beside in dict.fromkeys((config.policy.parent, folder)):
        texts = sorted((beside / PUBLIC_FOLDER).glob("*"))
        yield from (PathNeed("public prefixes", file, Use.READ) for file in texts if file.suffix in (".txt", ".json"))


def _gateway(config: ApplianceConfig) -> Iterator[PathNeed]:
    yield PathNeed("key table", config.credentials, Use.READ)
    yield PathNeed("pepper", config.pepper, Use.READ)
    if (tls := config.listen.tls) is not None:
        yield PathNeed("certificate", tls.certificate, Use.READ)
        yield PathNeed("private key", tls.key, Use.READ)
        if tls.client_ca is not None:
            yield PathNeed("client authorities", tls.client_ca, Use.READ)
    if (remote := config.remote_operators) is not None and remote.admin is not None:
        yield PathNeed("operators' certificate", remote.tls.certificate, Use.READ)
        yield PathNeed("operators' private key", remote.tls.key, Use.READ)
        if remote.tls.client_ca is not None:
            yield PathNeed("operators' authorities", remote.tls.client_ca, Use.READ)
    if config.listen.admin.startswith("unix:"):
        yield PathNeed("admin socket", Path(config.listen.admin.removeprefix("unix:")), Use.BIND)
    for name, address in config.listen.addresses():
        if name.startswith("tenants.") and address.startswith("unix:"):
            yield PathNeed(f"socket of {name}", Path(address.removeprefix("unix:")), Use.BIND)
    for model in config.models:
        if (one := model.external) is not None:
            files = (("key", one.api_key_file), ("authorities", one.ca_file))
            yield from (
                PathNeed(f"{what} of external model {model.name}", file, Use.READ)
                for what, file in files
                if file is not None
            )
    yield PathNeed("run directory", config.run_dir, Use.ENTER)
    yield PathNeed("control socket", config.run_dir / CONTROL_SOCKET, Use.DEVICE)


def _supervisor(config: ApplianceConfig, devices: tuple[str, ...]) -> Iterator[PathNeed]:
    sandbox = config.sandbox
    yield PathNeed("run directory", config.run_dir, Use.FILL)
    for model in config.models:
        yield from (PathNeed(f"model {model.name}", place, Use.READ) for place in (model.folder, *_files(model)))
    reads = [("kernels", sandbox.kernels), ("kernels", sandbox.gpu_kernels), ("image", sandbox.image)]
    reads += [("image", sandbox.image_store), ("image", sandbox.image_pin), ("state", config.state)]
    yield from (PathNeed(purpose, place, Use.READ) for purpose, place in reads if place is not None)
    if sandbox.runsc:
        yield PathNeed("runsc", Path(sandbox.runsc), Use.EXECUTE)
    replaced = (("fastest forms", sandbox.form_cache), ("digest cache", config.digest_cache))
    yield from (PathNeed(purpose, place, Use.REPLACE) for purpose, place in replaced if place is not None)
    filled = [("checkpoints", sandbox.checkpoints)]
    if sandbox.spill is not None:
        filled.append(("spilled KV", sandbox.spill.directory))
    if config.kv_store is not None and config.kv_store.socket is not None:
        yield PathNeed("carrier's socket", config.kv_store.socket, Use.DEVICE)
    if config.kv_store is not None and config.kv_store.members is not None:
        members = config.kv_store.members
        yield PathNeed("list of the fleet's members", members.file, Use.READ)
        yield PathNeed("member's keys", members.key, Use.READ)
        yield PathNeed("accepted list of members", members.accepted, Use.REPLACE)
    if config.audit is not None:
        filled.append(("audit log", config.audit.directory))
        if config.audit.key is not None:
            yield PathNeed("audit key", config.audit.key, Use.READ)
    if config.keys is not None:
        yield PathNeed("root key", config.keys.root_key, Use.READ)
        filled.append(("keyring", config.keys.keyring))
    if config.batches is not None:
        filled.append(("files and batches", config.batches.directory))
    yield from (PathNeed(purpose, place, Use.FILL) for purpose, place in filled if place is not None)
    yield from (PathNeed("GPU", Path(node), Use.DEVICE) for node in devices)


def _fetch(config: ApplianceConfig) -> Iterator[PathNeed]:
    if config.model_cache is None:
        return
    yield PathNeed("cache of models", config.model_cache.directory, Use.FILL)
    if config.model_cache.sources is not None:
        yield PathNeed("sources of models", config.model_cache.sources, Use.READ)
    if config.model_cache.socket is not None:
        yield PathNeed("downloader's socket", config.model_cache.socket, Use.BIND)


def _files(model: ModelConfig) -> tuple[Path, ...]:
    """Files of a model; none where it cannot be served, which its own check tells."""
    try:
        engine, text = find_files(model.name, model.folder, external=model.external is not None)
    except (ConfigError, OSError):
        return ()
    return tuple(path for _, path in (*engine, *text))


def named_credentials(config: ApplianceConfig) -> Iterator[tuple[str, str, str]]:
    """Yield purpose, unit and name of each credential of systemd that the configuration names."""
    named = [("pepper", config.pepper)]
    if config.audit is not None and config.audit.key is not None:
        named.append(("audit key", config.audit.key))
    if config.keys is not None:
        named.append(("root key", config.keys.root_key))
    if config.model_cache is not None and config.model_cache.sources is not None:
        named.append(("sources of models", config.model_cache.sources))
    for purpose, path in named:
        if str(path).startswith(SERVICE_CREDENTIALS):
            unit, _, name = str(path).removeprefix(SERVICE_CREDENTIALS).partition("/")
            yield purpose, unit, name


def withheld(unit: ServiceUnit, need: PathNeed) -> str:
    """Return the setting of a unit that keeps it from a path that its user may use; empty when none does."""
    path = need.path
    below = [folder for folder in unit.hidden if path.is_relative_to(folder)]
    if below:
        private = {"/home": "ProtectHome=", "/root": "ProtectHome=", "/run/user": "ProtectHome="}
        private |= {"/tmp": "PrivateTmp=", "/var/tmp": "PrivateTmp=", "/dev": "PrivateDevices="}  # noqa: S108
        return private.get(below[0], "InaccessiblePaths=")
    if need.use not in (Use.FILL, Use.REPLACE, Use.BIND):
        return ""
    if any(path.is_relative_to(folder) for folder in unit.read_only):
        return "ReadOnlyPaths="
    if any(path.is_relative_to(folder) for folder in unit.writable):
        return ""
    closed = {"strict": ("/",), "full": ("/usr", "/boot", "/efi", "/etc"), "yes": ("/usr", "/boot", "/efi")}
    if any(path.is_relative_to(folder) for folder in closed.get(unit.protect_system, ())):
        return "ProtectSystem="
    return ""
