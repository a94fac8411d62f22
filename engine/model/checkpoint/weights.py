"""Loads a checkpoint into a model: names and shapes are checked before memory is allocated and bytes are read.

Packed matrices (``engine.model.quantised``) are decoded while they are read, one slab of bounded size at a time.

A checkpoint is one file ``model.safetensors``, or several listed in ``model.safetensors.index.json``. The index is
untrusted: it may name plain files of the model's own directory only. The contents of the files are authoritative; the
index only lists the files. Nothing is allocated before every expected tensor was found with its shape, so the
description cannot request more memory than the size of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Checklist, Home, Piece
from engine.model.checkpoint.config import MAX_JSON_BYTES, ModelConfig, read_json_object
from engine.model.checkpoint.reading import DTYPES, read_part
from engine.model.checkpoint.registry import build_model, describe_model
from engine.model.checkpoint.rounding import read_rounded
from engine.model.checkpoint.safetensors import OpenCodec, SafetensorsFile, TensorEntry, show_names
from engine.model.checkpoint.staging import Staging, staging_for
from engine.model.coded.codec import open_numpy_codec
from engine.model.families.headless import name_headless
from engine.model.layers.decoder import Decoder
from engine.model.layers.parallel import ALONE, Parallel
from engine.model.quantised.scheme import Scheme, read_scheme
from engine.model.quantised.stored import PackedMatrix, PackedStack, PackedTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

MAX_INDEX_BYTES = 1 << 26
"""Largest index in bytes: about 100 for each tensor."""

MAX_FILES = 4_096
"""Largest number of files in one checkpoint; the largest published have about 200."""

UNPACKED_DTYPE = torch.bfloat16
"""Default dtype of a model whose embedding is packed."""

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by their names in configurations."""


Found = SafetensorsFile | PackedMatrix | PackedStack
"""Location of a tensor."""


@dataclass(frozen=True, slots=True)
class UnreadModel:
    """Model with allocated, zeroed memory; its files are open and checked, and no weight has been read."""

    model: Decoder
    checklist: Checklist
    homes: dict[str, Found]

    def fill(self, stopped: Callable[[], bool] = lambda: False, staging: Staging | None = None) -> None:
        """Read all weights into their memory, which does not move; checks between tensors whether to stop.

        Args:
            stopped: whether to stop.
            staging: what they go through where they are not read in place; None: a buffer of its own.

        Raises:
            ModelLoadError: a file ends early, or holds a number that is not finite.
        """
        if staging is None:
            with staging_for(self.model.device) as own:
                self.fill(stopped, own)
            return
        for name, piece in self.checklist.pieces.items():
            for home in piece.homes:
                if stopped():
                    return
                if home.scale is None:
                    _read(self.homes[name], name, home, staging)
                else:
                    read_rounded(self.homes[name], name, home, staging, self.model.dtype)
        staging.finish()


def load_model(  # noqa: PLR0913 - what the caller chooses
    model_dir: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    packed: bool = True,
    headless: bool = False,
    parallel: Parallel = ALONE,
    open_codec: OpenCodec = open_numpy_codec,
) -> Decoder:
    """Load the model, or this rank's part of it.

    Args:
        model_dir: directory of the checkpoint.
        config: its validated description.
        dtype: ``auto`` for the dtype of the checkpoint's embedding, or a dtype name.
        device: device of the weights.
        packed: convert the weights into the plain backend's fastest form; without it, the caller does so.
        headless: names may lack the prefix of the decoder (``engine.model.families.headless``).
        parallel: the part of the model that this rank holds.
        open_codec: gives what decodes coded tensors.

    Raises:
        ModelLoadError: a file or tensor is missing, extra, misshaped or malformed; the message names it.
        ConfigurationError: the model cannot be divided among so many ranks.
    """
    with ExitStack() as stack:
        files = _opened(stack, model_dir, open_codec)
        wanted, homes = _located(files, model_dir, config, headless=headless, parallel=parallel)
        model, checklist = build_model(config, _dtype_of(dtype, wanted, homes), device, parallel)
        UnreadModel(model, checklist, homes).fill()
    if packed:
        model.pack()
    return model


@contextmanager
def unread_model(  # noqa: PLR0913 - what the caller chooses
    model_dir: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    room: Callable[[int], None] = lambda _: None,
    scaled: bool = False,
    parallel: Parallel = ALONE,
    open_codec: OpenCodec = open_numpy_codec,
) -> Iterator[UnreadModel]:
    """Allocate the whole model for a caller that fills it later, while others already use the addresses of its weights.

    The memory is final: experts' maps are contiguous, and nothing is packed afterwards.

    Args:
        model_dir: directory of the checkpoint, whose files are open inside.
        config: its validated description.
        dtype: ``auto`` for the dtype of the checkpoint's embedding, or a dtype name.
        device: device of the weights.
        room: called with the bytes of the weights before any memory is allocated; raises when they do not fit.
        scaled: hold maps of layers in 8 bits (``Memory.scaled``).
        parallel: which part of the model this rank holds.
        open_codec: gives what decodes coded tensors.

    Raises:
        ModelLoadError: as ``load_model``; errors inside the files are raised by ``UnreadModel.fill``.
        Exception: whatever ``room`` raises.
    """
    with ExitStack() as stack:
        files = _opened(stack, model_dir, open_codec)
        wanted, homes = _located(files, model_dir, config, parallel=parallel, scaled=scaled)
        numbers = _dtype_of(dtype, wanted, homes)
        room(weight_bytes(wanted, numbers))
        model, checklist = build_model(config, numbers, device, parallel, final=True, scaled=scaled)
        for piece in checklist.pieces.values():
            for home in piece.homes:
                # Operations on the unfilled model must give finite, repeatable numbers.
                home.target.zero_()
                if home.scale is not None:
                    home.scale.zero_()
        yield UnreadModel(model, checklist, homes)


def weight_bytes(wanted: Checklist, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in this dtype, by its checklist: of maps in 8 bits one a number, and their
    scales."""
    homes = [home for piece in wanted.pieces.values() for home in piece.homes]
    # The few vectors with another dtype than the model's are small.
    whole = sum(home.target.numel() for home in homes if home.scale is None)
    scaled = [(home.target, home.scale) for home in homes if home.scale is not None]
    return whole * dtype.itemsize + sum(target.numel() + 4 * scale.numel() for target, scale in scaled)


def _opened(stack: ExitStack, model_dir: str, open_codec: OpenCodec) -> list[SafetensorsFile]:
    """Open the checkpoint's files, which stay open as long as the stack."""
    return [stack.enter_context(SafetensorsFile(path, open_codec)) for path in _checkpoint_files(Path(model_dir))]


def _located(
    files: list[SafetensorsFile],
    model_dir: str,
    config: ModelConfig,
    *,
    headless: bool = False,
    parallel: Parallel = ALONE,
    scaled: bool = False,
) -> tuple[Checklist, dict[str, Found]]:
    """Locate every tensor of the checklist in the checkpoint's files."""
    if headless:
        name_headless(files)
    # All ranks check the whole list, so that all refuse the same checkpoints.
    wanted = describe_model(config, replace(parallel, layers=None), scaled=scaled)
    return wanted, find_tensors(files, wanted, config.architecture, _scheme_of(Path(model_dir)))


def _scheme_of(directory: Path) -> Scheme | None:
    """Return how the checkpoint's matrices are packed; None when they are not, or the description does not say."""
    path = directory / CONFIG_FILE
    return read_scheme(read_json_object(path, MAX_JSON_BYTES)) if path.exists() else None


def _dtype_of(name: str, wanted: Checklist, homes: dict[str, Found]) -> torch.dtype:
    """Return the dtype with this name; for ``auto`` the dtype of the first tensor on the list, the embedding."""
    if name != "auto":
        return DTYPE_NAMES[name]
    first = next(iter(wanted.pieces))
    home = homes[first]
    return DTYPES[home.tensors[first].dtype] if isinstance(home, SafetensorsFile) else UNPACKED_DTYPE


def _checkpoint_files(directory: Path) -> list[Path]:
    if not (directory / INDEX_FILE).exists():
        return [directory / SINGLE_FILE]
    mapping = read_json_object(directory / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelLoadError(f"{INDEX_FILE}: weight_map is not a JSON object with entries")
    names = set()
    for name in mapping.values():
        if not isinstance(name, str) or not _is_plain(name):
            raise ModelLoadError(f"{INDEX_FILE}: a file name is not a plain name ending in .safetensors")
        names.add(name)
    if len(names) > MAX_FILES:
        raise ModelLoadError(f"{INDEX_FILE}: {len(names)} files; at most {MAX_FILES} are allowed")
    return [directory / name for name in sorted(names)]


def _is_plain(name: str) -> bool:
    """Return whether a name is one path component of a weight file."""
    plain = name.isascii() and all(one.isalnum() or one in "-_." for one in name)
    return plain and name.endswith(".safetensors") and not name.startswith(".") and len(name) <= 255


def find_tensors(
    files: list[SafetensorsFile], wanted: Checklist, architecture: str, scheme: Scheme | None = None
) -> dict[str, Found]:
    """Locate each tensor on the list, unpacked or packed; a missing, extra, duplicate or misshaped one is an error.

    Raises:
        ModelLoadError: the message names the tensor.
    """
    homes: dict[str, Found] = {}
    packed = PackedTensors(scheme, wanted)
    extra = []
    for file in files:
        for name, entry in file.tensors.items():
            piece = wanted.pieces.get(name)
            if (piece is None or entry.dtype not in piece.dtypes) and packed.takes(file, name, entry):
                continue
            if piece is None:
                if not wanted.ignores(name):
                    extra.append(name)
                continue
            _check_plain(file, entry, piece, homes.get(name))
            homes[name] = file
    for name, matrix in packed.found():
        if name in homes:
            raise ModelLoadError(f"tensor {name} is there twice: packed and as it is")
        homes[name] = matrix
    missing = [name for name in wanted.pieces if name not in homes]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {show_names(missing)}")
    if extra:
        raise ModelLoadError(f"the checkpoint holds {show_names(extra)}, which {architecture} has no use for")
    return homes


def _check_plain(file: SafetensorsFile, entry: TensorEntry, piece: Piece, before: Found | None) -> None:
    """Check a tensor that is read unpacked; ``before`` is where a tensor with its name was found already."""
    name = piece.name
    if isinstance(before, SafetensorsFile):
        raise ModelLoadError(f"tensor {name} is in both {before.name} and {file.name}")
    if entry.shape != piece.shape:
        raise ModelLoadError(
            f"{file.name}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(piece.shape)}"
        )
    if entry.dtype not in piece.dtypes:
        supported = ", ".join(piece.dtypes)
        raise ModelLoadError(f"{file.name}: tensor {name} is {entry.dtype}; supported are {supported}")


def _read(found: Found, name: str, home: Home, staging: Staging) -> None:
    if not home.target.numel():
        return
    if isinstance(found, SafetensorsFile):
        read_part(found, name, home, staging)
        staging.check(name, home.target)
    else:
        found.read_part(home)
