"""The machine's configuration: ``athanor.yaml`` to frozen objects; unknown keys, wrong types and missing files refused.

Relative paths are taken from the file's own folder, so that a configuration can be moved with what it names.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from appliance.errors import ConfigError
from appliance.residency import ResidentLimits
from policy.errors import PolicyError
from policy.positions import dotted, load_yaml
from policy.wording import worded

MAX_CONFIG_BYTES = 256 << 10
"""Bytes of athanor.yaml."""

MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""What a model may be called: it stands in requests, paths and logs."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TlsConfig(_Section):
    """Certificates of both front ends; with ``client_ca`` gRPC demands and verifies client certificates."""

    certificate: Path = Field(strict=False)
    key: Path = Field(strict=False)
    client_ca: Path | None = Field(default=None, strict=False)


class ListenConfig(_Section):
    """Where the appliance listens: ``HOST:PORT``; port 0 lets the kernel choose. Admin is for the operator alone: on
    loopback, or ``unix:PATH``."""

    http: str = "127.0.0.1:8080"
    grpc: str = "127.0.0.1:8081"
    admin: str = "127.0.0.1:8082"
    tls: TlsConfig | None = None

    @field_validator("http", "grpc")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("admin")
    @classmethod
    def _admin_address(cls, value: str) -> str:
        if not value.startswith("unix:") and not _is_loopback(split_address(value)[0]):
            raise ValueError("admin listens on loopback or on unix:PATH only: it shows everybody all tenants' figures")
        return value


CardNumber = Annotated[int, Field(ge=0, le=999)]
"""Of a GPU: the N of /dev/nvidiaN."""


class ModelConfig(_Section):
    """One model to serve. ``kv_bytes`` is host memory on a CPU machine. ``weights: int8`` rounds the weights to 8 bits
    while they are loaded, and activations row by row: half the memory of bfloat16, and not the same tokens.

    ``runner: embed`` serves a model that gives vectors: ``/v1/embeddings`` and nothing else.

    ``runner: "null"`` is for benchmarks of everything but the model: no weights are read, the answers are meaningless
    ids given by rule, and ``step_us`` is the least time of a step. All models of a configuration are then such ones,
    so that no tenant of a real model is ever answered by one; status and ``/v1/models`` name them.
    """

    name: str = Field(pattern=MODEL_NAME)
    path: Path = Field(strict=False)
    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """Pins the model's files (`athanor model digest` prints it): other ones are not served."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["stored", "int8"] = "stored"
    max_context: Annotated[int, Field(ge=16, le=1 << 20)] = 32_768
    kv_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    """Tokens of one KV block: a prefix is reused in whole blocks, and a smaller block costs more bookkeeping."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 128
    max_num_batched_tokens: Annotated[int, Field(ge=16, le=65_536)] = 512
    runner: Literal["model", "embed", "null"] = "model"
    pooling: Literal[
        "auto", "last", "last+normalise", "mean", "mean+normalise", "cls", "cls+normalise"
    ] = "auto"
    """How ``runner: embed`` makes a vector of a text; ``auto`` as the model's own modules.json says."""
    truncates: bool = False
    """Whether the model was trained so that the first numbers of a vector are one too (``dimensions`` of a request)."""
    step_us: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    gpu: Literal["off", "auto"] | Annotated[tuple[CardNumber, ...], Field(strict=False)] = "off"
    """The GPUs that the model's engines get: `off`; `auto`, all of the machine's, none where there are none; or a list
    of their numbers, without which the appliance does not start."""
    gpu_share: Annotated[int, Field(ge=0, le=95)] = 0
    """Percent of a card's memory that each engine of the model may hold: on a GPU its KV is what weights and a reserve
    leave of that, whatever `kv_bytes` says. 0: `kv_bytes` holds there too. Shares of models on one card add up."""
    backend: Literal["auto", "device", "plain"] = "auto"
    """What computes: `auto`, the device backend where the engine has a GPU and the processor's elsewhere; `device` and
    `plain` say which."""

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.gpu == ():
            raise ValueError("gpu is an empty list; say off for none")
        if self.gpu != "off" and (self.backend == "plain" or self.runner != "model"):
            raise ValueError("gpu is for runner: model and a backend other than plain: nothing else computes on one")
        if self.gpu_share and self.gpu == "off":
            raise ValueError("gpu_share is a share of a GPU, and gpu is off")
        return self

    @property
    def engine_backend(self) -> str:
        """What the engine is told: one that gets no GPU does not look for one, even where no sandbox hides it."""
        return "plain" if (self.gpu, self.backend) == ("off", "auto") else self.backend

    @model_validator(mode="after")
    def _paced(self) -> Self:
        if self.step_us and self.runner != "null":
            raise ValueError("step_us is for the null runner: a model takes the time it takes")
        if self.runner != "embed" and (self.pooling != "auto" or self.truncates):
            raise ValueError("pooling and truncates are for runner: embed")
        return self


class SpillConfig(_Section):
    """Where KV goes that finds no place in an engine: bytes of host memory, then bytes below ``directory``, both sealed
    under the tenants' keys. Needs ``keys``. A tenant with ``retention: none`` is never among it."""

    memory: Annotated[int, Field(ge=0)] = 0
    disk: Annotated[int, Field(ge=0)] = 0
    directory: Path | None = Field(default=None, strict=False)

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if not self.memory and not self.disk:
            raise ValueError("memory or disk must be above 0; without either leave spill out")
        if bool(self.disk) != (self.directory is not None):
            raise ValueError("disk and directory go together")
        return self


class SandboxConfig(_Section):
    """How sandboxes are made. Without an image the running Python is mounted read-only. ``image`` names one, and
    ``image_digest`` pins it (`athanor image build` prints it); or ``image_store`` is a folder of images, and the file
    ``image_pin`` says which of them runs (`athanor image use`). Another image is refused. With ``image_keys``, Ed25519
    public keys in hex, one of them must have signed it (`athanor image sign`). ``cores`` bounds each sandbox where the
    machine's cgroups allow it; 0 means all of the machine's. ``kernels`` is a directory that `athanor kernels build`
    made on this machine; engines that cannot use it compute without and say so in the log. An engine that has work and
    finishes no step for ``step_timeout_s`` seconds hangs, and is restarted: more than its longest step may take."""

    runsc: str = ""
    image: Path | None = Field(default=None, strict=False)
    image_digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    image_store: Path | None = Field(default=None, strict=False)
    image_pin: Path | None = Field(default=None, strict=False)
    image_keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        default=(), max_length=16, strict=False
    )
    unsafe_no_sandbox: bool = False
    memory_bytes: Annotated[int, Field(ge=256 << 20)] = 4 << 30
    cores: Annotated[float, Field(ge=0)] = 0.0
    kernels: Path | None = Field(default=None, strict=False)
    gpu_kernels: Path | None = Field(default=None, strict=False)
    """Folder of kernels that were compiled for GPUs (`docs/gpu.md`); an engine on a GPU has no compiler."""
    step_timeout_s: Annotated[float, Field(ge=5, le=3_600)] = 300.0
    own_engines: Annotated[int, Field(ge=0, le=64)] = 1
    """Engines of tenants of class `dedicated` that may be resident at once, beside the shared ones. With fewer than
    such tenants, they take turns: the one idle longest goes."""
    own_texts: Annotated[int, Field(ge=0, le=256)] = 4
    """The same of text sandboxes, which tenants of class `strict` have too."""
    own_memory_bytes: Annotated[int, Field(ge=0)] = 1 << 40
    """Memory of them all together; each counts with its limit, an engine `memory_bytes`, a text sandbox 2 GiB."""
    spill: SpillConfig | None = None
    checkpoints: Path | None = Field(default=None, strict=False)
    """A directory of the supervisor's user alone, where it keeps sandboxes saved before they have seen anything, so
    that the next start takes a fraction of the time. Left out: every start is a cold one."""

    @property
    def residents(self) -> ResidentLimits:
        """Of sandboxes of single tenants."""
        return ResidentLimits(
            engines=self.own_engines, texts=self.own_texts, memory_bytes=self.own_memory_bytes,
            engine_bytes=self.memory_bytes,
        )

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if (self.image is None) != (not self.image_digest):
            raise ValueError("image and image_digest go together: `athanor image build` prints the digest")
        if (self.image_store is None) != (self.image_pin is None):
            raise ValueError("image_store and image_pin go together: `athanor image use` writes the pin")
        if self.image is not None and self.image_store is not None:
            raise ValueError("image names one image and image_store a folder of them: one of the two")
        if self.image_keys and self.image is None and self.image_store is None:
            raise ValueError("image_keys ask for a signed image, and there is none; name image or image_store")
        return self


class AuditConfig(_Section):
    """The audit log: ``directory`` belongs to the supervisor alone. ``key`` is the file of the signing key, under
    systemd a credential; without it one is made in the directory. ``on_failure`` says what happens to requests while
    the disk does not take entries: ``continue`` serves them, ``refuse`` does not."""

    directory: Path = Field(strict=False)
    key: Path | None = Field(default=None, strict=False)
    on_failure: Literal["continue", "refuse"] = "continue"


class KeysConfig(_Section):
    """Tenants' keys: ``root_key`` is a file of 32 random bytes that only its owner may read (`athanor tenant root`
    makes one; under systemd a credential), ``keyring`` the folder of the keys wrapped under it."""

    root_key: Path = Field(strict=False)
    keyring: Path = Field(strict=False)


class ApplianceConfig(_Section):
    """Everything ``athanor serve`` needs."""

    listen: ListenConfig = ListenConfig()
    models: tuple[ModelConfig, ...] = Field(min_length=1, max_length=64, strict=False)
    policy: Path = Field(strict=False)
    credentials: Path = Field(strict=False)
    pepper: Path = Field(strict=False)
    run_dir: Path = Field(strict=False)
    sandbox: SandboxConfig = SandboxConfig()
    audit: AuditConfig | None = None
    keys: KeysConfig | None = None
    digest_cache: Path | None = Field(default=None, strict=False)
    """Where the supervisor remembers digests of model files, so that it need not read all weights at every start; in a
    folder that nobody else may write to."""
    state: Path | None = Field(default=None, strict=False)
    """Where an installation notes the form of its state (``schema.json``); one that this version does not know is not
    served from."""
    wipe_memory: bool = True
    """Whether host processes and text sandboxes overwrite memory that they free; what ``retention: none`` says of
    memory needs it."""

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        if self.sandbox.spill is not None and self.keys is None:
            raise ValueError("sandbox.spill needs keys: what leaves an engine is sealed")
        return self

    @field_validator("models")
    @classmethod
    def _unique(cls, value: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        names = [model.name for model in value]
        if len(set(names)) != len(names):
            raise ValueError("two models have one name")
        if len({model.runner == "null" for model in value}) > 1:
            raise ValueError("null runners and models do not go together: a benchmark has an appliance of its own")
        return value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[V6]:PORT`` to its parts.

    Raises:
        ValueError: not of that form, or a port beyond 65535.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def load_config(path: Path) -> ApplianceConfig:
    """Read and check the configuration.

    Raises:
        ConfigError: unreadable, or wrong; each problem as ``file:line:column: key: what``.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        values, locate = load_yaml(data.decode(), str(path))
        config = ApplianceConfig.model_validate(values)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error
    except PolicyError as error:
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            where = tuple(item["loc"])
            line, column = locate.key(where) if item["type"] == "extra_forbidden" else locate(where)
            said = worded(item, _known_keys(where[:-1])).removeprefix("Value error, ")
            problems.append(f"{path}:{line}:{column}: {dotted(where)}: {said}")
        raise ConfigError("\n".join(problems)) from error
    return _anchored(config, path.resolve().parent)


def _known_keys(where: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that there are in a section of the configuration."""
    section: type[BaseModel] = ApplianceConfig
    for part in where:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return tuple(section.model_fields)


def _section_of(kind: Any) -> type[BaseModel] | None:
    """The section in an annotation: itself, one of a list, or one that may be left out."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next((found for one in get_args(kind) if (found := _section_of(one)) is not None), None)


def _anchored(config: ApplianceConfig, folder: Path) -> ApplianceConfig:
    """The same configuration with every path absolute."""
    models = tuple(
        model.model_copy(update={"path": folder / model.path}) for model in config.models
    )
    listen = config.listen
    if listen.tls is not None:
        tls = listen.tls
        moved = {name: folder / value for name, value in tls if value is not None}
        listen = listen.model_copy(update={"tls": tls.model_copy(update=moved)})
    if listen.admin.startswith("unix:"):
        listen = listen.model_copy(update={"admin": f"unix:{folder / listen.admin.removeprefix('unix:')}"})
    sandbox = config.sandbox
    names = ("image", "image_store", "image_pin", "checkpoints", "kernels", "gpu_kernels")
    places = {name: getattr(sandbox, name) for name in names}
    sandbox = sandbox.model_copy(update={name: folder / path for name, path in places.items() if path is not None})
    audit = config.audit
    if audit is not None:
        key = None if audit.key is None else folder / audit.key
        audit = audit.model_copy(update={"directory": folder / audit.directory, "key": key})
    if sandbox.spill is not None and sandbox.spill.directory is not None:
        spill = sandbox.spill.model_copy(update={"directory": folder / sandbox.spill.directory})
        sandbox = sandbox.model_copy(update={"spill": spill})
    keys = config.keys
    if keys is not None:
        moved = {"root_key": folder / keys.root_key, "keyring": folder / keys.keyring}
        keys = keys.model_copy(update=moved)
    paths = {name: folder / getattr(config, name) for name in ("policy", "credentials", "pepper", "run_dir")}
    if config.digest_cache is not None:
        paths["digest_cache"] = folder / config.digest_cache
    if config.state is not None:
        paths["state"] = folder / config.state
    paths |= {"models": models, "listen": listen, "sandbox": sandbox, "audit": audit, "keys": keys}
    return config.model_copy(update=paths)
