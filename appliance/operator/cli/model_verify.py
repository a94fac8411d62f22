"""``athanor model verify``: files of models against what was pulled, and signatures against keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.long_work import LongWork, of_bytes
from appliance.operator.cli.model_cache import Cache, ChosenCache
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

VERIFY_EXAMPLES = """
athanor model verify llama-3.1-8b | reads all of it; exit code 1 when a byte differs
athanor model verify | every model of the cache
athanor model verify models/llama --key vendor.pub | a folder, and who has signed it
"""

Keys = Annotated[
    list[Path] | None,
    typer.Option(
        "--key", metavar="FILE", help="Public key (PEM) that must have signed; may be repeated. [the configuration's]"
    ),
]


def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model, or a folder with a / in it; else all.", show_default=False)
    ] = "",
    key: Keys = None,
    config: Config = DEFAULT_CONFIG,
    cache: Cache = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Read the files of models, compare every byte with what was pulled, and verify who has signed them.

    Signatures are verified where the configuration demands them, or --key names who must have signed.
    """
    from appliance.common.errors import ModelDigestError

    keys = _read_keys(key or [])
    if "/" in model or model in (".", ".."):
        _verify_folder(Path(model), keys, config, output_format)
        return
    chosen = ChosenCache(config, cache)
    models = (chosen.cache.find(model),) if model else chosen.cache.models()
    total, done = sum(one.size for one in models), 0
    problems: dict[str, str] = {}

    def read(count: int) -> None:
        nonlocal done
        done += count
        work.reach(done, total)

    signers: dict[str, str] = {}
    with LongWork("reading models", of_bytes) as work:
        for one in models:
            try:
                chosen.cache.verify(one, read)
                signers[one.digest], problems[one.digest] = chosen.signature(one, keys)
            except ModelDigestError as error:
                problems[one.digest] = error.message
    rows = [
        {
            "digest": one.digest,
            "name": one.notes.name,
            "problem": problems[one.digest],
            "signer": signers.get(one.digest, ""),
        }
        for one in models
    ]
    _tell_verified(rows, output_format)


def _verify_folder(folder: Path, keys: tuple[str, ...], config: Path, output_format: Format) -> None:
    """Verify the signature of a model that is in no cache, by the keys of the command or of the configuration."""
    from appliance.common.catalog import read_model
    from appliance.common.config_loader import load_config
    from appliance.common.errors import ApplianceError
    from appliance.common.model_digests import DigestCache
    from appliance.common.model_signature import with_signer

    if not keys:
        try:
            found = load_config(config)
        except ApplianceError as error:
            fail(exits.REFUSED, error.message, "--key FILE names who must have signed")
        served = [one for one in found.models if one.path is not None and one.folder.resolve() == folder.resolve()]
        keys = found.keys_for(served[0]) if served else found.model_keys
    if not keys:
        fail(exits.USAGE, f"nothing says who must have signed {folder}", "--key FILE names the key")
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        work.reach(done, 0)

    with LongWork("reading the model", of_bytes) as work:
        files = with_signer(read_model(folder.resolve().name, folder, DigestCache(on_read=read)), keys)
    row = {"digest": files.digest, "name": files.name, "problem": files.unsigned, "signer": files.signer}
    _tell_verified([row], output_format)


def _tell_verified(rows: list[dict[str, str]], output_format: Format) -> None:
    """Print what was verified; a problem ends the command."""
    if not print_data({"models": rows}, output_format):
        for row in rows:
            word = "broken" if row["problem"] else "whole"
            by = f", signed by {row['signer'][:16]}" if row["signer"] else ""
            output().print(f"{row['digest'][:16]} {word}  {row['name']}{by}", soft_wrap=True, markup=False)
    if problems := [row["problem"] for row in rows if row["problem"]]:
        fail(exits.REFUSED, "\n".join(problems))


def _read_keys(files: list[Path]) -> tuple[str, ...]:
    """Read public keys that a command names."""
    from appliance.common.errors import ConfigError, os_errors_as
    from isolation.keys.public_key import MAX_KEY_CHARS, PublicKeyError, public_key_of

    found = []
    for path in files:
        with os_errors_as(f"cannot read {path}"), path.open("rb") as file:
            text = file.read(MAX_KEY_CHARS + 1).decode("utf-8", "replace")
        try:
            found.append(public_key_of(text).line)
        except PublicKeyError as error:
            raise ConfigError(f"{path}: {error}") from error
    return tuple(found)
