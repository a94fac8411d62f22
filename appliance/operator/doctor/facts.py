"""What ``athanor doctor`` judges; values only. An empty ``problem`` means that there is none. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.common.batch_status import BatchQueue
from appliance.common.checkpoint_status import CheckpointStatus
from appliance.common.model_memory import Memory
from appliance.common.status import Alert
from appliance.operator.doctor.remote_facts import RemoteOperators
from isolation.gpu.gpu_facts import GpuFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """NVIDIA's driver and devices."""

    names: tuple[str, ...] = ()
    driver: str = ""
    """Version of the driver; empty without one."""
    known: tuple[str, ...] = ()
    """Driver versions that this runsc can pass through, by its own word; empty when it says nothing."""
    list_problem: str = ""
    """Why its answer cannot be read; empty where it can, or where it knows no such question."""
    found: GpuFacts = field(default_factory=GpuFacts)
    """Nodes, libraries, and how cards are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runsc:
    """gVisor's program, and whether it holds a sandbox here."""

    path: str = ""
    version: int = 0
    """Release date as a number."""
    problem: str = ""
    """Why there is no usable one."""
    platform_problem: str = ""
    """Why a trial sandbox did not run; empty when it did, or when there is no runsc to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserNamespaces:
    """Why a process without root gets none, if so."""

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """What this process could set limits with."""

    version: int
    controllers: tuple[str, ...]
    """Those of memory, cpu and pids that are available."""
    directory: str
    """Our own group."""
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of this process; -1 is unlimited."""

    nofile: int
    memlock: int
    pids: int
    under_systemd: bool
    """Units are installed: their limits count, not those of this shell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The kernel's clock, as adjtimex(2) tells."""

    now: float
    synchronised: bool | None
    """None: the kernel does not say."""
    max_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about the machine alone."""

    root: bool
    cores: int
    kernel: str
    memory: Memory
    gpu: Gpu
    runsc: Runsc
    namespaces: UserNamespaces
    cgroups: Cgroups
    limits: ProcessLimits
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One address to listen on."""

    name: str
    address: str
    problem: str = ""
    mend: str = ""
    """Command that mends the problem; empty: another address does."""
    in_use: bool = False
    holder: str = ""
    """Process that listens there, where it can be told."""
    kept: bool = False
    """It is our own socket, which systemd keeps for the next start."""
    open: bool = False
    """Whether other machines may reach it, and it asks for no credential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The TLS files of both front ends."""

    path: str
    not_before: float = 0.0
    not_after: float = 0.0
    problem: str = ""
    """The certificate cannot be read."""
    key_problem: str = ""
    """The key cannot be used with it."""
    authority_problem: str = ""
    """The file of the clients' authorities cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One file system."""

    path: str
    purpose: str
    free: int
    total: int
    free_inodes: int
    """-1: it has no fixed number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access rights of one file of the appliance."""

    path: str
    purpose: str
    mode: int
    """Permission bits."""
    secret: bool
    """Nobody else may even read it."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceUnit:
    """One of our systemd units as it is loaded, drop-ins included."""

    name: str
    active: bool = False
    stale: bool = False
    """Its files have changed since systemd read them."""
    file: str = ""
    drop_ins: tuple[str, ...] = ()
    user: str = "root"
    group: str = ""
    """Empty: the user's own."""
    groups: tuple[str, ...] = ()
    """Further groups."""
    command: tuple[str, ...] = ()
    """Words of ExecStart=."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables; in ``ServiceFacts`` without their values."""
    environment_files: tuple[str, ...] = ()
    credentials: tuple[tuple[str, str], ...] = ()
    """Name and source of each credential that systemd loads for it."""
    kept: int = 0
    """Descriptors that systemd keeps for its next start."""
    protect_system: str = "no"
    hidden: tuple[str, ...] = ()
    """Folders of the machine that it does not see."""
    read_only: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    """Folders that it may write to all the same, where protect_system forbids it."""
    made: tuple[str, ...] = ()
    """Folders that systemd makes for it before each start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A path that a service needs and cannot use."""

    unit: str
    user: str
    purpose: str
    use: str
    """What the service does with it, as in ``cannot read``."""
    path: str
    culprit: str = ""
    """The path at which it fails: itself, a folder on the way or a file in it."""
    reason: str = ""
    owner: str = ""
    """Owner and group of the culprit, and its mode."""
    mode: int = 0
    group: str = ""
    """Group of the service's user."""
    withheld: str = ""
    """Setting of the unit that withholds it, if one does."""


EXPIRY_DAYS = 14
"""Days before its end at which a key is reported, so that there is time to rotate it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy on disk, with the keys that it names."""

    path: str
    digest: str = ""
    tenants: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    keys_problem: str = ""
    """Why the key table was not read."""
    keys_unseen: bool = False
    """The key table may be read by the service only."""
    missing_keys: tuple[str, ...] = ()
    """Credentials of tenants that no key belongs to."""
    unused_keys: tuple[str, ...] = ()
    """Keys in force that no tenant names."""
    expiring_keys: tuple[str, ...] = ()
    """Keys of tenants that expire within ``EXPIRY_DAYS``, each with the day."""
    missing: tuple[str, ...] = ()
    """Places where it names a model that is not served or an issuer that is not known, each with what is said
    there."""
    overlooked: tuple[str, ...] = ()
    """Files among the drop-ins that are no part of it."""
    unsafe: tuple[str, ...] = ()
    """Tenants that ``unsafe_allow_all`` allows everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model of the configuration."""

    name: str
    problem: str = ""
    weight_bytes: int = 0
    """Bytes of the weight files."""
    kv_bytes: int = 0
    adapter_bytes: int = 0
    """Memory that its engine takes for adapters; 0 where it has none."""
    on_card: bool = False
    """Whether weights and KV are in a card's memory."""
    int8: bool = False
    null: bool = False
    external: str = ""
    """Address of the endpoint that computes it; empty: the appliance does."""
    endpoint_problem: str = ""
    """Why the endpoint does not serve it."""
    path: str = ""
    pinned: str = ""
    """The digest that its files must have; empty: any."""
    digest: str = ""
    """What they have; looked at only where one is pinned, or a signature demanded."""
    signer: str = ""
    """Id of the key that has signed them, of those that are demanded."""
    unsigned: str = ""
    """Why none of them has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Compiled kernels."""

    path: str = ""
    """Folder of the kernels; empty: the configuration names none."""
    problem: str = ""
    stale: bool = False
    """They are of other sources."""
    best: str = ""
    """Name of the best library that this processor runs; empty when it runs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeKernels:
    """A folder of kernels that were compiled for GPUs."""

    architecture: str
    ours: bool
    """They are of the sources that the engine has."""
    fits: bool
    """They were asked for with this model's description and numbers, or their folder does not say with which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernelFacts:
    """What was compiled for the GPUs of a model that is given some."""

    model: str
    model_path: str
    path: str
    """Folder in which they are looked for; empty: none."""
    needed: bool
    dtype: str
    """Empty: that of its weights."""
    block_size: int
    rows: int
    weights: str = "stored"
    """Or ``fp8``."""
    problem: str = ""
    made: tuple[MadeKernels, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The card that a model's engine gets, as the supervisor would choose it."""

    model: str
    card: int = -1
    plan: str = ""
    """Memory, rows and budgets; empty where they are not known."""
    problem: str = ""
    """Why it gets none."""
    unknown: str = ""
    """Why the card's memory is not known."""
    rows: int = 0
    """Sequences of one step; 0 where the plan is not known."""
    name: str = ""
    """What the driver calls the card; empty where it does not."""
    others: int = 0
    """Bytes that programs other than our engines hold of it, or, where the model gets none, of all that it may use."""
    now: tuple[int, ...] = ()
    """Cards on which the running appliance has engines of it."""
    cut_up: tuple[int, ...] = ()
    """Cards that it might have had and that are cut up into MIG instances."""
    limited: bool = False
    """Whether it gets less than its share because of them."""

    @property
    def card_words(self) -> str:
        """The card's number and name."""
        return f"card {self.card}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The sandboxes' image."""

    path: str = ""
    """Folder of the image; empty: the running Python is mounted."""
    digest: str = ""
    pinned: str = ""
    packaged: str = ""
    """Digest of the image that a package has brought; empty where none has."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A collector that the environment names."""

    signal: str  # traces or metrics
    endpoint: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running appliance of this configuration, as its admin listener tells."""

    admin: str
    answers: bool = False
    silent_s: float = 0.0
    """Seconds waited for a listener that does not answer; 0: no listener, or it answers."""
    ready: bool = False
    reason: str = ""
    version: str = ""
    policy_digest: str = ""
    reload_error: str = ""
    cgroup: str = ""
    unsafe: bool = False
    alerts: tuple[Alert, ...] = ()
    """What it says is the matter now."""
    weights: tuple[tuple[str, str], ...] = ()
    """Models, each with the form in which an engine holds its weights."""
    batches: BatchQueue | None = None
    """Batches that are not over, and what is kept; None where no files are."""
    engine_cards: tuple[tuple[str, int], ...] = ()
    """Models, each with a card on which it has an engine."""
    checkpoints: tuple[CheckpointStatus, ...] = ()
    """Checkpoints that sandboxes begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAccount:
    """What is in an audit folder."""

    folder: str
    entries: int = 0
    """Entries of the log, those of segments that were moved away included."""
    counted: int = 0
    """Entries that the usage book has."""
    problem: str = ""
    """Why log or book cannot be read; empty where both can."""
    witnesses: int = 0
    """Witnesses that are configured."""
    unwitnessed: str = ""
    """What is wrong with them."""
    witnessed_at: int = 0
    """Unix time of the last cosignature of the one that has cosigned least lately; 0 before that."""
    unseen: bool = False
    """Whether the folder is closed to this user."""
    empty: bool = False
    """Whether there is no log yet."""
    damaged: tuple[str, ...] = ()
    """What was moved aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorApi:
    """Process of the operator's API."""

    socket: str
    problem: str = ""
    """Why it takes no connection; empty where it does."""
    unseen: bool = False
    """Whether the socket is closed to this user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """Facts about what a configuration names."""

    config: str
    unsafe: bool
    sandbox_bytes: int
    """Memory of each engine's sandbox."""
    ports: tuple[Port, ...]
    tls: Certificate | None
    disks: tuple[Disk, ...]
    access: tuple[Access, ...]
    policy: Policy
    models: tuple[Model, ...]
    kernels: Kernels
    image: Image
    exporters: tuple[Exporter, ...]
    running: Running
    gpu_kernels: tuple[GpuKernelFacts, ...] = ()
    cards: tuple[CardFacts, ...] = ()
    """Cards of the models that get one."""
    threads: tuple[str, ...] = ()
    """Threads of the engines with the reason for their number, each line once, as seen from this process."""
    rank_problems: tuple[str, ...] = ()
    """Why engines of several ranks would not be started, each in one line."""
    units: tuple[ServiceUnit, ...] = ()
    """Our units, where systemd has them."""
    refusals: tuple[Refusal, ...] = ()
    """What their users cannot use and need."""
    tried: int = 0
    """Paths that were tried as those users."""
    untried: str = ""
    """Why none was tried; empty where they were, or there are no units."""
    own_settings: tuple[str, ...] = ()
    """Differences between what a unit starts with and what was looked at here, a line each."""
    account: KeptAccount | None = None
    """Audit log and usage book; None where none are kept."""
    operator_api: OperatorApi | None = None
    """Process of the operator's API; None where none is configured."""
    remote_operators: RemoteOperators | None = None
    operators_tls: Certificate | None = None
    """Those of operators on other machines, and their certificate; None where none are configured."""
    forms: tuple[str, ...] = ()
    """What engines computed with fastest when this machine tried, a line for each model that was tried."""
    carrier_problem: str | None = None
    """Why carrier or store of sealed KV do not serve, empty where they do; None where there are none."""
    store_problem: str | None = None
    """Why the fleet's store does not answer, empty where it does; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """All facts. Without a usable configuration ``service`` is None and ``config_problem`` says why."""

    version: str
    machine: Machine
    service: ServiceFacts | None
    config: str
    """Path of the configuration that was looked for."""
    config_problem: str = ""
    config_absent: bool = False
