"""Loads a checkpoint into a model: names and shapes first, memory and bytes after.

One file ``model.safetensors``, or several listed in ``model.safetensors.index.json``. The index is untrusted: it may
name plain files of the model's own directory only. What decides is what the files themselves hold; the index only
says which files there are. Nothing is allocated before every expected tensor was found with its shape, so the
description cannot ask for more memory than the files are large.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.config import ModelConfig, read_json_object
from engine.model.llama import LlamaForCausalLM
from engine.model.registry import model_class
from engine.model.safetensors import SafetensorsFile, show_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MAX_INDEX_BYTES = 1 << 26
"""Bytes of the index: about 100 a tensor."""

MAX_FILES = 4_096
"""Files of one checkpoint; the largest published have about 200."""

MAX_NAMED = 4
"""Tensors that one message names; the rest is counted."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that weights may have."""

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes by the names that configurations use."""


def load_model(
    model_dir: str, config: ModelConfig, *, dtype: str, device: torch.device, packed: bool = True
) -> LlamaForCausalLM:
    """Load the model.

    Args:
        model_dir: directory of the checkpoint.
        config: its checked description.
        dtype: ``auto`` for the dtype of the checkpoint's embedding, or the name of one.
        device: where the weights go.
        packed: bring the weights into the form that the plain path is fastest with; without, somebody else does.

    Raises:
        ModelLoadError: a file or tensor is missing, extra, misshaped or malformed; the message names it.
    """
    kind = model_class(config.architecture)
    with ExitStack() as stack:
        files = [stack.enter_context(SafetensorsFile(path)) for path in _checkpoint_files(Path(model_dir))]
        homes = _find_tensors(files, config, kind)
        first = homes["model.embed_tokens.weight"].tensors["model.embed_tokens.weight"].dtype
        model = kind(config, dtype=DTYPES[first] if dtype == "auto" else DTYPE_NAMES[dtype], device=device)
        for name, target in model.targets():
            _read_tensor(homes[name], name, target)
    if packed:
        model.pack()
    return model


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


def _find_tensors(
    files: list[SafetensorsFile], config: ModelConfig, kind: type[LlamaForCausalLM]
) -> dict[str, SafetensorsFile]:
    """Which file holds each expected tensor; anything missing, extra, doubled or misshaped is an error."""
    expected = kind.shapes(config)
    homes: dict[str, SafetensorsFile] = {}
    extra = []
    for file in files:
        for name, entry in file.tensors.items():
            if name not in expected:
                if not kind.ignores(config, name):
                    extra.append(name)
                continue
            if name in homes:
                raise ModelLoadError(f"tensor {name} is in both {homes[name].name} and {file.name}")
            if entry.shape != expected[name]:
                raise ModelLoadError(
                    f"{file.name}: tensor {name} has shape {list(entry.shape)}; "
                    f"config.json asks for {list(expected[name])}"
                )
            if entry.dtype not in DTYPES:
                raise ModelLoadError(f"{file.name}: tensor {name} is {entry.dtype}; supported are {', '.join(DTYPES)}")
            homes[name] = file
    missing = [name for name in expected if name not in homes]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_some(missing)}")
    if extra:
        raise ModelLoadError(f"the checkpoint holds {_some(extra)}, which {config.architecture} has no use for")
    return homes


def _some(names: list[str]) -> str:
    shown = ", ".join(show_name(name) for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _read_tensor(file: SafetensorsFile, name: str, target: Tensor) -> None:
    """Read one tensor into its rows, directly where dtype and device agree, else through one buffer."""
    source = DTYPES[file.tensors[name].dtype]
    if source == target.dtype and target.device.type == "cpu":
        assert target.is_contiguous(), "tensors are loaded into whole rows"
        file.read_into(name, _bytes_of(target))
        return
    staging = torch.empty(target.shape, dtype=source)
    file.read_into(name, _bytes_of(staging))
    target.copy_(staging)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data
