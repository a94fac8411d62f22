"""Pure: facts about NVIDIA's driver and cards to findings, and about what was compiled for them.

Of the machine nothing is a problem of its own: one that cannot give a sandbox its GPU still serves on the processor,
unless a model's ``gpu`` says that it must have one. A model that gets one and has no compiled kernels is not served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from appliance.common.figures import counted, size
from appliance.common.gpu_placement import DEFAULT_FOLDER, architecture_of, command_words
from appliance.operator.doctor.facts import CardFacts, Gpu, GpuKernelFacts
from appliance.operator.doctor.finding import Area, Finding, Subject
from isolation.gpu.bundle_additions import expected_numbers, node_mend
from isolation.gpu.gpu_drivers import INSTALL_CURRENT, known_drivers, newest
from isolation.gpu.gpu_facts import CONTROL, CUDA, MANAGEMENT, MEMORY, GpuFacts

SOME = 1 << 30
"""Bytes of a card held by other programs from which they are named as a reason: a display has some hundred MiB."""

NO_GPU = "a model that asks for a GPU cannot be started"


def check_gpu(gpu: Gpu, runsc: int) -> tuple[Finding, ...]:
    """Cards and driver, and all that keeps a sandbox from using them.

    Args:
        gpu: what was found.
        runsc: release date of runsc as a number; 0 where there is none, and then nothing is said about it.
    """
    if not gpu.driver:
        what = "no NVIDIA driver" if not gpu.names else f"{counted(len(gpu.names), 'device')} and no driver"
        return (Subject(Area.MACHINE, "gpu").note(what, means="models run on the processor"),)
    return (_driver(gpu, runsc), *_nodes(gpu.found), *_libraries(gpu), *_sharing(gpu.found))


def _driver(gpu: Gpu, runsc: int) -> Finding:
    what = f"{', '.join(gpu.names) or 'no device'}; driver {gpu.driver}"
    subject = Subject(Area.MACHINE, "gpu")
    if gpu.list_problem:
        return subject.warning(f"{what}; {gpu.list_problem}", means=NO_GPU, mend=INSTALL_CURRENT)
    if not (gpu.known or runsc):
        return subject.ok(what)
    known = known_drivers(gpu.known, runsc)
    if gpu.driver in known:
        return subject.ok(what)
    install = f"install driver {newest(known)}, or a newer runsc: " if known else "a newer runsc: "
    return subject.warning(
        what, means=f"this runsc does not know the driver: {NO_GPU}", mend=f"{install}{INSTALL_CURRENT}"
    )


def _nodes(found: GpuFacts) -> Iterator[Finding]:
    subject = Subject(Area.MACHINE, "gpu devices")
    if found.memory_major is None:
        yield subject.warning("the module nvidia-uvm is not loaded", NO_GPU, "modprobe nvidia-uvm")
    names = (CONTROL, MEMORY, *(f"nvidia{index}" for index in found.cards or (0,)))
    missing = [name for name in names if found.node(name) is None]
    if missing:
        paths = ", ".join(f"/dev/{name}" for name in missing)
        yield subject.warning(f"there is no {paths}", NO_GPU, " && ".join(dict.fromkeys(map(node_mend, missing))))
    for node in found.nodes:
        path, numbers = f"/dev/{node.name}", expected_numbers(found, node)
        if numbers is not None and (not node.character or (node.major, node.minor) != numbers):
            what = f"{path} is not the driver's device {numbers[0]}:{numbers[1]}"
            yield subject.warning(what, NO_GPU, f"rm {path}; {node_mend(node.name)}")
        elif not node.open_to_all:
            yield subject.warning(
                f"{path} is not readable and writable for all", f"a sandbox is nobody: {NO_GPU}", f"chmod 666 {path}"
            )


def _libraries(gpu: Gpu) -> Iterator[Finding]:
    subject = Subject(Area.MACHINE, "gpu libraries")
    for name in (CUDA, MANAGEMENT):
        library, versions = gpu.found.library(name), gpu.found.versions(name)
        if library is None and versions:
            yield subject.warning(
                f"{name} is of {', '.join(versions)}, the module of {gpu.driver}",
                means=f"library and module have to be of one version: {NO_GPU}",
                mend="reboot    # after an upgrade the old module stays loaded",
            )
        elif library is None:
            yield subject.warning(
                f"there is no {name}.{gpu.driver}", NO_GPU, f"install the libraries of driver {gpu.driver} (libcuda1)"
            )
        elif not library.open_to_all:
            yield subject.warning(f"{library.path} is not readable for all", NO_GPU, f"chmod o+r {library.path}")


def _sharing(found: GpuFacts) -> Iterator[Finding]:
    """What is to be known of cards that are shared or sleep."""
    if found.mig:
        cards = ", ".join(str(index) for index in found.mig)
        yield Subject(Area.MACHINE, "gpu instances").warning(
            f"cut up into MIG instances: card {cards}",
            means="gVisor does not pass instances on: the card cannot be given to a model",
            mend="nvidia-smi -i INDEX -mig 0",
        )
    if found.mps:
        yield Subject(Area.MACHINE, "gpu mps").note(
            "the multi-process service runs",
            means="sandboxes have no part in it, and it would be no wall between tenants: engines take turns on a card",
        )
    if not found.persistent:
        yield Subject(Area.MACHINE, "gpu persistence").note(
            "nvidia-persistenced does not run",
            means="the first engine after a pause waits seconds until the card is initialised",
            mend="systemctl enable --now nvidia-persistenced",
        )


def check_gpu_kernels(models: Iterable[GpuKernelFacts], gpu: Gpu) -> Iterator[Finding]:
    """Whether each model that is given a GPU has compiled kernels for it; the engine, which has no compiler, ends its
    start without. Which Triton they are for it finds out itself."""
    architectures = {architecture_of(name) for name in gpu.names} - {""}
    for found in models:
        subject = Subject(Area.SERVICE, f"gpu kernels of {found.model}")
        if not gpu.driver and not found.needed:
            yield subject.note("no GPU here", means="the model runs on the processor, which needs none")
            continue
        reason = _why_none(found, architectures)
        if reason:
            means = "the model is not served: its engine compiles nothing"
            yield subject.problem(reason, means, _mend(found, architectures))
        else:
            yield subject.ok(f"there are some in {found.path}")


def _why_none(found: GpuKernelFacts, architectures: set[str]) -> str:
    """Why no folder of kernels is the model's; empty when one is."""
    if not found.path:
        return "no folder of compiled kernels is named, and the image has none"
    if found.problem:
        return f"{found.path}: {found.problem}"
    if not found.made:
        return f"no compiled kernels are in {found.path}"
    left = [one for one in found.made if one.ours]
    if not left:
        return f"those in {found.path} were compiled from sources of another version"
    there = ", ".join(sorted({one.architecture for one in left}))
    left = [one for one in left if not architectures or one.architecture in architectures]
    if not left:
        return f"those in {found.path} are for {there}, the card is {', '.join(sorted(architectures))}"
    if not any(one.fits for one in left):
        return (
            f"those in {found.path} were compiled for another model, or not with dtype {found.dtype or 'auto'}, "
            f"block_size {found.block_size}, {counted(found.rows, 'row')} and weights: {found.weights}"
        )
    return ""


def _mend(found: GpuKernelFacts, architectures: set[str]) -> str:
    """The command that compiles them, and the line that names them."""
    named = found.path or DEFAULT_FOLDER
    line = "" if found.path else f"    # and sandbox: gpu_kernels: {named}"
    architecture = min(architectures, default="")
    told = found.dtype, found.block_size, found.rows, found.weights
    return command_words(named, found.model_path, architecture, *told) + line


def _mend_card(found: CardFacts) -> str:
    """What gives a refused model a card."""
    if found.cut_up:
        return f"nvidia-smi -i {found.cut_up[0]} -mig 0    # or gpu: off, or a list of other cards"
    if found.others >= SOME:
        return "nvidia-smi    # names the other programs; end them, or gpu: off"
    return "gpu_share: LESS    # in athanor.yaml; or fewer models, or gpu: off"


def check_cards(cards: Iterable[CardFacts]) -> Iterator[Finding]:
    """Which card each model gets, and the plan of its memory, which adds up."""
    for found in cards:
        subject = Subject(Area.SERVICE, f"gpu of {found.model}")
        here = " and ".join(f"card {card}" for card in found.now)
        if found.now and (found.problem or found.card not in found.now):
            given = found.problem or f"a start gives it {found.card_words}"
            means = "it was moved since its own was lost, or the configuration was changed; a start places it anew"
            yield subject.warning(f"its engine is on {here}; {given}", means=means, mend="athanor status")
        elif found.problem:
            yield subject.problem(found.problem, means="the appliance does not start", mend=_mend_card(found))
        elif found.plan and found.limited and found.others:
            yield subject.warning(
                f"{found.card_words}: {found.plan}",
                means=f"other programs hold {size(found.others)} of it: KV is less, and none is left for them to grow",
                mend="nvidia-smi    # names them",
            )
        elif found.plan:
            yield subject.ok(f"{found.card_words}: {found.plan}")
        else:
            why = f": {found.unknown}" if found.unknown else ""
            yield subject.note(
                f"{found.card_words}, whose memory or the model's shape is not known{why}",
                means="rows and budgets are those of the configuration, or a CPU's",
            )
