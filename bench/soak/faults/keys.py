"""Keys of every kind are destroyed or renewed while they are in use: tenants' own, the root key, and API keys."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping

from appliance.common.credentials import read_key_table
from appliance.common.keys import KeyRecord, serialise_records
from appliance.operator.cli.key import create_key
from appliance.selftest.raw_http import request_bytes, status_of, talk
from bench.soak.answers import AWAY
from bench.soak.clients import TIMEOUT_S
from bench.soak.errors import BreachError
from bench.soak.faults.deaths import GONE_S
from bench.soak.faults.policies import reload_policy
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import POLICY, TENANTS, until_gone, until_pid
from isolation.host.atomic_file import write_whole
from isolation.keys.root import create_root, read_root

ROUNDS = 8

SETTLED_S = 2.0
"""From the moment in which clients have the new key to that in which the old one is refused: who asked with the old
one has been let in by then, or has waited at the door for longer than any pause of the gateway."""

OK, REFUSED = 200, 401


def _order(what: str) -> Act:
    """Tenants' keys by turns, through the operator's socket."""

    async def act(ground: Ground) -> str:
        replaced = 0
        for _ in range(ROUNDS):
            answer = await ground.tell_operator({"do": what, "tenant": ground.draw.choice(TENANTS)})
            if not answer.get("ok"):
                raise BreachError(f"to {what} a key was refused: {answer}")
            replaced += bool(answer["had_key"])
            await ground.last(0.1, 0.8)
        return f"{replaced} keys were destroyed" if replaced else ""

    return act


async def _root(ground: Ground) -> str:
    """Another root key, by the documented steps; then the supervisor has to open the keyring with it."""
    state = ground.served.target.state
    old, new = state / "root-key", state / "root-key.new"
    before = read_root(old)
    create_root(new)
    answer = await ground.tell_operator({"do": "rewrap", "root": read_root(new).hex()})
    if not answer.get("ok"):
        raise BreachError(f"a new root key was refused: {answer}")
    new.replace(old)
    pid = await until_pid(ground.served, "supervisor")
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(1.0)
    await until_gone(pid, GONE_S)
    return f"{answer['keys']} keys are wrapped anew" if read_root(old) != before else ""


async def _api_keys(ground: Ground) -> str:
    """A tenant moves to a new API key and back to a third one while it asks; no request may notice.

    Each move has the steps that an operator takes: make the new key, let the policy name both, reload, have the
    clients use it, revoke the old one, reload.
    """
    tenant = ground.draw.choice(TENANTS)
    first, second = f"{tenant}-1", f"{tenant}-2"
    old = ground.served.keys[tenant]
    await _move(ground, tenant, first, second)
    replaced = ground.served.keys[tenant]
    await _move(ground, tenant, second, first)
    refused = [await _asked_with(ground, key) for key in (old, replaced)]
    if refused != [REFUSED, REFUSED]:
        raise BreachError(f"keys that were revoked are answered with {refused}")
    return "two keys were revoked and are refused"


async def _move(ground: Ground, tenant: str, old_id: str, new_id: str) -> None:
    """Give a tenant a key of another id in place of the one it has."""
    state = ground.served.target.state
    table, pepper, policy = state / "credentials.json", state / "pepper", state / "policy.yaml"
    credential = f'credentials: ["key:{tenant}-1"]'
    made = create_key(tenant, new_id, table, pepper)
    policy.write_text(POLICY.replace(credential, f'credentials: ["key:{old_id}", "key:{new_id}"]'))
    await reload_policy(ground, good=True, what="a second key")
    before = ground.served.keys[tenant]
    ground.served.keys[tenant] = made.key
    both = [await _asked_with(ground, key) for key in (before, made.key)]
    if both != [OK, OK]:
        raise BreachError(f"of an old and a new key both in force one was answered with {both}")
    await asyncio.sleep(SETTLED_S)
    records = read_key_table(table, pepper).records
    write_whole(table, _without(records, old_id).encode())
    policy.write_text(POLICY.replace(credential, f'credentials: ["key:{new_id}"]'))
    await reload_policy(ground, good=True, what="one key less")


def _without(records: Mapping[str, KeyRecord], key_id: str) -> str:
    return serialise_records({name: record for name, record in records.items() if name != key_id})


async def _asked_with(ground: Ground, key: str) -> int:
    """Status of a list of models asked for with this key."""
    request = request_bytes("GET", "/v1/models", b"", ("authorization", f"Bearer {key}"))
    return status_of(await talk(ground.served.http_port, request, TIMEOUT_S))


FAULTS = (
    Fault("keys-shred", "tenants' keys are destroyed by turns", _order("shred")),
    Fault("keys-rotate", "tenants' keys are renewed by turns", _order("rotate")),
    Fault("keys-root", "the root key is replaced, and the supervisor dies", _root, AWAY | {"request_quarantined"}),
    Fault("keys-api", "a tenant's API key is replaced twice, and the old ones are revoked", _api_keys),
)
