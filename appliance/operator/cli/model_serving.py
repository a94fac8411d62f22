"""``athanor model add | stop``: a model more or less is served, without a restart."""

from __future__ import annotations

import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.tenant import Yes, confirm
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig, ModelConfig
    from appliance.common.config_loader import Resolved
    from appliance.common.model_memory import ModelNeed
    from appliance.operator.doctor.facts import CardFacts

ADD_EXAMPLES = """
athanor model add llama --path /srv/models/llama | a folder of this machine
athanor model add llama --source s3://models/llama-3.1-8b | pulled first, and pinned by its digest
athanor model add llama | the one of this name in the cache
athanor model add llama --path /srv/models/llama --set kv_bytes=8000000000 --dry-run | what it would need
"""

STOP_EXAMPLES = """
athanor model stop llama | its requests have 20 seconds to end; the files stay
"""

RELOAD_S = 3_600.0
"""Patience for the reload: all weights of the model are read before anything changes."""

LOOK_S = 0.3
"""Seconds between two looks at the state of the model."""

OK, CONFLICT = 200, 409
"""HTTP statuses of a reload: done, and refused with its problems."""

SETTINGS = ("name", "path", "digest")
"""Keys of an entry that have options or arguments of their own."""

Admin = Annotated[
    str | None, typer.Option("--admin", metavar="URL", help="Admin listener, in place of the configuration's.")
]
Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="How long to wait for the outcome; 0: not at all.")
]


def add(  # noqa: PLR0913 - a parameter is an option
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in requests and policies.")],
    path: Annotated[Path | None, typer.Option("--path", metavar="DIR", help="Folder with the model's files.")] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="SOURCE", help="Pull it from there first, as model pull does.")
    ] = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="Digest that its files must have.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another key of its entry, as in kv_bytes=8000000000."),
    ] = None,
    config: Config = DEFAULT_CONFIG,
    admin: Admin = None,
    wait: Wait = 600.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what it needs, and change nothing.")] = False,
    yes: Yes = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Serve a further model while the appliance runs.

    Tells what memory the model needs and refuses one that does not fit. Then writes its entry into
    models.d beside athanor.yaml, reloads, and waits until the model serves. If the reload is refused,
    the entry is not there.
    """
    from appliance.common.config_loader import resolve

    found = resolve(config)
    if (place := _place(found, name)) is not None:
        fail(exits.REFUSED, f"there is a model {name} already: {place}", "athanor model list shows its state")
    if path is not None and source is not None:
        fail(exits.USAGE, "--path and --source exclude each other")
    entry: dict[str, Any] = {"name": name}
    if path is not None:
        entry["path"] = str(path.absolute())
    entry |= {"digest": digest} if digest is not None else {}
    if path is None:
        entry["digest"] = _cached(found.config, config, name, source, digest, dry_run=dry_run)
    model = _checked(entry | _settings(settings or []), found.config)
    card = _card(model, found.config)
    need = _fits(model, found.config, on_card=card is not None)
    target = _Target(config, name)
    _tell(model, need, card, target.file, found.config, output_format)
    if dry_run:
        return
    confirm(f"serve {name}", yes=yes)
    target.write(_text(entry | _settings(settings or [])))
    served = _reload(found.config, admin, target)
    _record(found.config, "add", model, served=served)
    if served and wait:
        _wait_serving(found.config, admin, model, wait)


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in requests and policies.")],
    config: Config = DEFAULT_CONFIG,
    admin: Admin = None,
    wait: Wait = 60.0,
    yes: Yes = False,
) -> None:
    """Serve a model no more. Its files stay: `model remove` removes a copy from the cache.

    Removes the entry that `model add` wrote and reloads. Requests that run have 20 seconds to end and
    are cut then; new ones are refused at once. Other models do not notice.
    """
    from appliance.common.config_loader import resolve

    found = resolve(config)
    place, target = _place(found, name), _Target(config, name)
    if place is None:
        fail(exits.REFUSED, f"no model {name} is configured", "athanor model list shows what is served")
    if not place.startswith(f"{target.file}:") or _entries_in(found, target.file) != 1:
        fail(
            exits.REFUSED,
            f"the model {name} is written at {place}, in a file of your own",
            "remove the entry there, then: athanor reload",
        )
    model = next(one for one in found.config.models if one.name == name)
    confirm(f"stop {name}", yes=yes)
    target.remove()
    served = _reload(found.config, admin, target)
    _record(found.config, "stop", model, served=served)
    if served and wait:
        _wait_gone(found.config, admin, name, wait)


def _place(found: Resolved, name: str) -> str | None:
    """Where a model of this name is written; None where none is."""
    names = [one.name for one in found.config.models]
    return found.origins[f"models[{names.index(name)}].name"] if name in names else None


def _entries_in(found: Resolved, file: Path) -> int:
    keys = (f"models[{index}].name" for index in range(len(found.config.models)))
    return sum(found.origins[key].startswith(f"{file}:") for key in keys)


def _cached(
    loaded: ApplianceConfig, config: Path, name: str, source: str | None, digest: str | None, *, dry_run: bool
) -> str:
    """Digest of the model of the cache that shall be served, pulled first where a source is named.

    Raises:
        ConfigError: there is none, or it cannot be pulled.
    """
    from appliance.operator.cli.model_cache import find_in, pull_into

    if loaded.model_cache is None:
        fail(
            exits.REFUSED,
            "athanor.yaml has no section model_cache, so a model has to have a folder",
            "--path DIR names it",
        )
    if source is None:
        return find_in(config, digest or name, pin=not dry_run)
    if dry_run:
        fail(
            exits.USAGE,
            "what a model needs is known once its files are here",
            "athanor model pull SOURCE, then --dry-run",
        )
    with ExitStack() as stack:
        return str(pull_into(config, source, name, digest or "", stack)["digest"])


def _settings(given: list[str]) -> dict[str, Any]:
    """Further keys of the entry."""
    from policy.errors import PolicyError
    from policy.positions import load_yaml

    found: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or not key or key in SETTINGS:
            fail(exits.USAGE, f"--set {one}: must be KEY=VALUE with a key of the entry, as in kv_bytes=8000000000")
        try:
            found[key] = load_yaml(text, f"--set {key}")[0]
        except PolicyError as error:
            fail(exits.USAGE, f"--set {key}: {error.problems[0].message}")
    return found


def _checked(entry: dict[str, Any], loaded: ApplianceConfig) -> ModelConfig:
    """The entry as a model of the configuration; what is wrong with it ends the command."""
    from pydantic import ValidationError

    from appliance.common.config import ModelConfig
    from policy.positions import dotted
    from policy.wording import worded

    try:
        model = ModelConfig.model_validate(entry)
    except ValidationError as error:
        items = error.errors(include_url=False)
        said = [f"{dotted(tuple(one['loc']))}: {worded(one, tuple(ModelConfig.model_fields))}" for one in items]
        fail(exits.REFUSED, "\n".join(line.removeprefix(": ").replace("Value error, ", "") for line in said))
    if model.path is None and loaded.model_cache is not None:
        return model.model_copy(update={"path": loaded.model_cache.directory / "models" / model.digest})
    return model


def _fits(model: ModelConfig, loaded: ApplianceConfig, *, on_card: bool) -> ModelNeed:
    """What the model needs; one that does not fit ends the command.

    Raises:
        ConfigError: its folder is none of a model.
    """
    from appliance.common.catalog import find_files
    from appliance.common.model_memory import machine_memory, model_need, no_room
    from appliance.common.sleep_rules import ALWAYS

    need = model_need(model, find_files(model.name, model.folder)[0], on_card=on_card)
    memory, asleep = machine_memory(), () if model.keep == ALWAYS else (model.name,)
    # What sleeps now and what may sleep is the supervisor's to say; it looks again before anything changes.
    most = loaded.sandbox.models_memory_bytes or memory.total
    if problems := no_room([need], loaded.sandbox.memory_bytes, memory.available, asleep=asleep, most=most):
        fail(exits.REFUSED, f"the model {model.name} {problems[model.name]}")
    return need


def _card(model: ModelConfig, loaded: ApplianceConfig) -> CardFacts | None:
    """The card that the model's engine would get beside those of the other models; None where it gets none. One that
    finds no room ends the command."""
    from appliance.operator.doctor.gpu_kernel_facts import look_at_cards
    from isolation.gpu.card_memory import with_memory
    from isolation.gpu.gpu_facts import look_at_gpus

    if model.gpu == "off":
        return None
    cards = look_at_cards((*loaded.models, model), with_memory(look_at_gpus()), running=True)
    found = next((one for one in cards if one.model == model.name), None)
    if found is not None and found.problem:
        fail(exits.REFUSED, found.problem)
    return found


def _tell(
    model: ModelConfig,
    need: ModelNeed,
    card: CardFacts | None,
    file: Path,
    loaded: ApplianceConfig,
    output_format: Format,
) -> None:
    from appliance.common.figures import printable, size
    from appliance.common.model_memory import machine_memory
    from appliance.operator.speed import MACHINE_CARD, most_tokens_per_s, read_speed

    memory, limit = machine_memory(), loaded.sandbox.memory_bytes
    parts = {"weights_bytes": need.weights, "kv_bytes": need.kv, "about_bytes": need.about}
    facts = {"name": model.name, "folder": str(model.folder), "digest": model.digest, **parts}
    facts |= {"free_bytes": memory.available, "sandbox_bytes": limit, "file": str(file)}
    most = None if card is not None else most_tokens_per_s(need.weights, read_speed(file.parent.parent / MACHINE_CARD))
    facts |= {"most_tokens_per_s": most}
    if card is not None:
        facts |= {"card": card.card, "card_plan": card.plan}
    if print_data(facts, output_format):
        return
    lines = [
        f"folder  {model.folder}",
        f"memory  {need.words()}",
        _kv_words(need.kv, card),
        *([] if card is not None else [_speed_words(most)]),
        f"free    {size(memory.available)} of {size(memory.total)}; an engine's sandbox may have {size(limit)}",
        f"file    {file}",
    ]
    for line in lines:
        output().print(printable(line), soft_wrap=True, markup=False)


def _kv_words(kv: int, card: CardFacts | None) -> str:
    from appliance.common.figures import size

    if card is not None:
        return f"GPU     {card.card_words}: {card.plan or 'its memory or the shape of the model is not known'}"
    return f"KV      {size(kv)}; for how many tokens the engine tells once it serves, since the host opens no model"


def _speed_words(most: float | None) -> str:
    from appliance.operator.speed import HOW

    if most is None:
        return f"speed   not known: {HOW}"
    return f"speed   at most about {most:,.1f}/s for one stream, by the speed of the memory; athanor model bench"


@dataclass(slots=True)
class _Target:
    """The file with one model's entry. ``undo`` puts back what was there."""

    config: Path
    name: str
    before: bytes | None = None

    @property
    def file(self) -> Path:
        """Its path."""
        from appliance.common.model_entries import entries_folder

        return entries_folder(self.config) / f"{self.name}.yaml"

    def write(self, text: str) -> None:
        """Write it, with owner and mode of athanor.yaml; its folder has those of athanor.yaml's folder.

        Raises:
            ConfigError: it is there already, or cannot be written.
        """
        from appliance.common.errors import ConfigError, os_errors_as

        if self.file.exists():
            raise ConfigError(f"{self.file} is there already, and has another model; rename or remove it")
        with os_errors_as(f"cannot write {self.file}"):
            main = self.config.resolve()
            if not self.file.parent.exists():
                self.file.parent.mkdir()
                _be_like(self.file.parent, main.parent)
            self._put(text.encode())
            self.before = b""

    def remove(self) -> None:
        """Remove it.

        Raises:
            ConfigError: it cannot be removed.
        """
        from appliance.common.errors import os_errors_as
        from isolation.host.atomic_file import sync_folder

        with os_errors_as(f"cannot remove {self.file}"):
            self.before = self.file.read_bytes()
            self.file.unlink()
            sync_folder(self.file.parent)

    def undo(self) -> None:
        """Put back what was there.

        Raises:
            ConfigError: that cannot be written.
        """
        from appliance.common.errors import os_errors_as

        with os_errors_as(f"cannot put {self.file} back"):
            if self.before:
                self._put(self.before)
            else:
                self.file.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        from isolation.host.atomic_file import write_whole

        main = self.config.resolve().stat()
        write_whole(self.file, data, stat.S_IMODE(main.st_mode))
        if os.geteuid() == 0:
            os.chown(self.file, main.st_uid, main.st_gid)


def _be_like(folder: Path, other: Path) -> None:
    like = other.stat()
    folder.chmod(stat.S_IMODE(like.st_mode))
    if os.geteuid() == 0:
        os.chown(folder, like.st_uid, like.st_gid)


def _text(entry: dict[str, Any]) -> str:
    from appliance.operator.cli.yaml_output import yaml_text

    return "# Written by `athanor model add`; `athanor model stop` removes it.\n" + yaml_text({"models": [entry]})


def _reload(loaded: ApplianceConfig, admin: str | None, target: _Target) -> bool:
    """Reload; False where nothing runs. What is refused ends the command, with everything as it was."""
    from appliance.common.figures import printable
    from appliance.common.status import ReloadOutcome
    from appliance.operator.cli.admin_client import AbsentError, UnreachableError, read, try_ask

    try:
        answer = try_ask(admin or loaded.listen.admin, "/reload", "POST", RELOAD_S)
    except AbsentError as error:
        output().print("done; in force at the next start: nothing answers now", soft_wrap=True)
        output().print(str(error.args[0]), style="dim", soft_wrap=True, markup=False)
        return False
    except UnreachableError as error:
        target.undo()
        _end(exits.UNREACHABLE, f"{error.args[0]}; {target.file} is as before")
    except BaseException:
        target.undo()
        raise
    if answer.status not in (OK, CONFLICT):
        target.undo()
        _end(exits.REFUSED, f"the reload failed with status {answer.status}; {target.file} is as before")
    outcome = read(ReloadOutcome, answer, CONFLICT)
    if not outcome.ok:
        target.undo()
        _end(exits.REFUSED, "\n".join(["refused, and everything is as before", *outcome.problems]))
    for line in (*outcome.applied, *(f"warning: {one}" for one in outcome.warnings)):
        errors().print(printable(line), soft_wrap=True, markup=False)
    return True


def _end(code: int, message: str) -> NoReturn:
    fail(code, message, "athanor status shows what is in force")


def _record(loaded: ApplianceConfig, what: str, model: ModelConfig, *, served: bool) -> None:
    """Have a running appliance write into its audit log who ordered it."""
    from appliance.operator.fetch_client import tell_supervisor

    if served:
        named = {"model": model.name, "model_digest": model.digest, "source": str(model.folder)}
        tell_supervisor(loaded.run_dir, {"what": what, **named, "outcome": "OK", "count": 0})


def _look(loaded: ApplianceConfig, admin: str | None, name: str) -> dict[str, Any] | None:
    """The model in the appliance's status; None where it is not served."""
    from appliance.operator.cli.admin_client import ask

    models = ask(admin or loaded.listen.admin, "/status").body.get("models", [])
    return next((one for one in models if one.get("name") == name), None)


def _wait_serving(loaded: ApplianceConfig, admin: str | None, model: ModelConfig, wait_s: float) -> None:
    from appliance.common.figures import counted
    from appliance.operator.cli.model_states import state_of

    until, state = time.monotonic() + wait_s, "starting"
    while time.monotonic() < until:
        found = _look(loaded, admin, model.name)
        state, reason = ("starting", "") if found is None else state_of(found)
        if state == "failed":
            fail(
                exits.REFUSED,
                f"{model.name} does not start: {reason}",
                f"it is tried again and again; athanor model stop {model.name} takes it away",
            )
        if state == "asleep" and not reason:
            output().print(f"{model.name} is served, and asleep until its first request", soft_wrap=True, markup=False)
            return
        if found is not None and state == "serving":
            tokens = int(found["engine"]["num_blocks"]) * model.block_size
            said = f"{model.name} serves; its KV holds {counted(tokens, 'token')}"
            output().print(said, soft_wrap=True, markup=False)
            return
        time.sleep(LOOK_S)
    fail(exits.REFUSED, f"{model.name} does not serve yet: {state}", "athanor model list shows how it goes on")


def _wait_gone(loaded: ApplianceConfig, admin: str | None, name: str, wait_s: float) -> None:
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        if _look(loaded, admin, name) is None:
            output().print(f"{name} is stopped", soft_wrap=True, markup=False)
            return
        time.sleep(LOOK_S)
    fail(exits.REFUSED, f"{name} is still ending", "athanor model list shows how it goes on")
