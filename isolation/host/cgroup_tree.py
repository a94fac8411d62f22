"""Parent cgroup of all sandboxes of one supervisor, where this machine permits one.

v1 and hybrid machines have one hierarchy for each controller, v2 has one for all. See cgroups(7) and the kernel's
admin-guide/cgroup-v2 for the rules quoted here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from isolation.errors import IsolationError
from isolation.gvisor.spec import Limits
from isolation.host.cgroup import (
    BESIDES,
    CONTROLLERS,
    FREEZER,
    Cgroup,
    CgroupSupport,
    remove_group,
    words,
    write_freezer,
)

_WEIGHT_FILES = ("cpu.weight", "cpu.shares")
"""File of a group's weight on v2 and v1; without one written there a group has 100 and 1024."""

_PARENT = "25", "256"
"""Weight of the parent group beside the programs of the group in which the supervisor was started, its own as a rule: a
quarter, so that what serves requests goes before what computes. In a hierarchy's root, beside all programs of the
machine, it has the ordinary weight."""

_ROOT_FILE = "release_agent"
"""File that v1 shows in the root of a hierarchy alone, where all other programs of the machine are."""

_SANDBOX = "2", "16"
"""Weight of each sandbox's own group: beside the others, which have the same, it changes nothing. Linux 6.18 lets a
group of the ordinary weight, whose threads hand over to each other all the time, keep a program that was woken waiting
for up to 0.8 s; the less it weighs the shorter (``bench/refusals.py --unprepared``)."""

_LEAF = "supervisor"
"""Name of the leaf for the supervisor's own process on v2, where a group with children may hold no process."""


class CgroupTree:
    """Parent group of all sandboxes of one supervisor.

    Args:
        parents: controller to the directory in which sandboxes' groups are created.
        support: which limits this enforces.
    """

    def __init__(self, parents: Mapping[str, Path], support: CgroupSupport) -> None:
        self._parents = dict(parents)
        self.support = support
        self._last: dict[str, Cgroup] = {}
        """The latest group of each sandbox's name."""

    @classmethod
    def nothing(cls, problem: str) -> CgroupTree:
        """Return a tree that enforces nothing."""
        return cls({}, CgroupSupport(0, (), problem))

    @classmethod
    def detect(cls, name: str) -> CgroupTree:
        """Create the parent group ``name`` below this process's own group wherever the machine permits it.

        On v2 this moves the calling process into a sibling leaf, as the kernel demands.
        """
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
        own = parse_own_groups(Path("/proc/self/cgroup").read_text())
        unified = own_directory(mounts, own, "")
        if unified is not None and "memory" in words(unified / "cgroup.controllers"):
            return cls.make_v2(_delegated_base(unified), name)
        # The freezer first: what a killed supervisor left frozen does not end in the other groups before it is thawed.
        directories = {name: own_directory(mounts, own, name) for name in (*BESIDES, *CONTROLLERS)}
        return cls.make_v1({key: path for key, path in directories.items() if path}, name)

    @classmethod
    def make_v1(cls, bases: Mapping[str, Path], name: str) -> CgroupTree:
        """Create the parent group in each v1 hierarchy in ``bases`` (controller to this process's own group
        directory)."""
        parents: dict[str, Path] = {}
        problems = [f"{key} (no hierarchy)" for key in CONTROLLERS if key not in bases]
        for controller, base in bases.items():
            try:
                (base / name).mkdir(exist_ok=True)
            except OSError as error:
                if controller not in BESIDES:
                    problems.append(f"{controller} ({error.strerror})")
            else:
                parents[controller] = base / name
        enforced = tuple(key for key in parents if key not in BESIDES)
        support = CgroupSupport(1 if parents else 0, enforced, ", ".join(problems))
        if "cpu" in parents and not (bases["cpu"] / _ROOT_FILE).exists():
            _weigh(parents["cpu"], _PARENT)
        return cls(parents, support)

    @classmethod
    def make_v2(cls, base: Path, name: str) -> CgroupTree:
        """Create the parent group below ``base``, this process's v2 group, after moving the process into a leaf of
        it."""
        leaf, parent = base / _LEAF, base / name
        try:
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            return cls.nothing(f"cgroup {base} is not ours to change ({error.strerror})")
        try:
            parent.mkdir(exist_ok=True)
            for group in (base, parent):
                there = words(group / "cgroup.controllers")
                wanted = [f"+{key}" for key in CONTROLLERS if key in there]
                (group / "cgroup.subtree_control").write_text(" ".join(wanted))
        except OSError as error:
            # Typically EBUSY: other processes, such as the parent shell, are members of the group.
            with suppress(OSError):
                (base / "cgroup.procs").write_text(str(os.getpid()))
                parent.rmdir()
                leaf.rmdir()
            return cls.nothing(f"cgroup {base} holds other processes ({error.strerror})")
        enforced = tuple(key for key in CONTROLLERS if key in words(parent / "cgroup.subtree_control"))
        missing = ", ".join(key for key in CONTROLLERS if key not in enforced)
        parents = dict.fromkeys((*BESIDES, *enforced), parent) if enforced else {}
        _weigh(parent, _PARENT)
        return cls(parents, CgroupSupport(2, enforced, missing))

    def create(self, name: str, limits: Limits) -> Cgroup:
        """Create an empty group for one sandbox, with its limits set.

        What the name's former sandbox left, because its processes did not end in time, is removed first: else every
        later start of that name would fail.

        Raises:
            IsolationError: it cannot be created, a limit is refused, or what was left still cannot be removed.
        """
        former = self._last.get(name)
        if former is not None and former.given_up:
            former.delete()
        directories = {key: parent / name for key, parent in self._parents.items()}
        with ExitStack() as undo:
            for directory in dict.fromkeys(directories.values()):
                try:
                    directory.mkdir()
                except OSError as error:
                    raise IsolationError(f"cgroup {directory} cannot be made: {error.strerror}") from error
                undo.callback(remove_group, directory)
            group = Cgroup(directories)
            group.set_limits(limits, self.support.version)
            if "cpu" in directories:
                _weigh(directories["cpu"], _SANDBOX)
            undo.pop_all()
        self._last[name] = group
        return group

    def thaw(self) -> None:
        """Thaw the groups of all sandboxes, so that signals reach what a killed supervisor left frozen."""
        parent = self._parents.get(FREEZER)
        for group in () if parent is None else parent.iterdir():
            if group.is_dir():
                write_freezer(group, frozen=False)

    def cleanup(self) -> tuple[str, ...]:
        """Kill and remove the groups of all sandboxes; return their names."""
        names: set[str] = set()
        for parent in dict.fromkeys(self._parents.values()):
            for group in sorted(path for path in parent.iterdir() if path.is_dir()):
                names.add(group.name)
                remove_group(group)
        return tuple(sorted(names))

    def close(self) -> None:
        """Remove the parent group, if it is empty."""
        for parent in dict.fromkeys(self._parents.values()):
            try:
                parent.rmdir()
            except OSError:
                continue


def _weigh(group: Path, weights: tuple[str, str]) -> None:
    """Write a group's weight, v2's or v1's, where it has such a file and the kernel takes it."""
    for name, weight in zip(_WEIGHT_FILES, weights, strict=True):
        if (group / name).exists():
            with suppress(OSError):
                (group / name).write_text(weight)


def parse_mountinfo(text: str) -> dict[str, tuple[str, Path]]:
    """Map controller (empty for v2) to (root of the mount, mount point), from proc(5)'s mountinfo. Pure."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *rest) = left.split(), right.split()
        if kind == "cgroup2":
            mounts.setdefault("", (fields[3], Path(fields[4])))
        elif kind == "cgroup":
            for option in rest[-1].split(","):
                mounts.setdefault(option, (fields[3], Path(fields[4])))
    return mounts


def parse_own_groups(text: str) -> dict[str, str]:
    """Map controller (empty for v2) to this process's group path, from /proc/self/cgroup (cgroups(7)). Pure."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def own_directory(
    mounts: Mapping[str, tuple[str, Path]], own: Mapping[str, str], controller: str, root: Path = Path("/")
) -> Path | None:
    """Return the directory of this process's group, or None where this process cannot see it.

    Args:
        mounts: from ``parse_mountinfo``.
        own: from ``parse_own_groups``.
        controller: name of the controller; empty for v2.
        root: folder that the mount points are below.
    """
    if controller not in mounts or controller not in own:
        return None
    top, point = mounts[controller]
    below = os.path.relpath(own[controller], top)
    if below.startswith(".."):
        return None
    directory = root / point.relative_to("/") / below
    return directory if directory.is_dir() else None


def _delegated_base(own: Path) -> Path:
    """Return this process's group, or its parent when already in the leaf (``DelegateSubgroup=``, or a second run)."""
    return own.parent if own.name == _LEAF and os.access(own.parent / "cgroup.procs", os.W_OK) else own
