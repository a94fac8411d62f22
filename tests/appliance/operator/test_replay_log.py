"""appliance.operator.replay_log: which entries of an audit log a replay gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit import log as log_module
from appliance.common.audit.entry import Entry, entry
from appliance.common.audit.log import open_log
from appliance.common.errors import ConfigError
from appliance.operator.replay_log import LoggedRequests
from policy.replay import CUT_CREDENTIAL, AllowedEntry, DeniedEntry


def request(number: int) -> Entry:
    """An allowed request whose count of tokens tells which it is."""
    return entry(
        "request",
        request=f"r{number}",
        tenant="beta",
        principal="key:b-1",
        model="m",
        alias="",
        operation="chat",
        rule="tenants.beta.models[0]",
        policy="ab",
        outcome="OK",
        input_tokens=number,
        cached_tokens=1,
        output_tokens=2,
        reasoning_tokens=0,
        cost=3,
        queued_ms=4,
        cut_rule="",
        cut_policy="",
        downgraded="",
        adapter="",
        adapter_digest="",
        listener="",
        runner="model",
        end_user="",
        batch="",
    )


DENIED = entry(
    "denied",
    tenant="beta",
    principal="key:b-1",
    model="m",
    alias="fast",
    rule="tenants.beta.limits.concurrency",
    policy="ab",
    outcome="RATE_LIMITED",
    count=7,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of several segments, a request a second, with entries of other kinds between."""
    monkeypatch.setattr(log_module, "SEGMENT_BYTES", 600)
    audit = open_log(tmp_path / "audit")
    for second in range(1, 21):
        audit.append([(second * 1_000, request(second)), (second * 1_000, entry("gap", where="gateway", dropped=1))])
    audit.append([(21_000, DENIED)])
    audit.close()
    return tmp_path / "audit"


def test_entries_from_a_moment_on(folder: Path) -> None:
    """Requests and denials in their order, over several segments, and how many entries were lost meanwhile."""
    assert len(files.segment_paths(folder)) > 3
    found = LoggedRequests(folder, 15_000)
    assert list(found) == [
        *(
            AllowedEntry(
                time_s=float(second),
                tenant="beta",
                credential="key:b-1",
                model="m",
                operation="chat",
                policy="ab",
                alias="",
                input_tokens=second,
                cached_tokens=1,
                output_tokens=2,
                day=0,
                month=1970 * 12,
            )
            for second in range(15, 21)
        ),
        DeniedEntry(
            tenant="beta",
            credential="key:b-1",
            model="m",
            alias="fast",
            rule="tenants.beta.limits.concurrency",
            count=7,
        ),
    ]
    assert found.lost == 6
    assert len(list(found)) == 7, "a second time the same"
    assert found.lost == 6
    assert len(list(LoggedRequests(folder, 0))) == 21
    assert list(LoggedRequests(folder, 22_000)) == []


def test_old_segments_are_not_read(folder: Path) -> None:
    """A segment before the moment may be damaged or moved away; one within the span may not be damaged."""
    first, *_, last = files.segment_paths(folder)
    first.write_bytes(b"nothing\n")
    assert len(list(LoggedRequests(folder, 15_000))) == 7
    with pytest.raises(ConfigError, match="header"):
        list(LoggedRequests(folder, 0))
    last.write_bytes(last.read_bytes() + b"no entry\n")
    with pytest.raises(ConfigError, match="no entry of an audit log"):
        list(LoggedRequests(folder, 15_000))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """It is named, with the system's reason; an empty one has no entries."""
    with pytest.raises(ConfigError, match=r"cannot read the audit log in .*no such file"):
        list(LoggedRequests(tmp_path / "none", 0))
    assert list(LoggedRequests(tmp_path, 0)) == []


def test_the_log_cuts_credentials_where_the_replay_thinks(folder: Path) -> None:
    """An entry keeps as many characters of a long SPIFFE ID as the replay takes for one that was cut."""
    long = "spiffe://example.org/" + "x" * 500
    values = {**request(1).fields, "principal": long}
    assert len(str(entry("request", **values).fields["principal"])) == CUT_CREDENTIAL
