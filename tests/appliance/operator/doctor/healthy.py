"""Facts of a machine and a service in which nothing is wrong; tests change one thing each."""

from __future__ import annotations

from appliance.common.model_memory import Memory
from appliance.operator.doctor.facts import (
    Access,
    CardFacts,
    Certificate,
    Cgroups,
    Clock,
    Disk,
    DoctorFacts,
    Exporter,
    Gpu,
    Image,
    KeptAccount,
    Kernels,
    Machine,
    Model,
    Policy,
    Port,
    ProcessLimits,
    Running,
    Runsc,
    ServiceFacts,
    UserNamespaces,
)
from tests.isolation.gpu.gpu_machine import DRIVER
from tests.isolation.gpu.gpu_machine import FACTS as GPU_FACTS

NOW = 1_795_300_000.0
DAY = 86_400
GIB = 1 << 30

MACHINE = Machine(
    root=True,
    cores=16,
    kernel="Linux 6.12.0 x86_64",
    memory=Memory(total=128 * GIB, available=100 * GIB),
    gpu=Gpu(names=("NVIDIA H100 80GB HBM3",), driver=DRIVER, known=("535.104.12", DRIVER), found=GPU_FACTS),
    runsc=Runsc(path="/usr/bin/runsc", version=20_240_729),
    namespaces=UserNamespaces(),
    cgroups=Cgroups(version=2, controllers=("memory", "cpu", "pids"), directory="/sys/fs/cgroup/x", writable=True),
    limits=ProcessLimits(nofile=65_536, memlock=-1, pids=16_384, under_systemd=False),
    clock=Clock(now=NOW, synchronised=True, max_error_s=0.012),
)

SERVICE = ServiceFacts(
    account=KeptAccount(folder="/var/lib/athanor-supervisor/audit", entries=1_000, counted=1_000),
    config="/etc/athanor/athanor.yaml",
    unsafe=False,
    sandbox_bytes=40 * GIB,
    ports=(
        Port(name="http", address="0.0.0.0:8080", in_use=True),
        Port(name="grpc", address="0.0.0.0:8081", in_use=True),
        Port(name="admin", address="unix:/run/athanor/admin.sock"),
    ),
    tls=Certificate(path="/etc/athanor/server.pem", not_before=NOW - 30 * DAY, not_after=NOW + 60 * DAY),
    disks=(Disk(path="/run", purpose="sockets", free=2 * GIB, total=8 * GIB, free_inodes=900_000),),
    access=(Access(path="/etc/athanor/pepper", purpose="pepper", mode=0o600, secret=True),),
    policy=Policy(path="/etc/athanor/policy.yaml", digest="9f86d081884c7d65", tenants=("alpha", "beta")),
    models=(Model(name="qwen3-8b", weight_bytes=16 * GIB, kv_bytes=8 * GIB),),
    cards=(
        CardFacts(
            model="qwen3-8b",
            card=0,
            plan="73,403 MiB (90 % of 81,559 MiB) = weights 15,316 + context 512 + reserve 1,949 + spare blocks 516 + "
            "KV 55,108 + unused 2; 440,864 tokens of KV, 256 rows, 2,048 tokens in a step, context 131,072; "
            "14 graphs (rows: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)",
            rows=256,
        ),
    ),
    kernels=Kernels(path="/var/lib/athanor/kernels", best="x86-64-v4-dot"),
    image=Image(path="/usr/lib/athanor/image", digest="ab" * 32, pinned="ab" * 32),
    exporters=(Exporter(signal="traces", endpoint="http://collector:4318"),),
    running=Running(
        admin="unix:/run/athanor/admin.sock",
        answers=True,
        ready=True,
        version="0.1.0",
        policy_digest="9f86d081884c7d65",
        cgroup="cgroup v2: memory, cpu, pids",
        weights=(("qwen3-8b", "bf16"),),
    ),
    threads=("15 threads: 16 physical cores, one is left for the sandbox's kernel and the gateway",),
)

FACTS = DoctorFacts(version="0.1.0", machine=MACHINE, service=SERVICE, config=SERVICE.config)
