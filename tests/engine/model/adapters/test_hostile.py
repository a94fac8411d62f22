"""Adapter folders that are wrong: each is refused with a typed error that names the fault, and the engine serves on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.offline import generate
from engine.errors import AdapterLoadError
from engine.model.adapters.bank import AdapterBank, AdapterSource
from engine.model.adapters.files import CONFIG_FILE, TENSOR_FILE, Sites, open_adapter, read_factors
from isolation.ipc.messages import FailureCode
from tests.engine.model.adapters.samples import KINDS, engine_with, save_adapter, save_base
from tests.engine.support import model_config, random_model, submit

MUTATIONS = 400
"""Damaged files in the quick suite; ``full`` has fifty times as many."""

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base model and an adapter that can be used."""
    folder = tmp_path_factory.mktemp("sound")
    save_base(folder / "base")
    save_adapter(folder / "base", folder / "adapter", **KINDS["r16"])
    return folder


@pytest.fixture(scope="module")
def sites() -> Sites:
    """What adapters may change in a model of that shape."""
    return random_model(model_config(intermediate_size=57), packed=False).sites


def config_with(**changes: Any) -> Callable[[Path], None]:
    """Change keys of the description."""

    def change(folder: Path) -> None:
        path = folder / CONFIG_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors_with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / TENSOR_FILE)
        change(tensors)
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / TENSOR_FILE)

    return apply


def instead(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    """Put another tensor in the place of one, or add it."""
    return tensors_with(lambda tensors: tensors.update({name: value}))


def spoiled(value: float) -> Callable[[Path], None]:
    """Put a number into one tensor that is not finite."""
    return tensors_with(lambda tensors: tensors[FIRST].view(-1).__setitem__(3, value))


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank 0": (config_with(r=0), "r must be an integer from 1 to 256"),
    "rank 100,000": (config_with(r=100_000), "r must be an integer from 1 to 256"),
    "rank as text": (config_with(r="16"), "r must be an integer"),
    "no rank": (config_with(r=None), "r must be an integer"),
    "rank of other tensors": (config_with(r=8), "has the shape"),
    "alpha 0": (config_with(lora_alpha=0), "must be above 0"),
    "alpha below 0": (config_with(lora_alpha=-4), "lora_alpha must be a number"),
    "alpha NaN": (config_with(lora_alpha=float("nan")), CONFIG_FILE),
    "alpha infinite": (config_with(lora_alpha=float("inf")), CONFIG_FILE),
    "another method": (config_with(peft_type="IA3"), "peft_type must be one of LORA"),
    "another task": (config_with(task_type="SEQ_CLS"), "task_type must be one of CAUSAL_LM"),
    "DoRA": (config_with(use_dora=True), "use_dora is not supported: DoRA"),
    "modules_to_save": (config_with(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    "biases": (config_with(bias="all"), "bias must be one of none"),
    "own biases": (config_with(lora_bias=True), "lora_bias is not supported"),
    "changed base": (config_with(init_lora_weights="pissa"), "changes the base model"),
    "tokens": (config_with(trainable_token_indices=[3]), "trainable_token_indices is not supported"),
    "repeated layers": (config_with(layer_replication=[[0, 2], [1, 2]]), "layer_replication is not supported"),
    "transposed": (config_with(fan_in_fan_out=True), "'fan_in_fan_out' is not known"),
    "unknown key": (config_with(use_something_new=1), "'use_something_new' is not known"),
    "unknown key with zero": (config_with(use_something_new=0), "'use_something_new' is not known"),
    "expression": (config_with(rank_pattern={"(a+)+$": 4}), "expressions are not evaluated"),
    "rank of a pattern": (config_with(rank_pattern={"q_proj": 1_000_000}), "must be an integer from 1 to 256"),
    "many patterns": (config_with(alpha_pattern={f"m{n}": 1 for n in range(5_000)}), "more than 4096 entries"),
    "description is a list": (lambda folder: (folder / CONFIG_FILE).write_text("[]"), "not a JSON object"),
    "description is deep": (lambda folder: (folder / CONFIG_FILE).write_text("[" * 100_000), CONFIG_FILE),
    "description is large": (lambda folder: (folder / CONFIG_FILE).write_text(" " * (2 << 20)), "is larger than"),
    "no description": (lambda folder: (folder / CONFIG_FILE).unlink(), "cannot be read"),
    "no tensors": (lambda folder: (folder / TENSOR_FILE).unlink(), "cannot be opened"),
    "pickle": (lambda folder: (folder / TENSOR_FILE).write_bytes(b"\x80\x04cos\nsystem\n"), "header"),
    "a folder": (lambda folder: ((folder / TENSOR_FILE).unlink(), (folder / TENSOR_FILE).mkdir()), "regular file"),
    "long header": (
        lambda folder: (folder / TENSOR_FILE).write_bytes((90 << 20).to_bytes(8, "little") + b"{" * (91 << 20)),
        "more than allowed",
    ),
    "cut off": (lambda folder: (folder / TENSOR_FILE).write_bytes((folder / TENSOR_FILE).read_bytes()[:-8]), "bytes"),
    "NaN": (spoiled(float("nan")), "not finite"),
    "infinity": (spoiled(float("-inf")), "not finite"),
    "another width": (instead(FIRST, torch.zeros(16, 33)), "has the shape"),
    "another order": (instead(FIRST, torch.zeros(32, 16)), "has the shape"),
    "whole numbers": (instead(FIRST, torch.zeros(16, 32, dtype=torch.int32)), "is I32"),
    "one half": (tensors_with(lambda tensors: tensors.pop(FIRST)), "is missing"),
    "empty": (tensors_with(lambda tensors: tensors.clear()), "has no tensors"),
    "another layer": (instead(FIRST.replace("0", "7"), torch.zeros(16, 32)), "nothing that adapters"),
    "a norm": (instead("base_model.model.model.norm.lora_A.weight", torch.zeros(1, 32)), "nothing that adapters"),
    "a whole weight": (instead("base_model.model.lm_head.weight", torch.zeros(97, 32)), "replaces a weight"),
    "a magnitude": (instead(FIRST.replace("A.weight", "magnitude_vector"), torch.zeros(32)), "no pair of"),
    "a path": (instead("../../etc/passwd", torch.zeros(1)), "no pair of"),
    "embedding as a map": (
        tensors_with(
            lambda tensors: tensors.update(
                {
                    "base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(16, 97),
                    "base_model.model.model.embed_tokens.lora_B.weight": torch.zeros(32, 16),
                }
            )
        ),
        "is an embedding",
    ),
    "map as an embedding": (
        instead("base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A", torch.zeros(16, 32)),
        "two kinds|is no embedding",
    ),
}


def copied(sound: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    """A changed copy of the sound adapter."""
    shutil.copytree(sound / "adapter", folder)
    change(folder)
    return folder


def read(folder: Path, sites: Sites) -> None:
    """Check and read an adapter's folder."""
    files = open_adapter(folder, sites)
    try:
        read_factors(files, torch.zeros(files.numbers))
    finally:
        files.file.close()


def test_the_sound_adapter_is_read(sound: Path, sites: Sites) -> None:
    """The adapter that every hostile one is made from can be used: what is refused below is what was changed."""
    read(sound / "adapter", sites)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_with_its_reason(name: str, sound: Path, sites: Sites, tmp_path: Path) -> None:
    """Each is refused by the one error that means so, which names the key or the tensor."""
    change, says = HOSTILE[name]
    with pytest.raises(AdapterLoadError, match=says):
        read(copied(sound, tmp_path / "adapter", change), sites)


def test_one_that_is_refused_leaves_the_others(sound: Path, tmp_path: Path) -> None:
    """An engine that is given a broken adapter, one too large for the room, and a sound one has the sound one; requests
    for the others are refused by a code of their own, and all others served."""
    good, broken, large = ("a" * 64, "b" * 64, "c" * 64)
    save_adapter(sound / "base", tmp_path / good, **KINDS["r4-attention"])
    copied(sound, tmp_path / broken, spoiled(float("nan")))
    save_adapter(sound / "base", tmp_path / large, **KINDS["r256"])
    engine = engine_with(sound / "base", tmp_path, [large, broken, good], adapter_bytes=200_000)
    assert engine.ready().adapters == 1
    digests = [b"", *map(bytes.fromhex, (good, broken, large)), bytes(32)]
    submits = [submit(number, [4, 5, 6], 2, adapter=digest) for number, digest in enumerate(digests, 1)]
    failures = [answer.failure for answer in generate(engine, submits).values()]
    assert failures == [None, None, *[FailureCode.NO_ADAPTER] * 3]
    reasons = {source.digest.hex(): str(error) for source, error in engine.runner.model.bank.refused}
    assert "not finite" in reasons[broken]
    assert "are left" in reasons[large]


def test_the_arena_never_exceeds_its_bound(sound: Path, sites: Sites) -> None:
    """Adapters share one piece of memory, whose bytes stay within the bound whatever is asked for."""
    for most in (0, 1_000, 50_000, 1 << 20):
        bank = AdapterBank(sites)
        sources = [AdapterSource(sound / "adapter", bytes([number]) * 32) for number in range(9)]
        bank.load(sources, dtype=torch.float32, most_bytes=most)
        assert bank.arena is not None
        assert bank.arena.nbytes <= most
        assert len(bank.numbers) + len(bank.refused) == 9
        assert bool(bank.refused) == (most < 1 << 20)
        for site in (one for places in sites.values() for one in places):
            site.part.delta = None


@pytest.mark.parametrize("count", [MUTATIONS, pytest.param(50 * MUTATIONS, marks=pytest.mark.full)])
def test_damaged_files_are_refused_or_read(count: int, sound: Path, sites: Sites, tmp_path: Path) -> None:
    """Whatever bytes of either file are changed, cut, doubled or swapped, reading ends in the typed error or in numbers
    that are finite; the same damage is met in both files, and most of it is refused."""
    draw = random.Random(11)
    wholes = {name: (sound / "adapter" / name).read_bytes() for name in (CONFIG_FILE, TENSOR_FILE)}
    head = 8 + int.from_bytes(wholes[TENSOR_FILE][:8], "little")
    refused = 0
    for number in range(count):
        folder = tmp_path / "damaged"
        folder.mkdir(exist_ok=True)
        damaged = CONFIG_FILE if number % 2 else TENSOR_FILE
        for name, whole in wholes.items():
            (folder / name).write_bytes(_damaged(draw, whole, head) if name == damaged else whole)
        try:
            read(folder, sites)
        except AdapterLoadError:
            refused += 1
    assert count // 2 < refused < count, "damage that is never, or always, refused tests one path"


def _damaged(draw: random.Random, whole: bytes, head: int) -> bytes:
    data = bytearray(whole)
    end = min(len(data), head)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(end)
        match draw.randrange(5):
            case 0:
                data[place] ^= 1 << draw.randrange(8)
            case 1:
                data[place] = draw.randrange(256)
            case 2:
                del data[place : place + draw.randrange(1, 9)]
            case 3:
                data[place:place] = data[place : place + draw.randrange(1, 9)]
            case _:
                data[place : place + 4] = bytes(draw.choice(b'0123456789-eE.[]{}"') for _ in range(4))
        end = min(end, len(data))
    return bytes(data)
