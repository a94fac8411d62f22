"""Loading a checkpoint: names, shapes, shards, dtypes, and everything that can be wrong with them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Checklist, Home, targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.reading import read_part
from engine.model.checkpoint.registry import build_model, describe_model
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.staging import READERS, Mark, RingStaging, Staging
from engine.model.checkpoint.weights import INDEX_FILE, SINGLE_FILE, load_model, unread_model
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear, Memory
from engine.model.layers.parallel import Parallel
from tests.engine.support import model_config

CPU = torch.device("cpu")
CONFIG = model_config()


def tensors_for(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint with random content."""
    generator = torch.Generator().manual_seed(0)
    return {
        piece.name: torch.randn(piece.shape, generator=generator).to(dtype)
        for piece in describe_model(config).pieces.values()
    }


def shard(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> dict[str, str]:
    """Write tensors into several files with an index; gives the index's map."""
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(count)]
    mapping = {name: names[place % count] for place, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if mapping[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": mapping}))
    return mapping


def loaded(folder: Path, config: ModelConfig = CONFIG, dtype: str = "auto") -> dict[str, torch.Tensor]:
    """What the loader put where, by published name."""
    lists: list[Checklist] = []

    def build(*given: object) -> tuple[Decoder, Checklist]:
        model, checklist = build_model(*given)
        lists.append(checklist)
        return model, checklist

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.checkpoint.weights.build_model", build)
        load_model(str(folder), config, dtype=dtype, device=CPU, packed=False)
    return targets(lists[0].pieces.values())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_arrives(count: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """One file or several: every weight has its bytes, in the checkpoint's dtype."""
    config = model_config(attention_bias=True, mlp_bias=True)
    tensors = tensors_for(config, dtype)
    if count == 1:
        save_file(tensors, tmp_path / SINGLE_FILE)
    else:
        shard(tmp_path, tensors, count)
    found = loaded(tmp_path, config)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    """The configured dtype wins over the checkpoint's; values are rounded as torch rounds them."""
    tensors = tensors_for()
    save_file(tensors, tmp_path / SINGLE_FILE)
    found = loaded(tmp_path, dtype="bfloat16")
    assert all(torch.equal(found[name], tensors[name].to(torch.bfloat16)) for name in tensors)


def test_dtypes_may_be_mixed(tmp_path: Path) -> None:
    """Norms in float32 beside matrices in bfloat16 are converted to the embedding's dtype."""
    tensors = {name: tensor if "norm" in name else tensor.to(torch.bfloat16) for name, tensor in tensors_for().items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    found = loaded(tmp_path)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_tied_and_computable_tensors_may_be_there(tmp_path: Path) -> None:
    """A tied checkpoint that also holds its head, and old rotary buffers, load."""
    config = model_config(tie_word_embeddings=True)
    tensors = tensors_for(config)
    tensors["lm_head.weight"] = torch.zeros(97, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert "lm_head.weight" not in loaded(tmp_path, config)


def broken(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Damage a checkpoint."""
    key = "model.layers.1.mlp.up_proj.weight"
    if name == "lacks":
        del tensors[key]
    elif name == "has no use for":
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
    elif name == "has shape":
        tensors[key] = tensors[key].t().contiguous()
    elif name == "is I32":
        tensors[key] = tensors[key].int()


@pytest.mark.parametrize("name", ["lacks", "has no use for", "has shape", "is I32"])
def test_a_wrong_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Missing, extra, misshaped or of an unsupported dtype: the message says which tensor and what."""
    tensors = tensors_for()
    broken(name, tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError, match=name) as caught:
        loaded(tmp_path)
    assert "mlp.up_proj.weight" in str(caught.value)


def test_nothing_is_allocated_for_a_description_that_the_files_do_not_fill(tmp_path: Path) -> None:
    """A configuration that asks for terabytes beside a small file is refused by its shapes."""
    save_file(tensors_for(), tmp_path / SINGLE_FILE)
    with pytest.raises(ModelLoadError):
        loaded(tmp_path, model_config(hidden_size=65_536, intermediate_size=1 << 18, num_layers=2))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of two tensors of one name counts is not guessed."""
    mapping = shard(tmp_path, tensors_for(), 2)
    first, second = sorted(set(mapping.values()))
    extra = next(name for name, file in mapping.items() if file == first)
    content = {name: tensor for name, tensor in tensors_for().items() if mapping[name] == second}
    save_file({**content, extra: tensors_for()[extra]}, tmp_path / second)
    with pytest.raises(ModelLoadError, match="is in both"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd.safetensors",
        "a/b.safetensors",
        "model.bin",
        ".safetensors",
        "",
        5,
        None,
        "a\\b.safetensors",
        "\x00.safetensors",
        "x" * 300 + ".safetensors",
        "..safetensors",
    ],
)
def test_the_index_may_name_plain_files_only(name: object, tmp_path: Path) -> None:
    """A file name with a path in it, or of another kind, is refused before anything is opened."""
    outside = tmp_path / "outside"
    outside.mkdir()
    save_file(tensors_for(), tmp_path / SINGLE_FILE)
    (outside / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelLoadError, match="plain name"):
        loaded(outside)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 100_000])
def test_a_malformed_index_is_refused(content: str, tmp_path: Path) -> None:
    """An index that is no index is a load error."""
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(ModelLoadError, match="index"):
        loaded(tmp_path)


def test_packing_changes_no_result(tmp_path: Path) -> None:
    """Packed and stored forms of the matrices give the same products, in every dtype and for few and many rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = Linear.empty(32, 96, bias=False, memory=Memory(dtype, CPU))
        packed = Linear.empty(32, 96, bias=False, memory=Memory(dtype, CPU))
        plain.loaded.copy_(torch.randn(plain.loaded.shape, generator=torch.Generator().manual_seed(1)))
        packed.loaded.copy_(plain.loaded)
        packed.pack()
        for rows in (1, 3, 33):
            x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(dtype)
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            assert torch.allclose(packed(x), plain(x), atol=tolerance, rtol=tolerance)


class LateDevice:
    """Copies that are made as late as they may: when the mark behind them is waited for."""

    def __init__(self, *, careless: bool = False) -> None:
        """``careless``: a wait for a mark does nothing; copies are made by ``end``."""
        self._started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._careless = careless

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy."""
        self._started.append((target, source))

    def end(self) -> None:
        """Make the copies."""
        for target, source in self._started:
            target.copy_(source)
        self._started.clear()

    def marks(self, count: int) -> list[Mark]:
        """Marks of its queue."""
        return [LateMark(self, careless=self._careless) for _ in range(count)]


class LateMark:
    """A mark in such a device's queue."""

    def __init__(self, device: LateDevice, *, careless: bool) -> None:
        self._device, self._careless = device, careless

    def record(self) -> None:
        """Mark the end of all that was started."""

    def wait(self) -> None:
        """Make the copies up to it, and those behind."""
        if not self._careless:
            self._device.end()


@pytest.mark.parametrize("careless", [False, True])
def test_a_place_is_read_into_again_only_when_its_copy_is_over(*, careless: bool, tmp_path: Path) -> None:
    """A hundred stretches through three places arrive where each copy is made as late as it may be; where copies are
    not waited for they do not."""
    whole = torch.arange(100 * 64, dtype=torch.float32).view(100, 64)
    save_file({"t": whole}, tmp_path / SINGLE_FILE)
    device, target = LateDevice(careless=careless), torch.zeros(100, 64, dtype=torch.float64)
    with SafetensorsFile(tmp_path / SINGLE_FILE) as file, ThreadPoolExecutor(2) as pool:
        ring = RingStaging(pool, torch.empty(3 * 256, dtype=torch.uint8), device.marks(3), device.copy)
        read_part(file, "t", Home(((0, 100), (0, 64)), target), ring)
        ring.finish()
        device.end()
        assert torch.equal(target, whole.double()) is not careless
        assert ring.times.carried_bytes == whole.nbytes
        ring.close()


def test_a_ring_tells_of_a_number_that_is_not_finite_and_of_a_file_that_ends(tmp_path: Path) -> None:
    """The first is told at the end, by the tensor's name; the second when its stretch is waited for, and the ring can
    be closed then though more was under way."""
    good, bad = torch.ones(8, 4), torch.full((8, 4), torch.inf)
    save_file({"bad": bad, "good": good}, tmp_path / SINGLE_FILE)
    homes = {name: Home(((0, 8), (0, 4)), torch.zeros(8, 4, dtype=torch.bfloat16)) for name in ("good", "bad")}
    device = LateDevice()
    with SafetensorsFile(tmp_path / SINGLE_FILE) as file, ThreadPoolExecutor(2) as pool:

        def ring() -> RingStaging:
            return RingStaging(
                pool, torch.empty(2 * 32, dtype=torch.uint8), device.marks(2), lambda to, of: to.copy_(of)
            )

        first = ring()
        for name, home in homes.items():
            read_part(file, name, home, first)
            first.check(name, home.target)
        with pytest.raises(ModelLoadError, match="tensor bad holds a number that is not finite"):
            first.finish()
        first.close()
        (tmp_path / SINGLE_FILE).write_bytes((tmp_path / SINGLE_FILE).read_bytes()[:-100])
        second = ring()
        with pytest.raises(ModelLoadError, match="ends early"):
            for name, home in homes.items():
                read_part(file, name, home, second)
            second.finish()
        second.close()


def test_a_whole_model_through_a_ring_is_that_of_one_buffer(tmp_path: Path) -> None:
    """Every tensor of a model that is converted while it is read has the same numbers by both ways, with few places for
    many tensors and copies that end late."""
    save_file(tensors_for(), tmp_path / SINGLE_FILE)
    device, models = LateDevice(), []
    with ThreadPoolExecutor(3) as pool:
        ring = RingStaging(pool, torch.empty(4 * 1_024, dtype=torch.uint8), device.marks(4), device.copy)
        for staging in (None, ring):
            with unread_model(str(tmp_path), CONFIG, dtype="bfloat16", device=CPU) as unread:
                unread.fill(staging=staging)
                models.append(targets(unread.checklist.pieces.values()))
        ring.close()
    for name, target in models[0].items():
        assert torch.equal(target, models[1][name]) and bool(target.any()), name


SHAPES = [(7,), (6, 10), (5, 4, 6), (3, 2, 4, 5)]


@pytest.mark.parametrize("staging", [1, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_part_is_read_into_any_view(
    shape: tuple[int, ...], dtype: torch.dtype, staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of every dimension arrive in contiguous, transposed and strided memory, however small the buffer is: a new
    one, one that all share and several threads read into, or a ring, whose copies end late."""
    monkeypatch.setattr("engine.model.checkpoint.staging.STAGING_BYTES", staging)
    monkeypatch.setattr("engine.model.checkpoint.staging.LEAST_SHARED", 9)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator).to(dtype)
    save_file({"t": whole}, tmp_path / SINGLE_FILE)
    with SafetensorsFile(tmp_path / SINGLE_FILE) as file, ThreadPoolExecutor(READERS) as pool:
        device = LateDevice()
        ring = RingStaging(pool, torch.empty(3 * max(staging, 4), dtype=torch.uint8), device.marks(3), device.copy)
        shared = Staging(pool)
        for cut in range(len(shape)):
            for low, high in ((0, 1), (1, shape[cut]), (0, shape[cut]), (1, 1)):
                part = tuple((low, high) if axis == cut else (0, size) for axis, size in enumerate(shape))
                expected = whole[tuple(slice(*span) for span in part)]
                size = expected.shape
                views = [
                    torch.full(size, torch.nan),
                    torch.full((*size, 2), torch.nan)[..., 1],
                    torch.full(size[::-1], torch.nan).permute(*reversed(range(len(size)))),
                    torch.full(size, torch.nan, dtype=torch.bfloat16),
                ]
                for target, stage in product(views, (None, shared, ring)):
                    target.fill_(torch.nan)
                    read_part(file, "t", Home(part, target), stage)
                    ring.finish()
                    assert torch.equal(target, expected.to(target.dtype)), (part, target.stride())


def test_a_rank_reads_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks read the bytes of maps cut by outputs once between them; one rank alone reads all of them."""
    config = model_config(tie_word_embeddings=True)
    tensors = tensors_for(config)
    save_file(tensors, tmp_path / SINGLE_FILE)
    counts: dict[tuple[int, str], int] = {}
    read = SafetensorsFile.read_stretch
    rank = [0]

    def counted(self: SafetensorsFile, name: str, offset: int, target: memoryview) -> None:
        counts[rank[0], name] = counts.get((rank[0], name), 0) + target.nbytes
        read(self, name, offset, target)

    monkeypatch.setattr(SafetensorsFile, "read_stretch", counted)
    for rank[0] in (0, 1):
        parallel = Parallel(rank=rank[0], size=2)
        load_model(str(tmp_path), config, dtype="auto", device=CPU, packed=False, parallel=parallel)
    for name, tensor in tensors.items():
        read_bytes = counts[0, name] + counts[1, name]
        whole = "norm" in name or "o_proj" in name or "down_proj" in name
        assert read_bytes == tensor.nbytes * (2 if whole else 1), name


def test_every_rank_refuses_what_one_would(tmp_path: Path) -> None:
    """A stage of the pipeline, or a rank, checks the whole checkpoint, not only what it reads."""
    tensors = tensors_for()
    broken("has shape", tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    for parallel in (Parallel(layers=(0, 1)), Parallel(rank=1, size=2)):
        with pytest.raises(ModelLoadError, match="up_proj"):
            load_model(str(tmp_path), CONFIG, dtype="auto", device=CPU, parallel=parallel)
