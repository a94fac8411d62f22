"""``athanor tenant``: tenants' keys. What was sealed under a key that is destroyed is gone for good."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli import exits
from appliance.cli.console import Format, fail, output, print_data
from appliance.cli.options import Output

if TYPE_CHECKING:
    from appliance.config import ApplianceConfig

SHRED_EXAMPLES = """
athanor tenant shred acme --config /etc/athanor/athanor.yaml | running or not
"""

ROOT_EXAMPLES = """
athanor tenant root /etc/athanor/root-key | before the first start with spill
"""

ANSWER_S = 120.0
"""Patience with a supervisor that overwrites many files."""

MAX_ANSWER_BYTES = 64 << 10


def shred(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key is destroyed.")],
    config: Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The appliance's athanor.yaml.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Destroy a tenant's key.

    What it sealed is unreadable from then on, wherever copies lie. A running appliance forgets the
    tenant's cached KV as well and goes on serving the tenant under a new key. Needs the
    supervisor's user, or root.
    """
    from appliance.config import load_config
    from appliance.errors import ConfigError

    try:
        loaded = load_config(config)
    except ConfigError as error:
        fail(exits.REFUSED, error.message)
    answer = _ask_running(loaded, {"do": "shred", "tenant": tenant})
    if answer is None:
        answer = _shred_offline(loaded, tenant)
    if not answer.get("ok"):
        fail(exits.REFUSED, str(answer.get("problem", "the supervisor refused")))
    if output_format is not Format.TABLE:
        print_data(answer, output_format)
        return
    key = "its key is destroyed" if answer["had_key"] else "it had no key"
    output().print(f"{tenant}: {key}, {answer['objects']} sealed objects removed")


def root_key(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Where the key goes; there must be no file yet.")],
) -> None:
    """Make a root key: 32 random bytes that only their owner may read.

    Tenants' keys are wrapped under it. Keep it apart from the keyring and from backups of that.
    """
    from isolation.keys.errors import RootKeyError
    from isolation.keys.root import create_root

    try:
        create_root(path)
    except RootKeyError as error:
        fail(exits.REFUSED, str(error))
    output().print(f"made {path}")


def _ask_running(config: ApplianceConfig, wish: dict[str, str]) -> dict[str, Any] | None:
    """What the running supervisor answers; None when none runs."""
    from appliance.supervisor.paths import OPERATOR_SOCKET

    path = config.run_dir / OPERATOR_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            fail(exits.REFUSED, f"cannot speak to the supervisor at {path}: {(error.strerror or str(error)).lower()}")
        try:
            sock.sendall(json.dumps(wish).encode() + b"\n")
            with sock.makefile("rb") as answers:
                answer = json.loads(answers.readline(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            fail(exits.REFUSED, f"the supervisor did not answer: {error}; look at its log, then ask again")
    return answer if isinstance(answer, dict) else {}


def _shred_offline(config: ApplianceConfig, tenant: str) -> dict[str, Any]:
    """Destroy the key in the keyring's folder, which nobody has open."""
    from isolation.keys.errors import KeysError
    from isolation.keys.keyring import Keyring
    from isolation.keys.root import read_root

    if config.keys is None:
        return {"ok": False, "problem": "the configuration names no keys, so nothing is sealed"}
    try:
        keyring = Keyring(config.keys.keyring, read_root(config.keys.root_key))
        try:
            had_key = keyring.shred(tenant)
        finally:
            keyring.close()
    except KeysError as error:
        return {"ok": False, "problem": str(error)}
    return {"ok": True, "tenant": tenant, "objects": 0, "had_key": had_key}
