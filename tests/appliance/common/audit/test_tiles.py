"""Tiles and proofs: against another implementation, against published vectors, and against changes of every file."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from appliance.common.audit import files
from appliance.common.audit.checkpoint import CheckpointError, Verifier
from appliance.common.audit.cosignature import Witness, cosign, parse_witness, read_cosignatures
from appliance.common.audit.files import SIGNING_KEY
from appliance.common.audit.log import AuditLog, open_log
from appliance.common.audit.merkle import Tree, leaf_hash
from appliance.common.audit.proof_file import read_proof, write_proof
from appliance.common.audit.proofs import (
    SubtreeHash,
    consistent,
    includes,
    prove_consistency,
    prove_inclusion,
    tree_hash,
)
from appliance.common.audit.tiles import CHECKPOINT, TileReader, tile_name
from appliance.common.audit.verify_tiles import verify_tiles
from appliance.common.errors import ConfigError
from appliance.operator.tile_export import export_tiles
from isolation.keys.signing import key_of
from tests.appliance.common.audit import other_tree
from tests.appliance.common.audit.entries import filled
from tests.appliance.common.audit.test_statement import mutated

WITNESS_KEY = key_of(bytes(range(32)))
WITNESS = Witness("witness.example.org/w1", WITNESS_KEY.public)


def grow(log: AuditLog, count: int) -> None:
    """Append entries, with one checkpoint."""
    log.append([(1, filled("gap", "short", dropped=number)) for number in range(count)])


def exported(tmp_path: Path, size: int) -> tuple[AuditLog, Path]:
    """A log of ``size`` entries, and its tiles."""
    log = open_log(tmp_path / "audit")
    grow(log, size)
    export_tiles(tmp_path / "audit", tmp_path / "tiles")
    return log, tmp_path / "tiles"


def leaf_tree(leaves: list[bytes]) -> SubtreeHash:
    """Hashes of perfect subtrees of leaves."""
    return lambda height, index: other_tree.mth(leaves[index << height : (index + 1) << height])


def test_proofs_are_those_of_another_implementation() -> None:
    """All proofs of all trees of up to 33 entries: equal, and each holds; for another entry, size, root or with a hash
    missing or added it does not."""
    leaves = [leaf_hash(bytes([number])) for number in range(33)]
    at = leaf_tree(leaves)
    for size in range(1, 34):
        root = other_tree.mth(leaves[:size])
        assert tree_hash(0, size, at) == root
        for index in range(size):
            proof = prove_inclusion(index, size, at)
            assert proof == other_tree.path_of(index, leaves[:size])
            assert includes(index, size, leaves[index], proof, root)
            assert not includes(index, size, leaves[index - 1], proof, root) or size == 1
            assert not includes(index, size, leaves[index], [*proof, root], root)
            assert not proof or not includes(index, size, leaves[index], proof[:-1], root)
        for old in range(1, size + 1):
            earlier, proof = other_tree.mth(leaves[:old]), prove_consistency(old, size, at)
            assert proof == other_tree.proof_of(old, leaves[:size])
            assert consistent(old, size, earlier, root, proof) and other_tree.continues(old, size, earlier, root, proof)
            assert not consistent(old, size, leaf_hash(b""), root, proof)
            assert not consistent(old, size, earlier, leaf_hash(b""), proof)
            assert not consistent(old, size, earlier, root, [*proof, root])
            assert not proof or not consistent(old, size, earlier, root, proof[1:])
    assert consistent(0, 9, Tree().root(), leaves[0], []) and not consistent(0, 9, leaves[1], leaves[0], [])
    assert not consistent(3, 2, leaves[1], leaves[0], [])


LEAVES = (*("", "00", "10", "2021", "3031", "40414243", "5051525354555657"), "606162636465666768696a6b6c6d6e6f")
"""Entries of the tree that Certificate Transparency's reference implementation is tested with, in hex."""

EIGHT = "XcnaeacGWamtVZy3Ad7ZoqudgjqtL0lgz+Nw7/RgQyg="
"""Published root of that tree."""

CONSISTENCY = (
    (1, 8, "bjQLnP+zepicpUTmu3gKLHiQHT+zNzh2hRGjBhevoB0=", EIGHT, 3),
    (6, 8, "duZ9rbzfHhDht03cYIq9L5jfsW+851J3tSMqEn8gh+8=", EIGHT, 3),
    (2, 5, "+sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU=", "Tju7H3tHjc/nH7YxYxUZo7yhLJrvyhYSv85ME6hiZNQ=", 2),
)
"""Sizes, published roots and lengths of proofs; hashes of the proofs are in ``HASHES``."""

INCLUSION = ((0, 8, EIGHT), (5, 8, EIGHT), (2, 3, "rra8/idLcKFPsGel5VeCZNsPqbUa9eC6FZFY8yngbnc="))
"""Places, sizes and published roots."""

HASHES = {
    (1, 8): (
        "lqKW0iTyhcZ77pPDD4owkVfw2qNdxbh+QQt4YwoJz8c=",
        "Xwg/ChozygdqlSeYMlgNs+DvRYS9/x9UyKNg9Q3jAx4=",
        "a0eq8p7jwq+a+Im8H7klTavTEXfxYjLdaqsDXKOb9uQ=",
    ),
    (6, 8): (
        "DrxdNDf74tsVi58Sah0RjjCBgQMdCpSfje3t68VY72o=",
        "yoVOoSjtBQtBs1/8G4e46yveRh6eO1WW7Oa51ZdaCuA=",
        "037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=",
    ),
    (2, 5): ("Xwg/ChozygdqlSeYMlgNs+DvRYS9/x9UyKNg9Q3jAx4=", "vBoGQ7EuTS18d5GPROD095qDi2z57FtcKD4fTYhZnms="),
    (5, 8, "included"): (
        "vBoGQ7EuTS18d5GPROD095qDi2z57FtcKD4fTYhZnms=",
        "yoVOoSjtBQtBs1/8G4e46yveRh6eO1WW7Oa51ZdaCuA=",
        "037kGJdt2VdTwcc4Yrk5j6Kiz5tP8P3+izDNlSCWFLc=",
    ),
    (2, 3, "included"): ("+sVCA+fMaWzw38tCySodnbr3CtnmIfS9jZhmLwDjwSU=",),
    (0, 8, "included"): (
        "lqKW0iTyhcZ77pPDD4owkVfw2qNdxbh+QQt4YwoJz8c=",
        "Xwg/ChozygdqlSeYMlgNs+DvRYS9/x9UyKNg9Q3jAx4=",
        "a0eq8p7jwq+a+Im8H7klTavTEXfxYjLdaqsDXKOb9uQ=",
    ),
}
"""Published proofs, the lowest hash first."""


def decoded(texts: tuple[str, ...]) -> list[bytes]:
    """Bytes of base64 texts."""
    return [base64.b64decode(one) for one in texts]


def test_published_vectors() -> None:
    """Test vectors of github.com/transparency-dev/merkle (testdata/consistency and testdata/inclusion, the happy paths
    1 to 3): roots and proofs are made and verified as published; with one bit of a proof turned none holds."""
    leaves = [leaf_hash(bytes.fromhex(one)) for one in LEAVES]
    at = leaf_tree(leaves)
    for old, new, *texts, count in CONSISTENCY:
        roots, proof = decoded(tuple(texts)), decoded(HASHES[old, new])
        assert [tree_hash(0, size, at) for size in (old, new)] == roots
        assert prove_consistency(old, new, at) == proof and len(proof) == count
        assert consistent(old, new, roots[0], roots[1], proof)
        assert not any(consistent(old, new, roots[0], roots[1], one) for one in turned(proof))
    for index, size, root in INCLUSION:
        proof = decoded(HASHES[index, size, "included"])
        assert prove_inclusion(index, size, at) == proof
        assert includes(index, size, leaves[index], proof, *decoded((root,)))
        assert not any(includes(index, size, leaves[index], one, *decoded((root,))) for one in turned(proof))


def turned(proof: list[bytes]) -> Iterator[list[bytes]]:
    """The proof with one bit of one hash turned."""
    for place, one in enumerate(proof):
        yield [*proof[:place], bytes([one[0] ^ 16]) + one[1:], *proof[place + 1 :]]


def test_the_published_cosignature_has_its_parts() -> None:
    """The example of C2SP tlog-cosignature: its base64 has a key's mark, a time and a signature, as they are read here.
    (Its public key is not published, so the signature is not checked.)"""
    line = "jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA=="
    data = base64.b64decode(line)
    assert (len(data), int.from_bytes(data[4:12], "big")) == (4 + 8 + 64, 1_679_315_147)


def test_names_of_tiles_are_those_of_the_specification() -> None:
    """The example of C2SP tlog-tiles, and the partial tiles of a tree of 70,000 entries."""
    assert tile_name(0, 1_234_067) == "tile/0/x001/x234/067" == other_tree.name_of("0", 1_234_067)
    assert tile_name(0, 273, 112) == "tile/0/273.p/112"
    assert tile_name("entries", 0) == "tile/entries/000"


@pytest.mark.parametrize("sizes", [(1, 2, 255), (256, 257, 511, 512), (300, 300, 700)])
def test_an_export_grows_with_its_log(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """After each export the tiles are those of another implementation and verify, with every earlier checkpoint as a
    witness; an export without news changes nothing; full tiles keep their bytes."""
    log = open_log(tmp_path / "audit")
    kept, unchanged = [], {}
    for size in sizes:
        if size > log.size:
            grow(log, size - log.size)
        done = export_tiles(tmp_path / "audit", tmp_path / "tiles")
        assert (done.size, done.log) == (size, log.name)
        text = (tmp_path / "tiles" / CHECKPOINT).read_text()
        kept.append(text)
        assert other_tree.open_note(text, log.verifier.line()) == (
            log.name,
            size,
            other_tree.mth(other_tree.leaves_in(tmp_path / "tiles", size)),
        )
        report, cosigned = verify_tiles(tmp_path / "tiles", log.verifier, (), kept)
        assert (report.problems, report.entries, report.witnesses, cosigned) == ([], size, len(kept), [])
        assert all(path.read_bytes() == data for path, data in unchanged.items())
        full = (path for path in (tmp_path / "tiles/tile").rglob("???") if path.is_file() and ".p/" not in str(path))
        unchanged = {path: path.read_bytes() for path in full}
    assert export_tiles(tmp_path / "audit", tmp_path / "tiles").added == 0
    log.close()


@pytest.mark.full
def test_a_tree_of_three_levels(tmp_path: Path) -> None:
    """65,600 entries: tiles of three levels, proofs of entries and of older trees from them, all as another
    implementation has them."""
    log = open_log(tmp_path / "audit")
    grow(log, 1_000)
    export_tiles(tmp_path / "audit", tmp_path / "tiles")
    grow(log, 64_600)
    export_tiles(tmp_path / "audit", tmp_path / "tiles")
    leaves = other_tree.leaves_in(tmp_path / "tiles", 65_600)
    assert (tmp_path / "tiles" / "tile/2/000.p/1").read_bytes() == other_tree.mth(leaves[:65_536])
    reader = TileReader(tmp_path / "tiles", 65_600)
    for index in (0, 255, 256, 65_535, 65_536, 65_599):
        assert prove_inclusion(index, 65_600, reader.subtree) == other_tree.path_of(index, leaves)
    for old in (1, 256, 1_000, 65_536, 65_599):
        assert prove_consistency(old, 65_600, reader.subtree) == other_tree.proof_of(old, leaves)
    log.close()


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    """Another log's folder, an older copy of the log, changed tiles and a changed log: nothing is written over."""
    log, folder = exported(tmp_path, 300)
    log.close()
    before = (folder / CHECKPOINT).read_bytes()
    other = open_log(tmp_path / "other")
    grow(other, 1)
    with pytest.raises(ConfigError, match="another folder"):
        export_tiles(tmp_path / "other", folder)
    shutil.copytree(tmp_path / "audit", tmp_path / "older")
    log = open_log(tmp_path / "audit")
    grow(log, 300)
    export_tiles(tmp_path / "audit", folder)
    with pytest.raises(ConfigError, match="older copy"):
        export_tiles(tmp_path / "older", folder)
    segment = files.segment_paths(tmp_path / "audit")[0]
    segment.write_bytes(
        segment.read_bytes().replace(b'"dropped":7,', b'"dropped":8,').replace(b'"dropped":7}', b'"dropped":8}')
    )
    with pytest.raises(ConfigError, match="other entries"):
        export_tiles(tmp_path / "audit", tmp_path / "new")
    assert not (tmp_path / "new" / CHECKPOINT).exists()
    (folder / "tile/1/000.p/2").write_bytes(bytes(64))
    with pytest.raises(ConfigError, match="not those of their checkpoint"):
        export_tiles(tmp_path / "audit", folder)
    assert (folder / CHECKPOINT).read_bytes() != before
    log.close()
    other.close()


def test_a_proof_shows_one_entry(tmp_path: Path) -> None:
    """A proof file of an entry verifies by the public key, with the witness's cosignature; another log's key, another
    place and another witness are told."""
    log, folder = exported(tmp_path, 300)
    note = (folder / CHECKPOINT).read_text()
    note += cosign(note, WITNESS, WITNESS_KEY, 7)
    reader = TileReader(folder, 300)
    text = write_proof(reader.entries(1)[10], 266, prove_inclusion(266, 300, reader.subtree), note)
    proven = read_proof(text, log.verifier, [WITNESS])
    assert (proven.index, json.loads(proven.entry)["n"], proven.cosigned[0].time) == (266, 266, 7)
    with pytest.raises(CheckpointError, match="no witness that is known"):
        read_proof(text, log.verifier)
    with pytest.raises(CheckpointError, match="is missing"):
        read_proof(text.removesuffix(text.splitlines(keepends=True)[-1]), log.verifier, [WITNESS])
    with pytest.raises(CheckpointError, match="is another"):
        read_proof(text.replace("index 266", "index 265"), log.verifier, [WITNESS])
    with pytest.raises(CheckpointError, match="of the log"):
        read_proof(text, Verifier("other", log.verifier.public), [WITNESS])
    log.close()


def test_cosignatures_are_those_of_another_implementation() -> None:
    """A cosignature opens by the other implementation with the witness's key line; the same witness twice, an unknown
    one and a time that was changed are refused."""
    note = (
        "athanor.audit/1\n1\n" + base64.b64encode(sha256(b"").digest()).decode() + "\n\n\u2014 athanor.audit/1 AAAA\n"
    )
    line = cosign(note, WITNESS, WITNESS_KEY, 1_679_315_147)
    assert parse_witness(WITNESS.line()) == WITNESS
    assert other_tree.open_note(note + line, WITNESS.line())[1] == 1
    assert read_cosignatures(note + line, [WITNESS])[0].time == 1_679_315_147
    for wrong in (
        line + line,
        line.replace("w1", "w2"),
        cosign(note + "x", WITNESS, WITNESS_KEY, 1)[:-9] + "AAAAAAA=\n",
    ):
        with pytest.raises(CheckpointError):
            read_cosignatures(note + wrong, [WITNESS])


def test_an_export_needs_the_log_and_its_public_key_alone(tmp_path: Path) -> None:
    """The unit that asks witnesses sees neither what signs the log, nor keys of pseudonyms, nor the usage book."""
    log = open_log(tmp_path / "audit")
    grow(log, 300)
    log.close()
    shown = tmp_path / "shown"
    shown.mkdir()
    for path in (tmp_path / "audit").iterdir():
        if path.is_file() and path.name != SIGNING_KEY:
            (shown / path.name).write_bytes(path.read_bytes())
    assert (tmp_path / "audit" / SIGNING_KEY).exists() and export_tiles(shown, tmp_path / "tiles").size == 300
    assert verify_tiles(tmp_path / "tiles", log.verifier)[0].sound


def overwrite(path: Path, data: bytes) -> None:
    """Give a file that content without truncating it first: file systems flush what is written after that, and a
    hundred thousand times is minutes of waiting."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def detects(tmp_path: Path, count: int, seed: int) -> int:
    """Change a byte or more of one file of tiles, of the checkpoint with its cosignature, or of a proof, ``count``
    times; returns how many changes were not detected."""
    log, folder = exported(tmp_path, 270)
    note = (folder / CHECKPOINT).read_text()
    (folder / CHECKPOINT).write_text(note := note + cosign(note, WITNESS, WITNESS_KEY, 1_800_000_000))
    reader, chance = TileReader(folder, 270), random.Random(seed)
    proof = write_proof(reader.entries(1)[3], 259, prove_inclusion(259, 270, reader.subtree), note).encode()
    report, cosigned = verify_tiles(folder, log.verifier, [WITNESS])
    assert report.sound and len(cosigned) == 1 and read_proof(proof.decode(), log.verifier, [WITNESS]).index == 259
    paths = [
        CHECKPOINT,
        *sorted(str(path.relative_to(folder)) for path in (folder / "tile").rglob("*") if path.is_file()),
    ]
    missed, kinds = 0, Counter[str]()
    for number in range(count):
        if number % 2:
            while (changed := mutated(proof, chance)) == proof:
                pass
            kinds["proof"] += 1
            try:
                read_proof(changed.decode("utf-8", "replace"), log.verifier, [WITNESS])
                missed += 1
            except CheckpointError:
                pass
            continue
        # Half of the others change the smallest and most precious file.
        path = folder / (CHECKPOINT if number % 4 else chance.choice(paths))
        data = path.read_bytes()
        while (changed := mutated(data, chance)) == data:
            pass
        overwrite(path, changed)
        found, _ = verify_tiles(folder, log.verifier, [WITNESS])
        missed += found.sound
        overwrite(path, data)
        kinds["checkpoint and cosignature" if path.name == CHECKPOINT else "tiles"] += 1
    log.close()
    print(f"{missed} of {count} changes missed:", dict(kinds))
    return missed


def test_changes_of_tiles_checkpoints_cosignatures_and_proofs_are_detected(tmp_path: Path) -> None:
    """A few hundred of the changes that the count in full makes."""
    assert detects(tmp_path, 200, 1) == 0


@pytest.mark.full
def test_every_change_of_tiles_checkpoints_cosignatures_and_proofs_is_detected(tmp_path: Path) -> None:
    """A hundred thousand changes, and none that is not detected."""
    assert detects(tmp_path, 100_000, 2) == 0
