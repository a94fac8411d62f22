"""Witnesses: a real one over HTTP in a process of its own, one by a folder, and what refusals come to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.common.audit.cosignature import Witness, cosign, read_cosignatures
from appliance.common.audit.log import AuditLog, open_log
from appliance.common.audit.tiles import CHECKPOINT
from appliance.common.audit.verify_tiles import verify_tiles
from appliance.common.audit.witnessing import WitnessState, read_states, stale, states_file
from appliance.operator.tile_export import export_tiles
from appliance.operator.witnesses import Asked, NoAnswerError, ask_witnesses, post_by_program
from isolation.keys.signing import key_of
from tests.appliance.common.audit.entries import filled

SEED = bytes(range(32))
KEY = key_of(SEED)
WITNESS = Witness("witness.example.org/w1", KEY.public)
ROOT = Path(__file__).parents[3]


@dataclass
class Scene:
    """A log, its tiles, and a witness that runs."""

    log: AuditLog
    tiles: Path
    asked: Asked

    def grow(self, count: int) -> int:
        """Append entries and export them; gives the log's size."""
        self.log.append([(1, filled("gap")) for _ in range(count)])
        return export_tiles(self.log.directory, self.tiles).size


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A witness that knows this log."""
    log = open_log(tmp_path / "audit")
    argv = [sys.executable, "-m", "tests.appliance.operator.witness_server"]
    argv += [f"{log.name}={log.verifier.line()}", WITNESS.name, SEED.hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        yield Scene(log, tmp_path / "tiles", Asked(WITNESS, url))
        child.kill()
    log.close()


def test_a_witness_cosigns_a_log_that_grows(scene: Scene) -> None:
    """First over everything, then with proofs from what it saw, once more without news, and after what is known of it
    was lost, from the size that it names: its cosignature is below the checkpoint and verifies."""
    for count in (300, 1, 700, 0):
        size = scene.grow(count)
        (state,) = ask_witnesses(scene.tiles, [scene.asked])
        assert (state.size, state.problem) == (size, "")
        report, (cosigned,) = verify_tiles(scene.tiles, scene.log.verifier, [WITNESS])
        assert report.sound and cosigned.time == state.time
    states_file(scene.tiles).unlink()
    assert ask_witnesses(scene.tiles, [scene.asked])[0].size == scene.grow(0)
    assert stale(read_states(scene.tiles), [WITNESS.name], cosigned.time, 3_600) == []


def test_another_history_is_refused_and_told(scene: Scene, tmp_path: Path) -> None:
    """The holder of the log's key writes its last part anew: the witness refuses, and nothing of the checkpoint passes
    for cosigned. So with a log that lost its end. Control: the true log is cosigned afterwards."""
    scene.grow(10)
    shutil.copytree(scene.log.directory, tmp_path / "forged" / "audit")
    scene.grow(10)
    assert ask_witnesses(scene.tiles, [scene.asked])[0].problem == ""
    forged = open_log(tmp_path / "forged" / "audit")
    export_tiles(forged.directory, tmp_path / "forged/tiles")
    (state,) = ask_witnesses(tmp_path / "forged/tiles", [scene.asked])
    assert state.problem == "it has seen a tree of 20 entries, and this log has 10"
    for _ in range(2):
        forged.append([(2, filled("gap")) for _ in range(10)])
        export_tiles(forged.directory, tmp_path / "forged/tiles")
        (state,) = ask_witnesses(tmp_path / "forged/tiles", [scene.asked])
        assert state.problem in ("it has cosigned another tree of this size", MEANS_422)
        assert read_cosignatures((tmp_path / "forged/tiles" / CHECKPOINT).read_text(), []) == []
        assert "did not cosign" in stale(read_states(tmp_path / "forged/tiles"), [WITNESS.name], 0, 1)[0]
    forged.close()
    scene.grow(1)
    assert ask_witnesses(scene.tiles, [scene.asked])[0].problem == ""


MEANS_422 = "it says that the tree does not continue the one that it has cosigned"


def test_one_that_is_away_keeps_none_from_the_others(scene: Scene) -> None:
    """An address where nothing answers, one where something else does, and a witness that signs with another key: each
    is told, and the one that works has cosigned."""
    scene.grow(3)
    away = Asked(Witness("away", KEY.public), "http://127.0.0.1:9")
    other = Asked(Witness("other", KEY.public), scene.asked.url + "/nothing")
    fake = Asked(Witness(WITNESS.name + "x", key_of(bytes(32)).public), scene.asked.url)
    states = {one.name: one for one in ask_witnesses(scene.tiles, [away, other, fake, scene.asked], lambda: 5.0e9)}
    assert "cannot be reached" in states["away"].problem
    assert states["other"].problem == "it does not know the log"
    assert "another key" in states[WITNESS.name + "x"].problem
    assert states[WITNESS.name].problem == ""
    assert verify_tiles(scene.tiles, scene.log.verifier, [WITNESS])[0].sound
    told = stale(read_states(scene.tiles), [*states, "new"], 5.0e9, 3_600)
    assert len(told) == 5 and "has never cosigned" in told[-1] and "has not cosigned for" in told[-2]


def test_a_witness_by_a_folder(tmp_path: Path) -> None:
    """A request lies in the folder, and what is put beside it counts at the next call, also when the log has grown
    meanwhile; half a response and another's are told."""
    log, folder, tiles = open_log(tmp_path / "audit"), tmp_path / "exchange", tmp_path / "tiles"
    asked = Asked(WITNESS, folder=folder)

    def step(count: int) -> WitnessState:
        log.append([(1, filled("gap")) for _ in range(count)])
        export_tiles(log.directory, tiles)
        return ask_witnesses(tiles, [asked], lambda: 2.0e9)[0]

    assert step(5).size == 0
    note = (folder / "request").read_text().partition("\n\n")[2]
    (folder / "response").write_text(cosign(note, WITNESS, KEY, 1_999_999_999))
    assert (step(2).size, read_states(tiles)[WITNESS.name].time) == (5, 1_999_999_999)
    assert (folder / "request").read_text().startswith("old 5\n") and not (folder / "response").exists()
    (folder / "response").write_text("3\n")
    assert (step(0).size, step(0).problem) == (3, "")
    assert (folder / "request").read_text().startswith("old 3\n")
    (folder / "response").write_text(cosign(note, WITNESS, KEY, 1_999_999_999))
    assert "does not hold" in step(0).problem
    request = (folder / "request").read_text()
    (folder / "response").write_text(cosign(request.partition("\n\n")[2], WITNESS, KEY, 2_000_000_000))
    assert step(0).size == 7
    assert verify_tiles(tiles, log.verifier, [WITNESS])[0].sound
    log.close()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://user@127.0.0.1/", "http:///x", "https://127.0.0.1:9/"])
def test_the_poster_says_why_there_is_no_answer(url: str) -> None:
    """Its problem comes back as a sentence; it never ends the caller."""
    with pytest.raises(NoAnswerError):
        post_by_program(url, "x")
