"""Every control message fits a datagram, with as many tenants and models, and names as long, as there may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from appliance.common import control, control_cards, control_charges, control_checkpoints, control_models, control_usage
from appliance.common.audit.attestation import MAX_ATTESTATION_BYTES
from appliance.common.cards import FIGURES, MAX_CARDS, XID_KINDS, CardStatus, ModelMemory
from appliance.common.checkpoint_status import MAX_PROBLEM_CHARS, ROLES, CheckpointStatus, to_wire
from appliance.common.config import MAX_LABEL_NAMES
from appliance.common.control import MAX_DATAGRAM_BYTES, Control, encode
from appliance.common.disk_space import PLACES
from appliance.common.kv_shares import group_account
from appliance.common.usage.periods import MOST
from appliance.gateway.front.key_uses import MAX_TOLD
from appliance.gateway.request.audit_feed import MAX_BYTES
from appliance.gateway.sandboxes.namespace_keys import TENANTS_PER_QUERY
from appliance.supervisor.cards.watch import card_state
from appliance.supervisor.metering import MAX_ASKED, MAX_CONFIRMED, MAX_ID_CHARS
from appliance.supervisor.model_changes import told_problems
from appliance.supervisor.namespaces import MAX_QUERY

SHORT = 64
"""Characters of ids, digests, states and reasons, and about of a tenant."""

TEXT = 4_096
"""Characters of a text for people: what is told of a sandbox's output is cut to some 6 kB."""

WIDE = "\N{GRINNING FACE}"
"""A character of four bytes."""

MODELS, ADAPTERS = 64, 128
"""Most models, and adapters of one (``appliance.common.config``)."""


def tenants(number: int) -> list[str]:
    """Accounts with the longest names: those of sharing groups."""
    return [group_account(f"{index:063}") for index in range(number)]


def models(number: int = MODELS) -> list[str]:
    """Names of models, as long as can be."""
    return [f"{index:0128}" for index in range(number)]


def cards() -> control_cards.CardState:
    """As many cards as there may be, each with every model."""
    held = tuple(ModelMemory(model=name, held=1 << 40, share=1 << 40) for name in models())
    all_of = [
        CardStatus(
            index=1_000 + number,
            uuid="u" * SHORT,
            state="absent",
            figures=dict.fromkeys(FIGURES, 1 << 62),
            xids=dict.fromkeys(XID_KINDS, 1 << 62),
            last_xid=1 << 32,
            models=held,
            unknown_bytes=1 << 62,
            engines=tuple(models()),
            out=WIDE * 10_000,
        )
        for number in range(MAX_CARDS)
    ]
    return card_state(all_of, WIDE * 10_000, dict.fromkeys(models(), 1 << 30), dict.fromkeys(models(), WIDE * 10_000))


def used(number: int) -> dict[str, list[int]]:
    """Rows of usage; how many fit is shown beside what makes them (test_usage_tables, test_answering)."""
    return dict.fromkeys(models(number), [MOST] * 6)


GROWING: dict[type, Callable[[], Control]] = {
    control.Welcome: lambda: control.Welcome(1, "s" * SHORT, "l" * TEXT, models()),
    control.NamespaceQuery: lambda: control.NamespaceQuery(tenants(TENANTS_PER_QUERY)),
    control.Namespaces: lambda: control.Namespaces(dict.fromkeys(tenants(MAX_QUERY), "f" * 64)),
    control.Retention: lambda: control.Retention(dict.fromkeys(tenants(TENANTS_PER_QUERY), 1)),
    control.Audited: lambda: control.Audited(["\\" * (MAX_BYTES // 2)] * 2, MOST),
    control.KeysUsed: lambda: control.KeysUsed({f"{number:0140}": MOST for number in range(MAX_TOLD)}),
    control.SpendQuery: lambda: control.SpendQuery(tenants(MAX_ASKED)),
    control.Spent: lambda: control.Spent(1, 1, tenants(MAX_ASKED), dict.fromkeys(tenants(MAX_ASKED), [MOST] * 4)),
    control.ReserveSpend: lambda: control.ReserveSpend(
        {name: {"r" * MAX_ID_CHARS: MOST} for name in tenants(control.MAX_RESERVATIONS)}
    ),
    control.SpendReserved: lambda: control.SpendReserved(["r" * MAX_ID_CHARS] * MAX_CONFIRMED),
    control.Attested: lambda: control.Attested("r" * SHORT, '"' * MAX_ATTESTATION_BYTES, ""),
    control.SandboxUp: lambda: control.SandboxUp(
        models(1)[0], "engine", MOST, MOST, MOST, "f" * TEXT, {"n" * 16: MOST}, tenants(1)[0], computes=WIDE * 600
    ),
    control_checkpoints.CheckpointState: lambda: control_checkpoints.CheckpointState(
        *to_wire(
            CheckpointStatus(role=role, model=model, bytes=MOST, made_at=MOST, problem=WIDE * MAX_PROBLEM_CHARS)
            for role in ROLES
            for model in models(100)
        )
    ),
    control.SpillState: lambda: control.SpillState({f"{number:064}": MOST for number in range(100)}),
    control.DiskState: lambda: control.DiskState({place: [MOST, MOST] for place in PLACES}),
    control.StoreState: lambda: control.StoreState({f"{number:064}": MOST for number in range(100)}),
    control_cards.CardState: cards,
    control_models.ModelServed: lambda: control_models.ModelServed(
        models(1)[0],
        "external",
        1,
        "f" * 64,
        "leaving",
        1,
        [f"{name}:{'a' * 63} {'f' * 64}" for name in models(ADAPTERS)],
        1,
        [WIDE * 64] * MAX_LABEL_NAMES,
    ),
    control_models.ModelsReviewed: lambda: control_models.ModelsReviewed(
        "r" * SHORT, told_problems([WIDE * 10_000] * 10_000)
    ),
    control_usage.Used: lambda: control_usage.Used("r" * SHORT, 1, 1, used(141), used(141), used(81), used(81), ""),
    control_usage.Overview: lambda: control_usage.Overview(
        "r" * SHORT,
        MOST,
        MOST,
        3_600,
        [MOST] * 6,
        used(61),
        used(4),
        dict.fromkeys(models(6), [MOST] * 3 * 168),
        dict.fromkeys(tenants(20), [MOST] * 4),
        1e300,
        1e300,
        "E" * 8,
        "",
    ),
    control_usage.UsageTable: lambda: control_usage.UsageTable("r" * SHORT, used(200), MOST, ""),
}
"""The largest of each message that has a list or a table."""


def grows(kind: type) -> bool:
    """Whether a message holds more than numbers and single texts."""
    return any("list" in str(field.type) or "dict" in str(field.type) for field in dataclasses.fields(kind))


def largest(kind: type) -> Control:
    """The largest message of a kind."""
    if kind in GROWING:
        return GROWING[kind]()
    values = {"int": MOST, "float": 1e300, "str": WIDE * TEXT}
    return kind(*(values[str(field.type)] for field in dataclasses.fields(kind)))  # type: ignore[no-any-return]


def test_each_message_that_grows_is_known() -> None:
    """A new message with a list or a table has a largest one here; control: some grow and some do not."""
    kinds = set(control._TYPES.values())
    assert {kind for kind in kinds if grows(kind)} - GROWING.keys() == set()
    assert GROWING.keys() <= kinds
    assert not grows(control_charges.KeepCharges) and not grows(control.SandboxDown)


@pytest.mark.parametrize("name", sorted(control._TYPES))
def test_the_largest_message_fits_a_datagram(name: str) -> None:
    """With all names, texts and numbers as large as they may be, each message is below the bound and comes back."""
    message = largest(control._TYPES[name])
    data = encode(message)
    assert len(data) <= MAX_DATAGRAM_BYTES
    assert control.decode(data) == message
