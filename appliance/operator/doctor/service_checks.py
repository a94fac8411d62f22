"""Pure: facts about what a configuration serves, and what it needs for that, to findings."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.disk_space import FULL_BYTES, LOW_BYTES, LOW_SHARE
from appliance.common.figures import size
from appliance.common.model_memory import CARD_ENGINE_BYTES, ENGINE_BYTES, LEAST_WEIGHT_SHARE, Memory
from appliance.common.status import Alert
from appliance.operator.doctor.account import check_account
from appliance.operator.doctor.batches import check_batches
from appliance.operator.doctor.carrier import check_carrier
from appliance.operator.doctor.checkpoints import check_checkpoints
from appliance.operator.doctor.facts import Disk, Exporter, Image, Kernels, Model, Port, Running, ServiceFacts
from appliance.operator.doctor.finding import Area, Finding, Severity, Subject
from appliance.operator.doctor.fleet_store import check_store
from appliance.operator.doctor.operator_api import check_operator_api
from appliance.operator.install.packaged_image import PIN, STORE

LOW_INODES = 1_000

LOOKED_AT = ("policy", "unsafe", "null", "disk")
"""Alerts of the running appliance about what has a check of its own here."""


def check_service(service: ServiceFacts, version: str, memory: Memory) -> Iterator[Finding]:
    """Findings about a service, except access rights (``access_checks``); ``version`` is this program's."""
    yield check_running(service.running, version)
    yield from map(check_alert, (one for one in service.running.alerts if one.key not in LOOKED_AT))
    if service.unsafe:
        yield Subject(Area.SANDBOXES, "sandboxes").problem(
            "unsafe_no_sandbox is on",
            means="models and prompts run with the rights of this user",
            mend="unsafe_no_sandbox: false    # in athanor.yaml",
        )
    elif service.running.unsafe:
        yield Subject(Area.SANDBOXES, "sandboxes").problem(
            "the running appliance has none, though the configuration asks for them",
            means="models and prompts run with the rights of this user",
            mend="systemctl restart athanor.target    # after a look at ATHANOR_SANDBOX__* and --set of its start",
        )
    else:
        yield check_image(service.image)
    for port in service.ports:
        yield check_port(port, running=service.running.answers or service.running.silent_s > 0)
    for model in service.models:
        yield check_model(model)
    yield from map(check_weights, service.running.weights)
    yield check_memory(service.models, service.sandbox_bytes, memory, running=service.running.answers)
    for line in service.threads:
        yield Subject(Area.SERVICE, "threads").ok(line)
    yield from check_ranks(service.rank_problems)
    yield check_kernels(service.kernels)
    for line in service.forms:
        yield Subject(Area.SERVICE, "fastest form").ok(line)
    if service.account is not None:
        yield from check_account(service.account)
    if service.operator_api is not None:
        yield check_operator_api(service.operator_api)
    yield from check_store(service.store_problem)
    yield from check_carrier(service.carrier_problem)
    yield from check_batches(service.running.batches)
    yield from check_checkpoints(service.running.checkpoints)
    for disk in service.disks:
        yield check_disk(disk)
    if not service.exporters:
        what = "none named; the last requests are kept in the gateway: athanor traces"
        yield Subject(Area.SERVICE, "collector").note(what)
    for exporter in service.exporters:
        yield check_exporter(exporter)


def check_ranks(problems: tuple[str, ...]) -> Iterator[Finding]:
    """Engines of several ranks that would not be started."""
    for line in problems:
        yield Subject(Area.SERVICE, "ranks").problem(
            line,
            means="the engine of this model is not started",
            mend="set another tensor_, pipeline_ or expert_parallel, or sandbox.cores, in the configuration",
        )


OWN_PROCESS = "(athanor "
"""How ``holders.holder`` begins the name of one of ours."""


def check_running(running: Running, version: str) -> Finding:
    """Whether an appliance of this configuration runs, is ready, and is of this version."""
    if running.silent_s:
        return Subject(Area.SERVICE, "appliance").problem(
            f"{running.admin} takes connections and does not answer within {running.silent_s:g} s",
            means="the gateway hangs; systemd starts such a one again after a minute",
            mend="systemctl restart athanor-gateway    # without systemd: end its process",
        )
    if not running.answers:
        return Subject(Area.SERVICE, "appliance").note(
            f"nothing answers at {running.admin}",
            means="it does not run",
            mend="systemctl start athanor.target    # or: athanor serve --config FILE; athanor logs says why one ended",
        )
    if not running.ready:
        return Subject(Area.SERVICE, "appliance").warning(
            f"runs, not ready: {running.reason}",
            means="requests are refused for the moment",
            mend="athanor status    # and: athanor logs",
        )
    if running.version != version:
        return Subject(Area.SERVICE, "appliance").warning(
            f"runs as {running.version}, this program is {version}",
            means="the upgrade takes effect at the next start",
            mend="systemctl restart athanor.target",
        )
    return Subject(Area.SERVICE, "appliance").ok(f"runs and is ready; {running.cgroup}")


def check_alert(alert: Alert) -> Finding:
    """What the running appliance says of itself: it sees what no file shows."""
    subject = Subject(Area.SERVICE, "alert")
    means = alert.who or "the running appliance says so"
    here = alert.command in ("", "athanor doctor")
    mend = alert.do if here else f"{alert.command}    # {alert.do[:1].lower()}{alert.do[1:].rstrip('.:')}"
    if alert.level == "note":
        return subject.note(alert.what, means=means, mend=mend)
    found = subject.problem if alert.level == "broken" else subject.warning
    return found(alert.what, means, mend)


def check_image(image: Image) -> Finding:
    """Whether the image is whole, and the one that is pinned; or what sandboxes see without one."""
    if not image.path and image.packaged:
        return Subject(Area.SANDBOXES, "image").warning(
            f"none: sandboxes see the Python of this machine, though the package brought {image.packaged[:12]}",
            means="they see more than what was built, signed and pinned for them",
            mend=f"sandbox: {{image_store: /{STORE}, image_pin: /{PIN}}}    # in athanor.yaml, then a restart",
        )
    if not image.path:
        what = "none: sandboxes see the Python of this machine, read-only"
        return Subject(Area.SANDBOXES, "image").note(
            what, mend="athanor image build DIR    # docs/images.md has the rest"
        )
    if image.problem:
        return Subject(Area.SANDBOXES, "image").problem(
            image.problem,
            means="no sandbox is started from it",
            mend="athanor image use DIGEST    # of a whole one; `athanor image build` makes one",
        )
    if image.digest != image.pinned:
        return Subject(Area.SANDBOXES, "image").problem(
            f"{image.path} has the digest {image.digest[:12]}, pinned is {image.pinned[:12]}",
            means="no sandbox is started from it",
            mend=f"athanor image verify {image.path} --digest {image.pinned}",
        )
    return Subject(Area.SANDBOXES, "image").ok(
        f"{image.digest[:12]} as pinned{', that of the package' if image.digest == image.packaged else ''}"
    )


def check_port(port: Port, *, running: bool) -> Finding:
    """Whether an address can be listened on, or we do already."""
    check = f"{port.name} address"
    if port.problem:
        return Subject(Area.SERVICE, check).problem(
            f"{port.address}: {port.problem}",
            means="the gateway cannot start",
            mend=port.mend or f"listen: {port.name}: HOST:PORT    # in athanor.yaml",
        )
    if port.open and (running or not port.in_use):
        return Subject(Area.SERVICE, check).warning(
            f"{port.address} asks for no token",
            means="every machine that reaches it reads names and figures of all tenants",
            mend="listen: metrics_token: FILE    # in athanor.yaml; a firewall should let the scraper alone in besides",
        )
    if port.address.startswith("unix:"):
        return Subject(Area.SERVICE, check).ok(port.address)
    if not port.in_use:
        return Subject(Area.SERVICE, check).ok(f"{port.address} is free")
    if running and (port.kept or not port.holder or OWN_PROCESS in port.holder):
        return Subject(Area.SERVICE, check).ok(f"{port.address}: the appliance listens")
    if port.kept:
        what = f"{port.address} is kept by systemd for the gateway's next start; connections wait in its queue"
        return Subject(Area.SERVICE, check).ok(what)
    return Subject(Area.SERVICE, check).problem(
        f"{port.address} is taken" + (f" by {port.holder}" if port.holder else ""),
        means="the next start of the gateway fails" if running else "the gateway cannot start",
        mend=f"ss -ltnp sport = :{port.address.rpartition(':')[2]}    # end it, or change listen: {port.name}:",
    )


def check_model(model: Model) -> Finding:
    """Whether a model's files are there and a sandbox can read them."""
    check = f"model {model.name}"
    if model.problem:
        said, _, mend = model.problem.partition("; ")
        return Subject(Area.SERVICE, check).problem(
            said.removeprefix(f"{check}: "),
            means="it is not served",
            mend=mend.removeprefix("make it so with: ") or "models: path: DIR    # in athanor.yaml",
        )
    if model.null:
        return Subject(Area.SERVICE, check).warning(
            "null runner",
            means="it computes nothing; its answers are meaningless",
            mend="runner: model    # in athanor.yaml",
        )
    if model.unsigned:
        said, _, mend = model.unsigned.removeprefix(f"{check}: ").rpartition("; ")
        mend = (
            mend.removeprefix("sign it with: ") if "DIR" in mend else f"athanor model verify {model.path}    # {mend}"
        )
        return Subject(Area.SERVICE, check).problem(said, means="the model is not started", mend=mend)
    if model.pinned and model.digest != model.pinned:
        return Subject(Area.SERVICE, check).problem(
            f"its files have the digest {model.digest[:12]}, pinned is {model.pinned[:12]}",
            means="it is not served",
            mend=f"athanor model digest {model.path}    # pin that, or put the pinned files back",
        )
    if model.endpoint_problem:
        return Subject(Area.SERVICE, check).problem(
            f"{model.external}: {model.endpoint_problem}",
            means="its requests fail",
            mend="models: external: url:, model:, api_key_file:, ca_file:    # in athanor.yaml, or the endpoint itself",
        )
    pinned = f", {model.digest[:12]} as pinned" if model.pinned else ", not pinned"
    pinned += f", signed by {model.signer[:16]}" if model.signer else ""
    if model.external:
        return Subject(Area.SERVICE, check).ok(f"computed at {model.external}, outside of this appliance{pinned}")
    kv = f"{size(model.kv_bytes)} of KV" if not model.on_card else "KV on its card"
    adapters = f", {size(model.adapter_bytes)} for adapters" if model.adapter_bytes else ""
    what = f"{size(model.weight_bytes)} of weights, {kv}{adapters}{pinned}"
    return Subject(Area.SERVICE, check).ok(what)


def check_weights(told: tuple[str, str]) -> Finding:
    """Say in which form an engine that runs holds its weights; ``told``: model and form."""
    name, form = told
    return Subject(Area.SERVICE, "weights").ok(f"the engine of {name} holds them as {form}")


def check_memory(models: tuple[Model, ...], limit: int, memory: Memory, *, running: bool) -> Finding:
    """Whether engines fit into their sandboxes and the machine.

    From sizes of files alone, since the host reads no model: what is told is about, or at least. The engine itself
    says what it holds, once it has loaded (``engine holds`` in the log).
    """
    real = [model for model in models if not (model.null or model.external or model.problem)]
    about = {model.name: _about(model) for model in real}
    least = {
        model.name: 0 if model.on_card else _beside_weights(model) + int(model.weight_bytes * LEAST_WEIGHT_SHARE)
        for model in real
    }
    total = sum(about.values())
    what = f"engines need about {size(total)} of {size(memory.total)}"
    over = [name for name, need in least.items() if need > limit]
    if over:
        return Subject(Area.SERVICE, "memory").problem(
            f"{', '.join(over)} needs more than {size(limit)}, its sandbox's limit",
            means="its engine is ended while it loads",
            mend=f"sandbox: memory_bytes: {max(about[name] for name in over) * 5 // 4}    # in athanor.yaml",
        )
    tight = [name for name, need in about.items() if need > limit]
    if tight:
        return Subject(Area.SERVICE, "memory").warning(
            f"{', '.join(tight)} needs about {size(about[tight[0]])}, its sandbox may have {size(limit)}",
            means="its engine may be ended while it loads",
            mend=f"sandbox: memory_bytes: {max(about[name] for name in tight) * 5 // 4}    # in athanor.yaml",
        )
    if total > memory.total or (not running and total > memory.available):
        level = Severity.PROBLEM if total > memory.total else Severity.WARNING
        return Finding(
            area=Area.SERVICE,
            check="memory",
            level=level,
            what=f"{what}; {size(memory.available)} are free",
            means="the kernel will end an engine, or the machine will swap",
            mend="kv_bytes: LESS    # in athanor.yaml; or weights: int8, or fewer models",
        )
    return Subject(Area.SERVICE, "memory").ok(what)


def _about(model: Model) -> int:
    return CARD_ENGINE_BYTES if model.on_card else ENGINE_BYTES + _beside_weights(model) + _weights(model)


def _beside_weights(model: Model) -> int:
    """Bytes that an engine takes at its start whatever its weights are: KV, and room for adapters."""
    return model.kv_bytes + model.adapter_bytes


def _weights(model: Model) -> int:
    """Bytes of a model's weights in memory, as stored in most checkpoints (16 bits a number)."""
    return model.weight_bytes // 2 if model.int8 else model.weight_bytes


def check_kernels(kernels: Kernels) -> Finding:
    """Whether compiled kernels are there and fit sources and processor."""
    build = f"athanor kernels build {kernels.path or '/var/lib/athanor/kernels'}"
    if not kernels.path:
        return Subject(Area.SERVICE, "kernels").warning(
            "none named",
            means="engines compute with plain tensor operations, which is slower",
            mend=f"{build}    # then sandbox: kernels: in athanor.yaml",
        )
    what = kernels.problem or ("compiled from other sources than this version's" if kernels.stale else "")
    if not what and not kernels.best:
        what = "compiled for other processors than this one"
    if what:
        return Subject(Area.SERVICE, "kernels").warning(
            what, means="engines compute with plain tensor operations, which is slower", mend=build
        )
    return Subject(Area.SERVICE, "kernels").ok(f"of this version; {kernels.best} is for this processor")


def check_disk(disk: Disk) -> Finding:
    """Whether a file system will be full."""
    check = f"disk {disk.path}"
    what = f"{size(disk.free)} of {size(disk.total)} free ({disk.purpose})"
    mend = f"du -xh --max-depth=2 {disk.path} | sort -h | tail"
    if disk.free < FULL_BYTES or 0 <= disk.free_inodes < LOW_INODES // 10:
        return Subject(Area.SERVICE, check).problem(
            what, means=f"what is written there is lost or refused: {disk.purpose}", mend=mend
        )
    if (disk.free < LOW_BYTES and disk.free < disk.total * LOW_SHARE) or 0 <= disk.free_inodes < LOW_INODES:
        return Subject(Area.SERVICE, check).warning(what, means="it will be full soon", mend=mend)
    return Subject(Area.SERVICE, check).ok(what)


def check_exporter(exporter: Exporter) -> Finding:
    """Whether a collector that was named can be reached."""
    check = f"{exporter.signal} to"
    if exporter.problem:
        return Subject(Area.SERVICE, check).warning(
            f"{exporter.endpoint}: {exporter.problem}",
            means=f"{exporter.signal} do not arrive; requests are served regardless",
            mend="OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318    # or start the collector",
        )
    return Subject(Area.SERVICE, check).ok(f"{exporter.endpoint} accepts connections")
