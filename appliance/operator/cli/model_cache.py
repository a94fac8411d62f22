"""``athanor model pull | list | show | pin | unpin | remove | manifest``: the cache of models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.long_work import LongWork, of_bytes
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from rich.table import Table

    from appliance.common.config import ApplianceConfig
    from appliance.common.model_cache.store import CachedModel, ModelCache, PartialModel
    from appliance.fetch.protocol import FetchOrder
    from appliance.fetch.settings import FetchSettings
    from appliance.operator.fetch_client import Progress

PULL_EXAMPLES = """
athanor model pull s3://models/llama-3.1-8b --pin | resumes where an earlier pull broke off
athanor model pull hf://OWNER/MODEL@main --digest 9f86... | refused if it is another model
athanor model pull /mnt/usb/llama --cache /srv/models | without an athanor.yaml
"""

LIST_EXAMPLES = """
athanor model list | models and broken pulls, the most recently used first
"""

SHOW_EXAMPLES = """
athanor model show llama-3.1-8b | its files, and the lines for athanor.yaml
"""

PIN_EXAMPLES = """
athanor model pin llama-3.1-8b | until it is unpinned
"""

UNPIN_EXAMPLES = """
athanor model unpin 9f86d081 | the first digits of the digest are enough
"""

REMOVE_EXAMPLES = """
athanor model remove llama-3.1-8b | one that is not served; athanor model stop NAME comes first
"""

MANIFEST_EXAMPLES = """
athanor model manifest models/llama | writes athanor-model.json, to be uploaded with the folder
"""

ANY = "any"
"""Value of ``--digest`` with which weights may come for which nothing says a digest."""

Named = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its name in the cache, or the first digits of its digest.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="DIR", help="Folder of the cache, in place of a configuration.")
]


def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, s3://, gs://, az://, https:// or hf://.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name in the cache; else the source's last part.")
    ] = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX|any", help="Digest that it must have; any: whatever comes.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Pin it: no later pull removes it.")] = False,
    config: Config = DEFAULT_CONFIG,
    cache: Cache = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Download a model into the cache and print its digest.

    Its manifest, athanor-model.json beside the files, says what must come; every byte is compared.
    A pull that broke off goes on where it was, and a model that is in the cache is not downloaded again.
    """
    from appliance.fetch.protocol import FetchOrder
    from appliance.fetch.pull import PullOrder

    chosen = ChosenCache(config, cache)
    place = source if "://" in source else str(Path(source).absolute())
    must = None if digest == ANY else digest
    order = FetchOrder("pull", PullOrder(place, name or "", must or "", pin, digest == ANY))
    with ExitStack() as stack:
        done = chosen.send(order, _progress(stack))
    done.pop("event", None)
    if print_data(done, output_format):
        return
    from appliance.common.figures import duration, printable, size

    console = errors()
    came = "in the cache" if done["hit"] else f"{size(done['fetched'])} in {duration(done['seconds'])}"
    console.print(printable(f"{done['name']}: {size(done['size'])}, {came}"), markup=False, soft_wrap=True)
    for gone in done["evicted"]:
        console.print(f"removed to make room: {gone}", markup=False, soft_wrap=True)
    output().print(f"digest: {done['digest']}", soft_wrap=True, markup=False)


def pull_into(config: Path, source: str, name: str, digest: str, stack: ExitStack) -> dict[str, Any]:
    """Pull a model into the cache of a configuration and pin it there; gives the downloader's answer.

    Raises:
        ModelCacheError: it cannot be pulled.
    """
    from appliance.fetch.protocol import FetchOrder
    from appliance.fetch.pull import PullOrder

    place = source if "://" in source else str(Path(source).absolute())
    unverified = digest == ANY
    order = FetchOrder("pull", PullOrder(place, name, "" if unverified else digest, True, unverified))
    return ChosenCache(config, None).send(order, _progress(stack))


def find_in(config: Path, model: str, *, pin: bool) -> str:
    """Digest of a model in the cache of a configuration, which is pinned there where ``pin`` says so.

    Raises:
        ModelCacheError: there is none, or it cannot be pinned.
    """
    from appliance.fetch.protocol import FetchOrder

    chosen = ChosenCache(config, None)
    found = chosen.cache.find(model)
    if pin and not found.notes.pinned:
        chosen.send(FetchOrder("pin", model=found.digest), lambda doing, reached, total: None)
    return found.digest


def list_models(config: Config = DEFAULT_CONFIG, cache: Cache = None, output_format: Output = Format.TABLE) -> None:
    """Show the models that are served with their states, and those of the cache with what broken pulls have left."""
    from appliance.common.config_loader import load_config
    from appliance.operator.cli.model_states import served_rows, served_table

    serving = [] if cache is not None else served_rows(config)
    if cache is None and load_config(config).model_cache is None:
        if not print_data({"cache": None, "models": [], "partial": [], "serving": serving}, output_format):
            output().print(served_table(serving))
        return
    chosen = ChosenCache(config, cache)
    models = sorted(chosen.cache.models(), key=lambda one: (-one.notes.used, one.digest))
    parts = chosen.cache.partials()
    rows = [_facts(one, chosen) for one in models]
    partials = [{"key": one.key, "source": one.source, "bytes": one.size, "running": one.running} for one in parts]
    data = {"cache": str(chosen.cache.folder), "models": rows, "partial": partials, "serving": serving}
    if not print_data(data, output_format):
        if serving:
            output().print(served_table(serving))
            output().print()
        empty = "the cache is empty: athanor model pull SOURCE"
        output().print(_table(models, parts, rows) if models or parts else empty)


def show(
    model: Named, config: Config = DEFAULT_CONFIG, cache: Cache = None, output_format: Output = Format.TABLE
) -> None:
    """Show a model's files, and the lines with which athanor.yaml serves it."""
    from appliance.common.figures import printable, size

    chosen = ChosenCache(config, cache)
    found = chosen.cache.find(model)
    files = [] if found.manifest is None else found.manifest.files
    facts = _facts(found, chosen)
    facts["folder"] = str(found.folder)
    facts["files"] = [{"name": one.name, "bytes": one.size, "sha256": one.sha256} for one in files]
    if print_data(facts, output_format):
        return
    lines = [
        f"name    {found.notes.name}",
        f"digest  {found.digest}",
        f"source  {found.notes.source}",
        f"state   {_state(facts) or 'in the cache'}",
        f"signed  {_signed_words(facts)}",
        f"folder  {found.folder}",
        *(f"file    {one.name} ({size(one.size)})" for one in files),
        "",
        "models:",
        f"  - name: {found.notes.name or 'NAME'}",
        f"    digest: {found.digest}",
    ]
    for line in lines:
        output().print(printable(line), soft_wrap=True, markup=False)


def pin(model: Named, config: Config = DEFAULT_CONFIG, cache: Cache = None) -> None:
    """Keep a model in the cache: no pull makes room by removing it."""
    _change("pin", "pinned", model, config, cache)


def unpin(model: Named, config: Config = DEFAULT_CONFIG, cache: Cache = None) -> None:
    """End the pin of a model; it stays in the cache until a pull needs its room."""
    _change("unpin", "unpinned", model, config, cache)


def remove(model: Named, config: Config = DEFAULT_CONFIG, cache: Cache = None) -> None:
    """Remove a model from the cache, or what a broken pull has left; one that is configured to be served stays.

    `model stop` ends the serving of a model.
    """
    _change("remove", "removed", model, config, cache)


def manifest(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Write a model's manifest, athanor-model.json, into its folder and print the model's digest.

    Put it beside the files wherever the model is pulled from: a pull compares every byte with it.
    """
    from appliance.common.catalog import read_model
    from appliance.common.errors import os_errors_as
    from appliance.common.model_cache.manifest import MANIFEST, ManifestFile, ModelManifest
    from appliance.common.model_digests import DigestCache
    from isolation.host.atomic_file import write_whole

    name, done = folder.resolve().name, 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        work.reach(done, 0)

    with LongWork("reading the model", of_bytes) as work:
        files = read_model(name, folder, DigestCache(on_read=read))
    homes = {one.path: one for one in files.hashed}
    names = _names_of(folder, homes.keys())
    rows = [ManifestFile(names[path], one.identity[2], one.digest.hex()) for path, one in homes.items()]
    made = ModelManifest(tuple(rows))
    assert made.digest == files.digest, "the manifest has the files that the digest covers, in its order"
    with os_errors_as(f"cannot write into {folder}"):
        write_whole(folder / MANIFEST, made.text(), 0o644)
    if not print_data({"digest": made.digest, "file": str(folder / MANIFEST)}, output_format):
        output().print(f"digest: {made.digest}", soft_wrap=True, markup=False)


class ChosenCache:
    """The cache that a command is about: of a configuration, or of a folder."""

    def __init__(self, config: Path, folder: Path | None) -> None:
        from appliance.common.config_loader import load_config
        from appliance.common.errors import ApplianceError
        from appliance.common.model_cache.store import ModelCache
        from appliance.fetch.settings import FetchSettings, fetch_socket, settings_of
        from appliance.operator.fetch_client import is_served

        self.service: Path | None = None
        self.loaded: ApplianceConfig | None = None
        self.run_dir: Path | None = None
        if folder is not None:
            self.settings: FetchSettings = FetchSettings(directory=folder.absolute())
        else:
            try:
                found = load_config(config)
                self.settings, self.loaded = settings_of(found), found
            except ApplianceError as error:
                fail(
                    exits.REFUSED, error.message, "--config FILE names another athanor.yaml, --cache DIR a folder alone"
                )
            self.run_dir = found.run_dir
            socket = fetch_socket(found)
            named = found.model_cache is not None and found.model_cache.socket is not None
            self.service = socket if named or is_served(socket) else None
        self.cache: ModelCache = ModelCache(self.settings.directory)
        self.served = frozenset(self.settings.kept)

    def signature(self, model: CachedModel, keys: tuple[str, ...] = ()) -> tuple[str, str]:
        """Id of the key that has signed a model, and why none has; both empty where none must have. ``keys``: those
        that may, in place of the configuration's. Its files are believed to be those of its manifest."""
        from appliance.common.catalog import inside
        from appliance.common.errors import ConfigError
        from appliance.common.model_signature import check_signature

        if not keys and self.loaded is not None:
            own = [one for one in self.loaded.models if one.folder == model.folder]
            keys = self.loaded.keys_for(own[0]) if own else self.loaded.model_keys
        if not keys or model.manifest is None:
            return "", ""
        there = {inside(one.name): one.sha256 for one in model.manifest.files}
        try:
            return check_signature(model.notes.name or model.digest[:16], model.folder, there, keys), ""
        except ConfigError as error:
            return "", error.message

    def send(self, order: FetchOrder, progress: Progress) -> dict[str, Any]:
        """Have the downloader carry out an order; a running appliance has it in its audit log."""
        from appliance.common.errors import ModelCacheError
        from appliance.operator.fetch_client import own_environment, send_order

        try:
            done = send_order(order, self.settings, self.service, progress, own_environment())
        except ModelCacheError:
            self._record(order, {}, "FAILED")
            raise
        self._record(order, done, "OK")
        return done

    def _record(self, order: FetchOrder, done: dict[str, Any], outcome: str) -> None:
        from appliance.fetch.address import without_credentials
        from appliance.operator.fetch_client import tell_supervisor

        if self.run_dir is None or order.do not in ("pull", "remove"):
            return
        source = "" if order.pull is None else without_credentials(order.pull.source)
        digest = str(done.get("digest", "")) or (order.model if order.pull is None else order.pull.digest)
        named = {"model": str(done.get("name", "")), "model_digest": digest, "source": source}
        count = int(done.get("fetched", 0))
        tell_supervisor(self.run_dir, {"what": order.do, **named, "outcome": outcome, "count": count})


def _change(do: str, done: str, model: str, config: Path, folder: Path | None) -> None:
    from appliance.fetch.protocol import FetchOrder

    chosen = ChosenCache(config, folder)
    parts = [
        one.key for one in chosen.cache.partials() if do == "remove" and len(model) >= 6 and one.key.startswith(model)
    ]
    key = parts[0] if len(parts) == 1 else chosen.cache.find(model).digest
    if do == "remove" and key in chosen.served:
        fail(
            exits.REFUSED,
            f"the model {key[:16]} is one that is configured to be served",
            "first athanor model stop NAME, or remove its entry and athanor reload",
        )
    chosen.send(FetchOrder(do, model=key), lambda doing, reached, total: None)
    output().print(f"{done} {key}", soft_wrap=True)


def _names_of(folder: Path, paths: Any) -> dict[Path, str]:
    """Name in the folder of each real file that a link there, or a file, leads to."""
    from appliance.common.catalog import served_names

    there = {str(path.relative_to(folder)): path for path in (*folder.glob("*"), *folder.glob("*/*"))}
    return {there[name].resolve(): name for name in served_names(there.keys()) if there[name].resolve() in paths}


def _progress(stack: ExitStack) -> Progress:
    """A bar on standard error where a person watches, else a line now and then."""
    console = errors()
    if not console.is_terminal:
        work = stack.enter_context(LongWork("pulling", of_bytes))
        return lambda doing, done, total: work.reach(done, total, doing)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=console, transient=True))
    task = bar.add_task("pulling", total=None)
    show: Callable[..., None] = bar.update
    return lambda doing, done, total: show(task, description=doing, completed=done, total=total or None)


def _facts(model: CachedModel, chosen: ChosenCache) -> dict[str, Any]:
    signer, unsigned = chosen.signature(model)
    return {
        "digest": model.digest,
        "name": model.notes.name,
        "source": model.notes.source,
        "bytes": model.size,
        "pinned": model.notes.pinned,
        "served": model.digest in chosen.served,
        "pulled": round(model.notes.pulled),
        "used": round(model.notes.used),
        "problem": model.problem,
        "signer": signer,
        "unsigned": unsigned,
    }


def _state(facts: dict[str, Any]) -> str:
    words = {"served": facts["served"], "pinned": facts["pinned"], "signed": facts["signer"]}
    words["not signed"] = facts["unsigned"]
    return ", ".join(word for word, holds in words.items() if holds)


def _signed_words(facts: dict[str, Any]) -> str:
    return facts["signer"] or facts["unsigned"] or "no signature is asked for"


def _table(models: list[CachedModel], parts: tuple[PartialModel, ...], rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from appliance.common.figures import clock, printable, size

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("digest", "name", "size", "state", "used", "source"):
        table.add_column(name, no_wrap=True)
    for one, facts in zip(models, rows, strict=True):
        state = Text("broken", "red") if one.problem else Text(_state(facts), "red" if facts["unsigned"] else "green")
        used = clock(int(one.notes.used * 1e9), date=True) if one.notes.used else "-"
        table.add_row(
            one.digest[:16], printable(one.notes.name), size(one.size), state, used, printable(one.notes.source)
        )
    for part in parts:
        state = Text("being pulled" if part.running else "partial", "yellow")
        used = clock(int(part.used * 1e9), date=True) if part.used else "-"
        table.add_row(part.key[:16], "", size(part.size), state, used, printable(part.source))
    return table
