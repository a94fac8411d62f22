"""Schema of the machine's configuration (``athanor.yaml``): frozen sections; each key has type, unit, default, meaning.

The docstring below a key is its description: ``config_keys`` takes it from here for `athanor config reference`, the
manual page and docs/reference/. ``config_loader`` reads the values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from appliance.common.adapter_config import AdapterConfig
from appliance.common.addresses import collide
from appliance.common.config_places import (
    AuditConfig,
    BatchesConfig,
    HostConfig,
    KeysConfig,
    ModelCacheConfig,
    SpillConfig,
)
from appliance.common.config_section import BYTES, SECONDS, TOKENS, Section, Unit
from appliance.common.external_config import ExternalConfig
from appliance.common.fleet_config import FleetConfig
from appliance.common.gpu_defaults import PROCESSOR, CardNumber, check_sizes, left_to_the_card
from appliance.common.kv_store_config import KvStoreConfig
from appliance.common.listen_config import ListenConfig
from appliance.common.model_keys import MAX_MODEL_KEYS, ModelKey
from appliance.common.model_rules import check_entry, rank_words
from appliance.common.operator_config import OperatorApiConfig, RemoteOperatorsConfig
from appliance.common.residency import ResidentLimits
from appliance.common.split_config import SplitConfig
from appliance.common.token_config import TokenIssuerConfig, check_issuers

MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Pattern of a model's name: the name stands in requests, paths and logs."""


Label = Annotated[str, Field(min_length=1, max_length=64)]
"""Name of a classifier's label, in characters."""

MAX_LABEL_NAMES = 256
"""Most names of labels: a model's are told to the gateway in one message."""


class ModelConfig(Section):
    """Models to serve, a list with one entry for each model."""

    name: str = Field(pattern=MODEL_NAME)
    """Name of the model in requests, policies, paths and logs. It is unique in the list."""
    path: Path | None = Field(default=None, strict=False)
    """Folder with the model's files: weights in safetensors, config.json, tokenizer. Left out: the model of the cache
    that has `digest`."""
    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """SHA-256 digest of the model's files in hex (`athanor model digest` prints it). Other files are refused. Empty:
    the files are not pinned."""
    signed_by: tuple[ModelKey, ...] = Field(default=(), max_length=MAX_MODEL_KEYS, strict=False)
    """Public keys, one of which must have signed the model's files (docs/model-signatures.md): PEM texts, or their
    base64 in one line. Empty: model_keys holds."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the numbers that the engine computes with. auto: the type that the weights are stored in."""
    weights: Literal["stored", "int8", "fp8"] = "stored"
    """How weights are held. stored: as in the files. int8: rounded to 8 bits while they are loaded, with activations
    rounded row by row; takes half the memory of bfloat16 and gives other tokens. fp8: the same in 8-bit floating point
    numbers, on a GPU alone (docs/weights.md)."""
    max_context: Annotated[int, Field(ge=0, le=1 << 20), TOKENS] = PROCESSOR["max_context"]
    """Longest prompt and answer together. 0, the default on a GPU: what the model was made for, as far as
    the KV reaches."""
    kv_bytes: Annotated[int, Field(ge=1 << 20), BYTES] = 256 << 20
    """Memory of the KV cache of each engine. Left out on a GPU: gpu_share decides."""
    block_size: Annotated[int, Field(ge=1, le=512), TOKENS] = 16
    """Size of one KV block. Prefixes are reused in whole blocks, and smaller blocks cost more bookkeeping."""
    max_num_seqs: Annotated[int, Field(ge=0, le=4096), Unit("sequences")] = PROCESSOR["max_num_seqs"]
    """Most sequences that one step computes. 0, the default on a GPU: up to 256, by card and model."""
    max_num_batched_tokens: Annotated[int, Field(ge=0, le=65_536), TOKENS] = PROCESSOR["max_num_batched_tokens"]
    """Most tokens that one step computes, prompts and answers together. 0, the default on a GPU: up to
    2048, by card and model."""
    runner: Literal["model", "embed", "classify", "external", "null"] = "model"
    """What the engine does. model: generates text. embed: gives vectors, for /v1/embeddings, and for /v1/rerank and
    /v1/score by their cosine. classify: runs a classifier, for /v1/rerank, /v1/score and /v1/classify. external: a
    cluster outside of this appliance generates the text (section external); the folder has tokenizer and template, and
    weights are not needed. null: reads no
    weights and answers with meaningless ids, to measure everything but the model; then every model of the
    configuration must be null, and status and /v1/models say so."""
    pooling: Literal["auto", "last", "last+normalise", "mean", "mean+normalise", "cls", "cls+normalise"] = "auto"
    """How `runner: embed` makes one vector of a text. auto: as the model's modules.json says."""
    truncates: bool = False
    """Whether the model was trained so that the first numbers of a vector are a usable vector as well, which the
    request field `dimensions` needs. For `runner: embed`."""
    pairs: Literal["joined", "template"] = "joined"
    """How `runner: classify` makes one text of a query and a document. joined: the tokens of the one, then those of the
    other. template: by the model's chat template, with messages of the roles query and document."""
    labels: Annotated[tuple[Label, ...], Field(strict=False, max_length=MAX_LABEL_NAMES)] = ()
    """Names of a classifier's labels, in the order of its outputs. Left out: LABEL_0, LABEL_1 and so on."""
    step_us: Annotated[int, Field(ge=0, le=10_000_000), Unit("microseconds")] = 0
    """Shortest time of one step of `runner: "null"`."""
    external: ExternalConfig | None = None
    """Endpoint of a model with `runner: external`."""
    gpu: Literal["off", "auto"] | Annotated[tuple[CardNumber, ...], Field(strict=False)] = "off"
    """GPUs that the model's engines may use: each engine gets one, that with the most free memory. off: none. auto: any
    of the machine, or none where it has none. A list of card numbers: one of these, and all of them must be there."""
    gpu_share: Annotated[int, Field(ge=0, le=95), Unit("percent of a card's memory")] = 0
    """Memory of a card that each engine of the model may hold; the KV cache takes what weights and a reserve leave of
    it. Default on a GPU: 90, unless kv_bytes is given. 0: kv_bytes holds. Shares on one card add up to 95 at most."""
    gpu_palette: bool = False
    """Hold the MLPs' matrices on a GPU a second time, without loss in three quarters of the bytes, and take products of
    up to 16 rows from these where the engine measures that it is faster (docs/gpu.md). KV has less memory then."""
    backend: Literal["auto", "device", "plain"] = "auto"
    """What computes. auto: the device backend where the engine has a GPU, the processor's otherwise. device, plain:
    that one."""

    keep: Literal["always", "while_used", "never"] = "always"
    """When the model's sandboxes are there. always: as long as the appliance runs. while_used: from the first request
    until `idle_s` after the last, or until another model needs their memory. never: from a request until no request is
    left. A model that is not kept begins asleep, and a request wakes it (docs/models.md)."""
    idle_s: Annotated[float, Field(ge=1, le=604_800), SECONDS] = 600.0
    """Time without a request after which a model with `keep: while_used` is put to sleep."""

    tensor_parallel: Annotated[int, Field(ge=1, le=8), Unit("processes")] = 1
    """Processes that compute each engine of the model together, each with a part of every layer and of the KV cache.
    All are in the engine's one sandbox. For `runner: model` on the processor, without adapters and `weights: int8`;
    compiled kernels are not used, and blocks of KV do not leave the engine. Heads must be divisible by it."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=8), Unit("stages")] = 1
    """Stages into which the layers of each engine of the model are cut, each of `tensor_parallel` or `expert_parallel`
    processes. Several parts of a batch are on their way at once, so that all stages compute. As `tensor_parallel`
    otherwise (docs/ranks.md)."""
    expert_parallel: Annotated[int, Field(ge=1, le=8), Unit("processes")] = 1
    """Processes among which the experts of a model are dealt; each has all of the rest, and of the KV cache. 1 or as
    `tensor_parallel`: the processes that share layers deal experts too. As `tensor_parallel` otherwise."""
    adapters: tuple[AdapterConfig, ...] = Field(default=(), max_length=128, strict=False)
    """Adapters (LoRA) of the model."""
    adapter_bytes: Annotated[int, Field(ge=1 << 20), BYTES] = 256 << 20
    """Memory for adapters in each engine, taken at its start. One that does not fit in beside those before it is left
    out."""

    @model_validator(mode="before")
    @classmethod
    def _on_card(cls, values: object) -> object:
        return left_to_the_card(values)

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if self.path is None and not self.digest:
            raise ValueError("a model needs a path, or the digest of a model of the cache")
        check_sizes(dict(self))
        check_entry(dict(self))
        if self.gpu == ():
            raise ValueError("gpu is an empty list; say off for none")
        if self.gpu != "off" and (self.backend == "plain" or self.runner != "model"):
            raise ValueError("gpu is for runner: model and a backend other than plain: nothing else computes on a GPU")
        if self.gpu_share and self.gpu == "off":
            raise ValueError("gpu_share is a share of a GPU, and gpu is off")
        if self.gpu_palette and self.gpu == "off":
            raise ValueError("gpu_palette is memory of a GPU, and gpu is off")
        if self.keep != "always" and self.gpu != "off":
            raise ValueError("keep is for models on the processor: one on a GPU is always there; leave keep out")
        return self

    @property
    def ranks(self) -> int:
        """Processes of each engine of the model."""
        return self.pipeline_parallel * max(self.tensor_parallel, self.expert_parallel)

    @property
    def rank_words(self) -> str:
        """The keys that say how processes divide the model, with their values."""
        return rank_words(dict(self))

    @property
    def adapter_digests(self) -> dict[str, bytes]:
        """Digest of each adapter by its whole name, MODEL:ADAPTER."""
        return {f"{self.name}:{one.name}": bytes.fromhex(one.digest) for one in self.adapters}

    @property
    def folder(self) -> Path:
        """Folder of the model's files, once relative paths and the cache are resolved (``anchored``)."""
        assert self.path is not None, "an anchored configuration has a path for each model"
        return self.path

    @property
    def engine_backend(self) -> str:
        """Backend that the engine is told: without a GPU it does not look for one, even where no sandbox hides it."""
        return "plain" if (self.gpu, self.backend) == ("off", "auto") else self.backend


class SandboxConfig(Section):
    """How sandboxes are made. Without an image the running Python is mounted read-only. `image` with `image_digest`
    names one image; `image_store` with `image_pin` names a folder of images and the file that chooses one."""

    runsc: str = ""
    """Path of gVisor's program. Empty: the one beside the running Python, else the one in the system's path."""
    image: Path | None = Field(default=None, strict=False)
    """Folder of the one image that sandboxes run."""
    image_digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """SHA-256 digest of `image` in hex (`athanor image build` prints it). Another image is refused."""
    image_store: Path | None = Field(default=None, strict=False)
    """Folder of several images, in place of `image`."""
    image_pin: Path | None = Field(default=None, strict=False)
    """File that says which image of the store runs (`athanor image use` writes it)."""
    image_keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        default=(), max_length=16, strict=False
    )
    """Ed25519 public keys in hex. One of them must have signed the image (`athanor image sign`). Empty: no signature is
    asked for."""
    unsafe_no_sandbox: bool = False
    """Whether text and engine programs run without a sandbox. For development on your own prompts only."""
    memory_bytes: Annotated[int, Field(ge=256 << 20), BYTES] = 4 << 30
    """Memory limit of each engine sandbox."""
    cores: Annotated[float, Field(ge=0), Unit("processor cores")] = 0.0
    """Processor limit of each sandbox, where the machine's cgroups allow one. 0: all of the machine's. An engine
    computes with one thread for each physical core within the limit, less one when there are several."""
    kernels: Path | None = Field(default=None, strict=False)
    """Folder that `athanor kernels build` made on a machine of this architecture. An engine that cannot use it, or is
    faster without, says so in the log and computes without."""
    form_cache: Path | None = Field(default=None, strict=False)
    """File in which the supervisor remembers in which form each engine computes fastest here, so that not every start
    tries them. Its folder must be writable for no other user. Left out: every start tries them."""
    gpu_kernels: Path | None = Field(default=None, strict=False)
    """Folder of kernels that were compiled for GPUs (docs/gpu.md). An engine on a GPU has no compiler of its own."""
    step_timeout_s: Annotated[float, Field(ge=5, le=3_600), SECONDS] = 300.0
    """Time without a finished step after which an engine that has work counts as hung and is restarted. It must exceed
    the engine's longest step."""
    freeze_after_s: Annotated[float, Field(ge=5, le=86_400), SECONDS] = 30.0
    """Time without a request after which a model's sandboxes are frozen, where the policy allows it (`freeze_idle`) and
    the machine has cgroups for it."""
    own_engines: Annotated[int, Field(ge=0, le=64), Unit("engines")] = 1
    """Most engines of tenants of class dedicated that are resident at once, beside the shared ones. When more tenants
    need one, the engine that is idle longest is ended."""
    own_texts: Annotated[int, Field(ge=0, le=256), Unit("text sandboxes")] = 4
    """Most text sandboxes of tenants of classes strict and dedicated that are resident at once."""
    own_memory_bytes: Annotated[int, Field(ge=0), BYTES] = 1 << 40
    """Memory of all sandboxes of single tenants together. An engine counts with `memory_bytes`, a text sandbox with
    2 GiB."""
    models_memory_bytes: Annotated[int, Field(ge=0), BYTES] = 0
    """Memory of the shared engines of all models that are awake together, each counted as `athanor model add` tells it.
    0: as much as the machine has available when a model is woken."""
    spill: SpillConfig | None = None
    """Spill of KV blocks to host memory and disk. Without this section blocks are dropped."""
    checkpoints: Path | None = Field(default=None, strict=False)
    """Folder of the supervisor's user alone, for sandboxes that are saved before they have seen any tenant's data, so
    that the next start takes a fraction of the time. Left out: every start is a cold one."""
    checkpoints_max_bytes: Annotated[int, Field(ge=0), BYTES] = 0
    """Bytes that all checkpoints together may have; those used least recently go first, and one that alone is larger is
    not kept. 0: 8 GiB, or half of the disk's room where that is more, up to 64 GiB."""

    @property
    def residents(self) -> ResidentLimits:
        """Limits of the sandboxes of single tenants."""
        return ResidentLimits(
            engines=self.own_engines,
            texts=self.own_texts,
            memory_bytes=self.own_memory_bytes,
            engine_bytes=self.memory_bytes,
        )

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``, that of ``runsc`` included."""
        moved = super().anchored(folder)
        return moved.model_copy(update={"runsc": str(folder / moved.runsc)}) if moved.runsc else moved

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


class ApplianceConfig(Section):
    """Everything that `athanor serve` needs."""

    listen: ListenConfig = ListenConfig()
    """Addresses on which the appliance listens."""
    models: tuple[ModelConfig, ...] = Field(min_length=1, max_length=64, strict=False)
    """Models to serve. The entries of files `models.d/*.yaml` beside this file follow them (docs/models.md)."""
    model_keys: tuple[ModelKey, ...] = Field(default=(), max_length=MAX_MODEL_KEYS, strict=False)
    """Public keys, as in `signed_by`, one of which must have signed each model that names none itself; one without
    such a signature is not served. Empty: models need no signature."""
    model_cache: ModelCacheConfig | None = None
    """Cache of pulled models. Without this section each model has a path."""
    policy: Path = Field(strict=False)
    """Policy file, or folder of policy files (*.yaml): what each tenant may do. The files in `policy.d` beside a file
    `policy.yaml` belong to it."""
    policy_keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(
        default=(), max_length=32, strict=False
    )
    """Public keys, in hex, one of which must have signed the policy (`athanor policy sign`); a policy that none of them
    signed changes nothing, and at a start it is an error. Empty: policies need no signature."""
    credentials: Path = Field(strict=False)
    """File of the API keys' digests (`athanor key create` writes it)."""
    pepper: Path = Field(strict=False)
    """File of the secret under which API keys are hashed; under systemd a credential."""
    tokens: tuple[TokenIssuerConfig, ...] = Field(default=(), max_length=16, strict=False)
    """OIDC providers whose tokens are taken as credentials. Without any, tokens are refused."""
    run_dir: Path = Field(strict=False)
    """Folder for sockets, locks and sandboxes of the running appliance. Keep it short: the path of a socket below it
    has at most 107 bytes."""
    sandbox: SandboxConfig = SandboxConfig()
    """How sandboxes are made."""
    audit: AuditConfig | None = None
    """The audit log. Without this section there is none."""
    keys: KeysConfig | None = None
    """Tenants' encryption keys. Without this section nothing can be spilled, and no files are kept."""
    kv_store: KvStoreConfig | None = None
    """Store outside of this machine for sealed KV. Without this section no KV leaves the machine."""
    batches: BatchesConfig | None = None
    """Files and batches of tenants. Without this section there are none."""
    region: Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9-]{0,62})?$")] = ""
    """Region in which this appliance is, such as eu-central, compared with `regions` of the policy. Empty: none, and
    tenants with regions are not served."""
    operator_api: OperatorApiConfig | None = None
    """The operator's gRPC API. Without this section there is none."""
    remote_operators: RemoteOperatorsConfig | None = None
    """Operators on other machines. Without this section there are none."""
    fleet: FleetConfig | None = None
    """Hosts that share the policy's limits. Without this section they are this host's alone."""
    split: SplitConfig | None = None
    """Hosts that compute prompts for others. Without this section each host computes its own."""
    host: HostConfig | None = None
    """What this machine costs. Without this section nothing has a cost but what the policy prices."""
    digest_cache: Path | None = Field(default=None, strict=False)
    """File in which the supervisor remembers digests of model files, so that it need not read all weights at every
    start. Its folder must be writable for no other user. Left out: digests are computed at every start."""
    state: Path | None = Field(default=None, strict=False)
    """Folder in which an installation records the version of its state (schema.json). A version that this program does
    not know is refused. Left out: nothing is checked."""
    wipe_memory: bool = True
    """Whether host processes and text sandboxes overwrite memory that they free. The policy's `retention: none` needs
    it."""

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        if self.sandbox.spill is not None and self.keys is None:
            raise ValueError("sandbox.spill needs keys: what leaves an engine is sealed")
        if self.kv_store is not None and self.sandbox.spill is None:
            raise ValueError("kv_store needs sandbox.spill: what finds no place in memory or on disk goes there")
        if self.fleet is not None and self.fleet.store and self.listen.fleet_key is None:
            raise ValueError("fleet.store needs listen.fleet_key: what hosts say to each other is proved under it")
        if (
            self.split is not None
            and self.split.role != "mixed"
            and (self.kv_store is None or not self.kv_store.members)
        ):
            raise ValueError("split needs kv_store.members: a prompt's KV goes from host to host through that store")
        if self.batches is not None and (self.keys is None or self.audit is None):
            raise ValueError("batches need keys and audit: files are sealed, and what is charged is in the audit log")
        return self

    @model_validator(mode="after")
    def _reached(self) -> Self:
        if self.remote_operators is not None:
            if self.remote_operators.grpc is not None and self.operator_api is None:
                raise ValueError("remote_operators.grpc is a way to the operator's API, which needs operator_api")
            for name, address in self.remote_operators.addresses():
                for other, its in self.listen.addresses():
                    if collide(address, its):
                        raise ValueError(f"remote_operators.{name} and listen.{other} name one address, {address}")
        if self.split is not None and self.split.listen is not None:
            for other, its in self.listen.addresses():
                if collide(self.split.listen, its):
                    raise ValueError(f"split.listen and listen.{other} name one address, {self.split.listen}")
        return self

    @model_validator(mode="after")
    def _found(self) -> Self:
        for model in self.models:
            if model.path is None and self.model_cache is None:
                raise ValueError(f"model {model.name} has no path, and there is no section model_cache to find it in")
        return self

    def keys_for(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the keys one of which must have signed a model; none where it needs no signature."""
        return model.signed_by or self.model_keys

    def anchored(self, folder: Path) -> Self:
        """Copy with every relative path taken from ``folder``, and the paths of models of the cache."""
        moved = super().anchored(folder)
        if moved.model_cache is None:
            return moved
        place = moved.model_cache.directory / "models"
        models = tuple(
            one if one.path is not None else one.model_copy(update={"path": place / one.digest}) for one in moved.models
        )
        return moved.model_copy(update={"models": models})

    @field_validator("tokens")
    @classmethod
    def _issuers(cls, value: tuple[TokenIssuerConfig, ...]) -> tuple[TokenIssuerConfig, ...]:
        check_issuers(value)
        return value

    @field_validator("models")
    @classmethod
    def _unique(cls, value: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        names = [model.name for model in value]
        if len(set(names)) != len(names):
            raise ValueError("two models have one name")
        if len({model.runner == "null" for model in value}) > 1:
            raise ValueError("null runners and models do not go together: a benchmark has an appliance of its own")
        return value
