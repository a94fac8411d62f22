"""``athanor tenant``: tenants' keys, and spend that is reserved for requests that ended with the machine. What was
sealed under a key that is destroyed is gone for good.

A running supervisor is asked; where none runs, the keyring's folder is opened here, and nothing of that is in the audit
log, which belongs to the supervisor."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.common.errors import reason_of
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig

SHRED_EXAMPLES = """
athanor tenant shred acme | running or not
"""

ROTATE_EXAMPLES = """
athanor tenant rotate acme | on a schedule, or after a backup got lost
"""

RELEASE_EXAMPLES = """
athanor tenant release acme | after a power loss, when its limit of spend shall not stay reduced
"""

REWRAP_EXAMPLES = """
athanor tenant rewrap /etc/athanor/root-key.new -c athanor.yaml | then put it in the old one's place
"""

ROOT_EXAMPLES = """
athanor tenant root /etc/athanor/root-key | before the first start with spill
"""

ANSWER_S = 120.0
"""Patience with a supervisor that overwrites many files."""

MAX_ANSWER_BYTES = 64 << 10


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def shred(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key is destroyed.")],
    config: Config = DEFAULT_CONFIG,
    yes: Yes = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Destroy a tenant's key.

    What it sealed is unreadable from then on, wherever copies lie. A running appliance forgets the
    tenant's cached KV as well and goes on serving the tenant under a new key. The audit log's
    pseudonyms lead to the tenant no more, and the log verifies as before. Needs the supervisor's user,
    or root.
    """
    loaded = _load(config)
    confirm(f"destroy the key of {tenant}, for good", yes=yes)
    shred_key(loaded, tenant, output_format)


def shred_key(config: ApplianceConfig, tenant: str, output_format: Format = Format.TABLE) -> None:
    """Destroy a tenant's key without a question, and print what came of it; a refusal ends the command."""
    answer = _order(config, {"do": "shred", "tenant": tenant}, output_format)
    if answer is not None:
        key = "its key is destroyed" if answer["had_key"] else "it had no key"
        output().print(f"{tenant}: {key}, {answer['objects']} sealed objects removed", highlight=False)
        if answer.get("fleet"):
            output().print("the fleet's key for it ends: the audit log says when on all hosts", highlight=False)
        if answer.get("unlinked"):
            output().print("the audit log's pseudonyms lead to it no more", highlight=False)


def rotate(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Who gets a new key.")],
    config: Config = DEFAULT_CONFIG,
    yes: Yes = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Give a tenant a new key and destroy the old one.

    What the old one sealed is unreadable from then on; it is computed again when it is asked for. Needs
    the supervisor's user, or root.
    """
    loaded = _load(config)
    confirm(f"renew the key of {tenant}, which destroys the one it has", yes=yes)
    answer = _order(loaded, {"do": "rotate", "tenant": tenant}, output_format)
    if answer is not None:
        old = f", the old one is destroyed with {answer['objects']} sealed objects" if answer["had_key"] else ""
        output().print(f"{tenant}: it has a new key{old}", highlight=False)


def release(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose reservations are released.")],
    config: Config = DEFAULT_CONFIG,
    yes: Yes = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Release spend that is reserved for requests that ended with the machine.

    After a power loss, what a tenant's running requests had reserved counts against its limits until
    the day and the month end, since nobody knows how much of their answers was shown. This command
    gives it back, and charges nothing for them. Lines of batches, which run again, keep theirs.
    Needs a running appliance, and the supervisor's user, or root.
    """
    loaded = _load(config)
    confirm(f"release what {tenant} had reserved before the machine booted", yes=yes)
    answer = _order(loaded, {"do": "release", "tenant": tenant}, output_format)
    if answer is not None:
        from policy.prices import amount_text

        number, cost = counted(answer["requests"], "reservation"), amount_text(answer["cost"])
        output().print(f"{tenant}: {number} released, {cost} in all", highlight=False)


def rewrap(
    new_root: Annotated[Path, typer.Argument(metavar="NEW", help="File of the new root key.")],
    config: Config = DEFAULT_CONFIG,
    yes: Yes = False,
    output_format: Output = Format.TABLE,
) -> None:
    """Wrap all tenants' keys under another root key.

    Nothing that is sealed is lost. Afterwards the new file has to take the place of the old one,
    before the next start. Needs the supervisor's user, or root.
    """
    from isolation.keys.root import read_root

    loaded = _load(config)
    root = read_root(new_root)
    confirm(f"wrap all tenants' keys under {new_root}", yes=yes)
    answer = _order(loaded, {"do": "rewrap", "root": root.hex()}, output_format)
    if answer is not None and loaded.keys is not None:
        number = counted(answer["keys"], "key")
        output().print(f"{number} wrapped under the new root key", highlight=False)
        mend = f"now, before the next start: mv {new_root} {loaded.keys.root_key}"
        output().print(mend, soft_wrap=True, markup=False, highlight=False)


def root_key(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where the key goes; there must be no file yet.")],
) -> None:
    """Make a root key: 32 random bytes that only their owner may read.

    Tenants' keys are wrapped under it. Keep it apart from the keyring and from backups of that.
    """
    from isolation.keys.root import create_root

    create_root(path)
    output().print(f"made {path}")


def _load(config: Path) -> ApplianceConfig:
    from appliance.common.config_loader import load_config

    return load_config(config)


def confirm(what: str, *, yes: bool) -> None:
    """Ask a person at a terminal; a script is not asked."""
    if yes or not _is_person():
        return
    try:
        agreed = typer.confirm(f"{what}?", err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        fail(exits.REFUSED, "nothing was done")


def _is_person() -> bool:
    return sys.stdin.isatty()


def _order(config: ApplianceConfig, wish: dict[str, str], output_format: Format) -> dict[str, Any] | None:
    """Have an order carried out; gives the answer where people are to be told, and prints it elsewhere."""
    with ExitStack() as stack:
        if output_format is Format.TABLE and errors().is_terminal:
            doing = "" if wish["do"] == "release" else ": objects and keys are overwritten"
            stack.enter_context(errors().status(f"{wish['do']}{doing}"))
        answer = _ask_running(config, wish)
        if answer is None:
            answer = _do_offline(config, wish)
    if not answer.get("ok"):
        fail(exits.REFUSED, str(answer.get("problem", "the supervisor refused")))
    return None if print_data(answer, output_format) else answer


def _ask_running(config: ApplianceConfig, wish: dict[str, str]) -> dict[str, Any] | None:
    """What the running supervisor answers; None when none runs."""
    from appliance.common.paths import OPERATOR_SOCKET

    path = config.run_dir / OPERATOR_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            fail(exits.REFUSED, f"cannot speak to the supervisor at {path}: {reason_of(error)}")
        try:
            sock.sendall(json.dumps(wish).encode() + b"\n")
            with sock.makefile("rb") as answers:
                answer = json.loads(answers.readline(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            fail(exits.REFUSED, f"the supervisor did not answer: {error}; look at its log, then ask again")
    return answer if isinstance(answer, dict) else {}


def _forget_users(config: ApplianceConfig, tenant: str) -> None:
    """Destroy what the usage book has of a tenant's end users; a running supervisor does so by itself."""
    from appliance.common.errors import UsageError
    from appliance.common.usage.book import FOLDER, NAME, UsageAccessError, open_book

    if config.audit is None or not (config.audit.directory / FOLDER / NAME).exists():
        return
    try:
        book, _ = open_book(config.audit.directory)
        book.forget_users(tenant)
        book.close()
    except (UsageError, UsageAccessError) as error:
        fail(exits.REFUSED, f"the key is destroyed, and what its end users used is not: {error}; run it again")


def _do_offline(config: ApplianceConfig, wish: dict[str, str]) -> dict[str, Any]:
    """Carry out an order on the keyring's folder while no supervisor has it open."""
    from isolation.keys.errors import KeysError
    from isolation.keys.keyring import Keyring
    from isolation.keys.root import read_root

    if wish["do"] == "release":
        return {"ok": False, "problem": "no supervisor runs, which keeps the usage book; start it, then ask again"}
    unlinked = False
    if wish["do"] == "shred" and config.audit is not None:
        from appliance.operator.audit_names import unlink

        unlinked = unlink(config.audit.directory, wish["tenant"])
    if config.keys is None:
        if unlinked:
            return {"ok": True, "tenant": wish["tenant"], "objects": 0, "had_key": False, "unlinked": True}
        return {"ok": False, "problem": "the configuration names no keys, so nothing is sealed"}
    try:
        keyring = Keyring(config.keys.keyring, read_root(config.keys.root_key))
        try:
            if wish["do"] == "rewrap":
                return {"ok": True, "keys": keyring.rewrap(bytes.fromhex(wish["root"]))}
            tenant = wish["tenant"]
            had_key = keyring.shred(tenant)
            if wish["do"] == "rotate":
                keyring.rotate(tenant)
            _forget_users(config, tenant)
        finally:
            keyring.close()
    except KeysError as error:
        return {"ok": False, "problem": str(error)}
    return {"ok": True, "tenant": tenant, "objects": 0, "had_key": had_key, "unlinked": unlinked}
