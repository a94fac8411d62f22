"""The short form of G2: whatever a caller writes, the namespace is that of whoever proved to ask."""

from __future__ import annotations

import pytest

from appliance.gateway.grpc.servicer import SERVICE
from appliance.selftest import g2_namespace, g2_split, g2_stored
from appliance.selftest.scripted_gateway import scripted_gateway

FEWER = {"RANDOM_REQUESTS": 100, "SPLITS": 5_000}
"""Counts of `make test`, by the constant of ``g2_namespace``: of random combinations, and of hashed sequences of ids.
Each field, header, query and key alone is sent in every run."""


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_no_field_header_or_metadata_changes_the_namespace(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every route and method with every word that could name a tenant: 0 changes, no door open to strangers, no
    tenant's own listener open to another, and the controls beside them (another key changes it, a key opens every door,
    names without lengths meet)."""
    for name, count in FEWER.items():
        monkeypatch.setattr(g2_namespace, name, (count, getattr(g2_namespace, name)[1]))
    rows = {row.id: row for row in g2_namespace.run(full)}
    assert rows.keys() == {
        "G2.namespace",
        "G2.namespace.control",
        "G2.public",
        "G2.public.control",
        "G2.doors",
        "G2.doors.control",
        "G2.own_listener",
        "G2.own_listener.control",
        "G2.framing",
        "G2.framing.control",
    }
    assert [(row.id, row.figure) for row in rows.values() if row.verdict != "pass"] == []


def test_nothing_makes_the_store_answer_for_another_tenant() -> None:
    """Every route and method about files, batches and responses with every word that could name a tenant: the store is
    asked for the caller's tenant alone, and by each of them; with another key (control) for that one's."""
    rows = {row.id: row for row in g2_stored.run(full=False)}
    assert rows.keys() == {"G2.stored", "G2.stored.control"}
    assert [(row.id, row.figure) for row in rows.values() if row.verdict != "pass"] == []


def test_no_client_and_no_host_names_another_tenants_namespace() -> None:
    """Prompts that other hosts are to compute have their caller's tenant, whatever the caller writes; a prefill host
    computes for a listed host, under the namespace of the sharing tenant that it names. Controls: another key, and
    another sharing tenant's name, give that one's."""
    rows = {row.id: row for row in g2_split.run(full=False)}
    assert rows.keys() == {"G2.split", "G2.split.control", "G2.prefill", "G2.prefill.control"}
    assert [(row.id, row.figure) for row in rows.values() if row.verdict != "pass"] == []


async def test_every_method_of_the_service_is_walked() -> None:
    """The method table that strangers are sent through is the whole one, by the service's own description."""
    from appliance.gateway.grpc.generated import inference_pb2 as pb

    async with scripted_gateway() as gateway:
        methods = g2_namespace.grpc_methods(gateway)
    described = {f"/{SERVICE}/{one.name}" for one in pb.DESCRIPTOR.services_by_name["InferenceService"].methods}
    assert described < methods.keys()


def test_a_change_would_be_seen() -> None:
    """The count can fail: a submission under another namespace, and a grammar of another owner."""
    from appliance.selftest.scripted_gateway import NAMESPACES, Heard, ScriptedGateway

    heard = Heard([NAMESPACES["beta"]], [b"x" * 16])
    gateway = ScriptedGateway(None, None, {}, heard, [])  # type: ignore[arg-type]
    found = g2_namespace.Count()
    found.look(gateway, "alpha", "what", {"alpha": b"y" * 16})
    assert (found.changed, found.reached, found.example) == (2, 1, "what")
    assert heard.namespaces == []
