"""The operator's own files: made once, never changed by an install, removed only by a purge."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.keys import serialise_records
from appliance.operator.install.rendering import ADMIN_PLACE, API_SERVICE, CARRIER, SERVICES, TARGET, TIMERS, UNITS
from appliance.operator.install.sources import CONFIG, POLICY
from isolation.host.atomic_file import write_whole

ETC, VAR = Path("etc/athanor"), Path("var/lib/athanor")
AUDIT = Path("var/lib/athanor-supervisor")
"""The supervisor's own state: the audit log."""

FETCHED = Path("var/lib/athanor-fetch")
"""The downloader's own state: the cache of models."""

RUN = (Path("run/athanor"), Path("run/athanor-supervisor"), Path("run/athanor-fetch"), Path("run/athanor-carrier"))

FIRST_FILES = ("athanor.yaml", "policy.yaml", "credentials.json", "pepper")


@dataclass(frozen=True, slots=True)
class Seed:
    """One file or folder that a first installation makes."""

    path: Path
    """Path below the root."""
    purpose: str


def missing_seeds(root: Path) -> tuple[Seed, ...]:
    """What is not there yet of what a service needs to start."""
    purposes = ("what is served", "who may do what: nobody yet", "keys: none yet", "secret beside the keys")
    seeds = [Seed(ETC / name, purpose) for name, purpose in zip(FIRST_FILES, purposes, strict=True)]
    seeds.append(Seed(VAR / "models" / embedded_model().name, "the embedded model"))
    return tuple(seed for seed in seeds if not (root / seed.path).exists())


def plant(root: Path, seeds: tuple[Seed, ...], sources: dict[str, str]) -> None:
    """Make them. Key table and pepper belong together: one without the other is the operator's to mend.

    Raises:
        ConfigError: one cannot be made, or only one of key table and pepper is there.
    """
    names = {seed.path.name for seed in seeds}
    if len(names & {"credentials.json", "pepper"}) == 1:
        raise ConfigError(
            f"of {root / ETC}/credentials.json and {root / ETC}/pepper only one is there; restore the other one, or "
            "remove both (all keys are void then)"
        )
    content = {
        "athanor.yaml": (sources[CONFIG].encode(), 0o640),
        "policy.yaml": (sources[POLICY].encode(), 0o640),
        "credentials.json": (serialise_records({}).encode(), 0o640),
        "pepper": (new_pepper(), 0o600),
    }
    for seed in seeds:
        with os_errors_as(f"cannot make {root / seed.path}"):
            if seed.path.name in content:
                target = root / seed.path
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
                write_whole(target, *content[seed.path.name])
            else:
                _copy_model(root / seed.path)


def _copy_model(target: Path) -> None:
    """Copy the model, readable for the sandbox's user, who is no user of this machine."""
    draft = target.with_name(f".{target.name}.copying")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(embedded_model(), draft, copy_function=shutil.copyfile)
    for path in draft.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    draft.chmod(0o755)
    draft.rename(target)


def leftovers(root: Path) -> tuple[Path, ...]:
    """What a purge removes: the operator's files, state, drop-ins and links of enabled units."""
    units = root / ADMIN_PLACE / UNITS
    candidates = [root / ETC, root / VAR, root / AUDIT, root / FETCHED, *(root / path for path in RUN)]
    timed = [name.replace(".timer", ".service") for name in TIMERS]
    candidates += [units / f"{name}.d" for name in (*SERVICES, API_SERVICE, *CARRIER, TARGET, *TIMERS, *timed)]
    candidates += [root / "var/lib/systemd/timers" / f"stamp-{name}" for name in TIMERS]
    return tuple(path for path in candidates if path.exists())


def links(root: Path) -> tuple[Path, ...]:
    """Links that ``systemctl enable`` made: they lead nowhere once the units are gone."""
    names = [f"multi-user.target.wants/{TARGET}", *(f"timers.target.wants/{name}" for name in TIMERS)]
    names += [f"{TARGET}.wants/{name}" for name in (*SERVICES, API_SERVICE, *CARRIER)]
    return tuple(path for name in names if (path := root / ADMIN_PLACE / UNITS / name).is_symlink())


def remove_links(root: Path) -> None:
    """Remove them, and the folder that held nothing else."""
    for link in links(root):
        link.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (root / ADMIN_PLACE / UNITS / f"{TARGET}.wants").rmdir()


def purge(root: Path) -> None:
    """Remove everything that ``leftovers`` lists. Links are removed, never followed.

    Raises:
        ConfigError: something cannot be removed.
    """
    for path in leftovers(root):
        with os_errors_as(f"cannot remove {path}"):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path)
