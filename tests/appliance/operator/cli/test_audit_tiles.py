"""``athanor audit tiles`` and ``prove``, and the verification of both by a key that was kept elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

from appliance.common.audit import files
from appliance.common.audit.log import open_log
from tests.appliance.common.audit.entries import filled
from tests.appliance.operator.cli.conftest import Run


def test_an_entry_is_proven_to_others(run: Run, tmp_path: Path) -> None:
    """Export, verify, prove and verify the proof; a second export adds what is new; a changed tile and a changed proof
    are refused, and so are a number without an entry and a proof without a key."""
    log, tiles = tmp_path / "audit", tmp_path / "tiles"
    audit = open_log(log)
    audit.append([(1, filled("gap", dropped=number)) for number in range(260)])
    assert "260 entries in tiles, 260 of them new" in run("audit", "tiles", str(tiles), "--from", str(log)).stdout
    first = tmp_path / "first.checkpoint"
    first.write_bytes((tiles / "checkpoint").read_bytes())
    audit.append([(1, filled("gap", dropped=7))])
    audit.close()
    told = json.loads(run("audit", "tiles", str(tiles), "--from", str(log), "-o", "json").stdout)
    assert (told["entries"], told["added"]) == (261, 1)
    key = tmp_path / "kept.key"
    key.write_bytes((log / files.PUBLIC_KEY).read_bytes())
    verify = ("audit", "verify", "--tiles", str(tiles), "--key", str(key))
    whole = run(*verify, "--witness", str(first))
    assert whole.exit_code == 0 and "the log is whole" in whole.stdout and "1 witness" in whole.stdout
    proof = tmp_path / "260.tlog-proof"
    proof.write_text(run("audit", "prove", "260", "--tiles", str(tiles)).stdout)
    check = ("audit", "verify", "--proof", str(proof), "--key", str(key))
    shown = run(*check)
    assert shown.exit_code == 0 and '"dropped":7' in shown.stdout
    assert "entry 260 is in the log of 261 entries" in shown.stdout
    assert run(*check[:-2]).exit_code == 2
    assert "none of this number" in run("audit", "prove", "261", "--tiles", str(tiles)).stderr
    proof.write_text(proof.read_text().replace("index 260", "index 259"))
    assert run(*check).exit_code == 1
    (tiles / "tile/0/001.p/5").write_bytes(bytes(160))
    assert run(*verify).exit_code == 1
