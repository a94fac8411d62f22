"""The two files of an adapter's folder, checked against the model and read: ``adapter_config.json`` and
``adapter_model.safetensors``.

Both are hostile. They are opened by the engine's own program, inside its sandbox and before it is locked down, so a
serving engine opens none of them and parses no header. All names and shapes are checked before a number is read. What
is read lies in one arena, whose size is known from the headers (``engine.model.adapters.bank``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import AdapterLoadError, ModelLoadError
from engine.model.adapters.form import MAX_RANK, AdapterForm, read_form
from engine.model.checkpoint.checklist import FLOATS, Home, Site
from engine.model.checkpoint.config import MAX_JSON_BYTES, read_json_object
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.reading import read_part
from engine.model.checkpoint.safetensors import SafetensorsFile, TensorEntry, show_name
from engine.model.checkpoint.staging import check_finite

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

MAX_HEADER_BYTES = 8 << 20
"""Most bytes of the header: 32,768 maps with two tensors each."""

PANEL_COLUMNS = 16
"""Columns to whose multiple a backend may pad a matrix."""

WRAPPED = "base_model.model."
"""What PEFT writes before each published name."""

ENDINGS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
"""Endings of the two tensors of a map, and of an embedding."""

Sites = dict[str, list[Site]]
"""What adapters may change in a model, by published name."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The two tensors of one published map, as they are in the file."""

    name: str
    """Published name of the map."""
    down: str
    """Name of the tensor that takes a row to ``rank`` numbers, ``(rank, inputs)``."""
    up: str
    """Name of the tensor that takes these to the outputs, ``(outputs, rank)``."""
    rank: int
    inputs: int
    outputs: int
    scale: float

    @property
    def numbers(self) -> int:
        """Numbers of both."""
        return self.rank * (self.inputs + self.outputs)

    @property
    def padded_numbers(self) -> int:
        """Numbers of both where columns are padded to whole panels, as compiled kernels keep them."""
        return _padded(self.rank) * self.inputs + self.rank * _padded(self.outputs)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Checked files of one adapter, of which no number was read yet."""

    file: SafetensorsFile
    factors: tuple[Factors, ...]

    @property
    def numbers(self) -> int:
        """Numbers of all its tensors."""
        return sum(one.numbers for one in self.factors)

    @property
    def padded_numbers(self) -> int:
        """Numbers of all of them at most, in any backend's form."""
        return sum(one.padded_numbers for one in self.factors)


def open_adapter(folder: Path, sites: Sites) -> AdapterFiles:
    """Open an adapter's files and check them against a model; the caller closes the file.

    Raises:
        AdapterLoadError: a file is missing, malformed, of an unsupported kind, or for another model.
    """
    try:
        form = read_form(Fields(CONFIG_FILE, read_json_object(folder / CONFIG_FILE, MAX_JSON_BYTES)))
        file = SafetensorsFile(folder / TENSOR_FILE, max_header_bytes=MAX_HEADER_BYTES)
    except ModelLoadError as error:
        raise AdapterLoadError(str(error)) from error
    try:
        return AdapterFiles(file, pair_up(file.tensors, form, sites))
    except AdapterLoadError:
        file.close()
        raise


def pair_up(tensors: dict[str, TensorEntry], form: AdapterForm, sites: Sites) -> tuple[Factors, ...]:
    """Find the two tensors of each map; all of them must be understood.

    Raises:
        AdapterLoadError: a tensor belongs to nothing that adapters may change, lacks its other half, or has a shape or
            dtype that does not fit.
    """
    found: dict[str, Factors] = {}
    for tensor in tensors:
        name, ending = _split(tensor)
        if name in found:
            continue
        down, up = WRAPPED + name + ending[0], WRAPPED + name + ending[1]
        places = sites.get(name)
        if places is None:
            raise AdapterLoadError(
                f"{TENSOR_FILE}: {show_name(name)} is nothing that adapters of this model may change"
            )
        if ending is ENDINGS[1] and not _is_embedding(places):
            raise AdapterLoadError(f"{TENSOR_FILE}: {show_name(name)} is no embedding")
        if ending is ENDINGS[0] and _is_embedding(places):
            raise AdapterLoadError(f"{TENSOR_FILE}: {show_name(name)} is an embedding, and its tensors are a map's")
        found[name] = _factors(name, (down, up), tensors, form, places)
    if not found:
        raise AdapterLoadError(f"{TENSOR_FILE} has no tensors")
    if 2 * len(found) != len(tensors):
        raise AdapterLoadError(f"{TENSOR_FILE}: a map has tensors of two kinds")
    return tuple(found.values())


def read_factors(files: AdapterFiles, room: Tensor) -> list[tuple[Factors, Tensor, Tensor]]:
    """Read all numbers of an adapter into ``room``, one piece of memory of the model's dtype; gives for each map
    ``(inputs, rank)`` and, with its scale, ``(rank, outputs)``.

    Raises:
        AdapterLoadError: a file ends early, or a number is not finite.
    """
    read, place = [], 0
    for one in files.factors:
        middle, end = place + one.rank * one.inputs, place + one.numbers
        down, up = room[place:middle].view(one.inputs, one.rank), room[middle:end].view(one.rank, one.outputs)
        try:
            down.copy_(_tensor(files.file, one.down, (one.rank, one.inputs)).t())
            up.copy_(_tensor(files.file, one.up, (one.outputs, one.rank)).mul_(one.scale).t())
            check_finite(one.down, down)
            check_finite(one.up, up)
        except ModelLoadError as error:
            raise AdapterLoadError(str(error)) from error
        read.append((one, down, up))
        place = end
    return read


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, int]) -> Tensor:
    """Read a tensor as float32, in which its scale is applied."""
    values = torch.empty(shape, dtype=torch.float32)
    read_part(file, name, Home(((0, shape[0]), (0, shape[1])), values))
    return values


def _split(tensor: str) -> tuple[str, tuple[str, str]]:
    """Return the published name that a tensor is for, and the endings of its kind."""
    for ending in ENDINGS:
        for one in ending:
            if tensor.startswith(WRAPPED) and tensor.endswith(one):
                return tensor[len(WRAPPED) : -len(one)], ending
    what = "is no pair of low-rank factors"
    if tensor.endswith((".base_layer.weight", ".weight")) and ".lora_" not in tensor:
        what = "replaces a weight of the model; save the adapter without such (save_embedding_layers=False)"
    raise AdapterLoadError(f"{TENSOR_FILE}: tensor {show_name(tensor)} {what}")


def _factors(
    name: str, both: tuple[str, str], tensors: dict[str, TensorEntry], form: AdapterForm, places: list[Site]
) -> Factors:
    inputs, outputs, rank = places[0].inputs, places[0].rows, form.rank_of(name)
    for tensor, shape in zip(both, ((rank, inputs), (outputs, rank)), strict=True):
        entry = tensors.get(tensor)
        if entry is None:
            raise AdapterLoadError(f"{TENSOR_FILE}: tensor {show_name(tensor)} is missing")
        if entry.dtype not in FLOATS:
            raise AdapterLoadError(
                f"{TENSOR_FILE}: tensor {show_name(tensor)} is {entry.dtype}; {', '.join(FLOATS)} are read"
            )
        if entry.shape != shape:
            raise AdapterLoadError(
                f"{TENSOR_FILE}: tensor {show_name(tensor)} has the shape {entry.shape}; {CONFIG_FILE} and the model "
                f"need {shape}"
            )
    assert rank <= MAX_RANK, "the description was checked"
    return Factors(name, *both, rank, inputs, outputs, form.scale_of(name))


def _padded(columns: int) -> int:
    return -(-columns // PANEL_COLUMNS) * PANEL_COLUMNS


def _is_embedding(places: list[Site]) -> bool:
    return places[0].by_id
