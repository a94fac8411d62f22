"""Loads a checkpoint into a model: names and shapes first, memory and bytes after.

Matrices may be packed (``engine.model.quantised``): they are decoded while they are read, a bounded slab at a time.

One file ``model.safetensors``, or several listed in ``model.safetensors.index.json``. The index is untrusted: it may
name plain files of the model's own directory only. What decides is what the files themselves hold; the index only
says which files there are. Nothing is allocated before every expected tensor was found with its shape, so the
description cannot ask for more memory than the files are large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.model.checklist import Checklist, Home, Piece
from engine.model.config import MAX_JSON_BYTES, ModelConfig, read_json_object
from engine.model.decoder import Decoder
from engine.model.headless import name_headless
from engine.model.parallel import ALONE, Parallel
from engine.model.quantised.scheme import Scheme, read_scheme
from engine.model.quantised.stored import PackedMatrix, PackedStack, PackedTensors
from engine.model.reading import DTYPES, check_finite, read_part
from engine.model.registry import build_model, describe_model
from engine.model.safetensors import SafetensorsFile, TensorEntry, show_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

MAX_INDEX_BYTES = 1 << 26
"""Bytes of the index: about 100 a tensor."""

MAX_FILES = 4_096
"""Files of one checkpoint; the largest published have about 200."""

MAX_NAMED = 4
"""Tensors that one message names; the rest is counted."""

UNPACKED_DTYPE = torch.bfloat16
"""Dtype of a model whose embedding is packed, where none is asked for."""

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by the names that configurations use."""


Found = SafetensorsFile | PackedMatrix | PackedStack
"""Where a tensor is."""


@dataclass(frozen=True, slots=True)
class UnreadModel:
    """A model whose memory is taken and holds zeros; its files are open and checked, and nothing of them is read."""

    model: Decoder
    checklist: Checklist
    homes: dict[str, Found]

    def fill(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Read all weights into their memory, which stays where it is. Asks between two tensors whether to stop.

        Raises:
            ModelLoadError: a file ends early, or holds a number that is not finite.
        """
        for name, piece in self.checklist.pieces.items():
            for home in piece.homes:
                if stopped():
                    return
                _read(self.homes[name], name, home)


def load_model(
    model_dir: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    packed: bool = True,
    headless: bool = False,
    parallel: Parallel = ALONE,
) -> Decoder:
    """Load the model, or this rank's part of it.

    Args:
        model_dir: directory of the checkpoint.
        config: its checked description.
        dtype: ``auto`` for the dtype of the checkpoint's embedding, or the name of one.
        device: where the weights go.
        packed: bring the weights into the form that the plain path is fastest with; without, somebody else does.
        headless: names may lack the prefix of the decoder (``engine.model.headless``).
        parallel: which part of the model this rank holds.

    Raises:
        ModelLoadError: a file or tensor is missing, extra, misshaped or malformed; the message names it.
        ConfigurationError: the model cannot be dealt to so many ranks.
    """
    with ExitStack() as stack:
        wanted, homes = _opened(stack, model_dir, config, headless=headless, parallel=parallel)
        model, checklist = build_model(config, _dtype_of(dtype, wanted, homes), device, parallel)
        UnreadModel(model, checklist, homes).fill()
    if packed:
        model.pack()
    return model


@contextmanager
def unread_model(
    model_dir: str,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    room: Callable[[int], None] = lambda _: None,
) -> Iterator[UnreadModel]:
    """The whole model for somebody who fills it, while others already look where its weights will lie. Its memory is
    final: experts' maps lie together, and nobody packs them.

    Args:
        model_dir: directory of the checkpoint, whose files are open inside.
        config: its checked description.
        dtype: ``auto`` for the dtype of the checkpoint's embedding, or the name of one.
        device: where the weights go.
        room: is asked with the bytes of the weights before any memory is taken, and raises where there are not so many.

    Raises:
        ModelLoadError: as ``load_model``; of what is inside the files ``UnreadModel.fill`` finds out.
        Whatever ``room`` raises.
    """
    with ExitStack() as stack:
        wanted, homes = _opened(stack, model_dir, config)
        numbers = _dtype_of(dtype, wanted, homes)
        count = sum(home.target.numel() for piece in wanted.pieces.values() for home in piece.homes)
        # The few vectors that have another dtype than the model's are small.
        room(count * numbers.itemsize)
        model, checklist = build_model(config, numbers, device, final=True)
        for piece in checklist.pieces.values():
            for home in piece.homes:
                # What is computed with it before it is filled shall be numbers, and the same ones each time.
                home.target.zero_()
        yield UnreadModel(model, checklist, homes)


def _opened(
    stack: ExitStack, model_dir: str, config: ModelConfig, *, headless: bool = False, parallel: Parallel = ALONE
) -> tuple[Checklist, dict[str, Found]]:
    """What the model wants, and where in its files, which stay open as long as the stack, that is."""
    files = [stack.enter_context(SafetensorsFile(path)) for path in _checkpoint_files(Path(model_dir))]
    if headless:
        name_headless(files)
    # All ranks check the whole list, so that all refuse the same checkpoints.
    wanted = describe_model(config, replace(parallel, layers=None))
    return wanted, find_tensors(files, wanted, config.architecture, _scheme_of(Path(model_dir)))


def _scheme_of(directory: Path) -> Scheme | None:
    """How the checkpoint's matrices are packed; None where they are not, or nothing is said."""
    path = directory / CONFIG_FILE
    return read_scheme(read_json_object(path, MAX_JSON_BYTES)) if path.exists() else None


def _dtype_of(name: str, wanted: Checklist, homes: dict[str, Found]) -> torch.dtype:
    """The dtype of this name; of ``auto`` that of the first tensor on the list, the embedding."""
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
    """Whether a name is one path component of a weight file."""
    plain = name.isascii() and all(one.isalnum() or one in "-_." for one in name)
    return plain and name.endswith(".safetensors") and not name.startswith(".") and len(name) <= 255


def find_tensors(
    files: list[SafetensorsFile], wanted: Checklist, architecture: str, scheme: Scheme | None = None
) -> dict[str, Found]:
    """Where each tensor on the list is: in a file as it is, or packed; anything missing, extra, doubled or misshaped is
    an error.

    Raises:
        ModelLoadError: with the tensor's name.
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
    together: Iterator[tuple[str, Found]] = itertools.chain(packed.matrices(), packed.stacks())
    for name, matrix in together:
        if name in homes:
            raise ModelLoadError(f"tensor {name} is there twice: packed and as it is")
        homes[name] = matrix
    missing = [name for name in wanted.pieces if name not in homes]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_some(missing)}")
    if extra:
        raise ModelLoadError(f"the checkpoint holds {_some(extra)}, which {architecture} has no use for")
    return homes


def _check_plain(file: SafetensorsFile, entry: TensorEntry, piece: Piece, before: Found | None) -> None:
    """Check a tensor that is to be read as it is; ``before`` is where one of its name was found already."""
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


def _some(names: list[str]) -> str:
    shown = ", ".join(show_name(name) for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _read(found: Found, name: str, home: Home) -> None:
    if not home.target.numel():
        return
    if isinstance(found, SafetensorsFile):
        read_part(found, name, home)
        check_finite(name, home.target)
    else:
        found.read_part(home)
