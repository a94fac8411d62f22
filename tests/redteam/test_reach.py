"""The attacker's program inside each sandbox, and outside: nothing against nearly everything."""

from __future__ import annotations

import pytest

from appliance.selftest import g8_containment, g8_hostile, intruder
from appliance.selftest.redteam import base, files, kernel, network, ring
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.ipc.messages import Role

pytestmark = pytest.mark.runsc


def matrix(*quick: tuple[Role, bool]) -> list[object]:
    """Every role, started and restored; all but the ``quick`` ones are of the full count."""
    return [
        pytest.param(role, restored, marks=[] if (role, restored) in quick else [pytest.mark.full])
        for role in (Role.ENGINE, Role.TEXT)
        for restored in (False, True)
    ]


@pytest.fixture(scope="module")
def control(runsc_path: object) -> intruder.Findings:
    """What the attacks reach outside."""
    return intruder.outside()


@pytest.mark.parametrize(("role", "restored"), matrix((Role.ENGINE, False), (Role.TEXT, True)))
def test_nothing_is_reached_from_a_sandbox(
    gvisor: GvisorRuntime, control: intruder.Findings, role: Role, restored: bool
) -> None:
    """Every attack is tried in the sandbox that serves and is refused: network, files, kernel, gates, rings; in one
    that was started, and in one that is a copy of a checkpoint."""
    row = g8_containment.reach(role, intruder.inside(gvisor, role, restored=restored), control)
    assert row.verdict == "pass", row.figure


@pytest.mark.parametrize(("role", "restored"), matrix((Role.ENGINE, True), (Role.TEXT, False)))
def test_a_locked_program_does_not_live_to_be_refused(
    gvisor: GvisorRuntime, control: intruder.Findings, role: Role, restored: bool
) -> None:
    """In the state in which an engine or a text worker serves, an attempt is the end of the process that makes it; a
    text worker that looks for files finds none."""
    row = g8_containment.locked(role, intruder.inside(gvisor, role, locked=True, restored=restored), control)
    assert row.verdict == "pass", row.figure


def test_most_is_reached_outside(control: intruder.Findings) -> None:
    """The positive control: the same program as a plain process of root reaches something of every kind."""
    row = g8_containment.reach_control(control)
    assert row.verdict == "pass", row.figure


def test_every_attack_is_in_the_program(control: intruder.Findings) -> None:
    """What the modules define is what the loader tries; none of them broke by itself."""
    assert {network, files, kernel, ring}  # imported: they have registered what they have
    assert control.keys() == base.ATTACKS.keys()
    assert [name for name, row in control.items() if row["outcome"] == "broken"] == []


def test_a_reach_fails_the_row(control: intruder.Findings) -> None:
    """The row can fail: one attack that reached, and one that was left out."""
    refused = {name: {**row, "outcome": "refused"} for name, row in control.items()}
    assert g8_containment.reach(Role.TEXT, refused, control).verdict == "pass"
    one = {**refused, "files.read": {**refused["files.read"], "outcome": "reached", "said": "the canary"}}
    assert "files.read: the canary" in g8_containment.reach(Role.TEXT, one, control).figure
    assert g8_containment.reach(Role.TEXT, one, control).verdict == "fail"
    del refused["kernel.ptrace"]
    assert g8_containment.reach(Role.TEXT, refused, control).verdict == "fail"
    assert g8_containment.reach_control(refused).verdict == "fail"


def test_without_sandboxes_the_rows_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where real sandboxes cannot be started the row says why and passes nothing."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for check, name in ((g8_containment, "G8.sandbox"), (g8_hostile, "G8.hostile")):
        (row,) = check.run(False)
        assert (row.id, row.verdict) == (name, "absent")
        assert "root" in row.figure
