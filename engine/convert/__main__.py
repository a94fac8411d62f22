"""Model conversion program: ``python -m engine.convert SOURCE FOLDER DTYPE``, started by ``athanor model convert``.

GGUF files are untrusted, and reading them is most of this program's work. So it opens the source and the output files,
then locks itself down (``engine.sandbox.lockdown``): from then on it can read the source, write the outputs and its
standard output, use bounded memory, and exit; opening, connecting or starting anything ends it with SIGSYS. Only then
does it read the first byte.

It reports on standard output, one line each: ``progress WRITTEN TOTAL`` in bytes; last ``done`` with a JSON object, or
``error`` with a sentence. Exit status: 0; 3 when the file cannot be converted; 4 when a file cannot be opened or
written, or the machine supports no lock-down.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - nothing can be imported later
import json
import os
import sys

from engine.convert.architecture import read_model
from engine.convert.calls import converter_calls
from engine.convert.gguf import GgufFile
from engine.convert.output import DTYPES, data_bytes, write_json, write_weights
from engine.convert.program import EXIT_FILES, EXIT_REFUSED, EXIT_USAGE, end, limit_resources, progress_of, say
from engine.convert.rope import ROPE_FACTORS
from engine.convert.tokenizer import read_text
from engine.convert.values import Values
from engine.errors import LockdownError, ModelLoadError
from engine.sandbox.lockdown import lock_down

FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Names of the files that are written."""

MAX_DIVISORS = 512
"""Largest number of values in the tensor of rotary divisors: half a head."""


def main(arguments: list[str]) -> int:
    """Convert; return the exit status."""
    if len(arguments) != 3 or arguments[2] not in ("auto", *DTYPES):
        return EXIT_USAGE
    source, folder, dtype = arguments
    limit_resources()
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        outputs = {name: os.open(os.path.join(folder, name), flags, 0o644) for name in FILES}
        lock_down(converter_calls((fd,), tuple(outputs.values())))
    except OSError as error:
        return end(EXIT_FILES, f"{error.filename or source}: {error.strerror}")
    except LockdownError as error:
        return end(EXIT_FILES, str(error))
    try:
        summary = convert(fd, os.path.basename(source), outputs, dtype)
    except ModelLoadError as error:
        return end(EXIT_REFUSED, str(error))
    except MemoryError:
        return end(EXIT_REFUSED, f"converting {os.path.basename(source)} takes more memory than is allowed")
    except OSError as error:
        return end(EXIT_FILES, f"the result cannot be written: {error.strerror}")
    say(f"done {json.dumps(summary)}")
    return 0


def convert(fd: int, name: str, outputs: dict[str, int], dtype: str) -> dict[str, object]:
    """Convert an open GGUF file into open output files.

    Args:
        fd: descriptor of the source.
        name: the source's name, for messages.
        outputs: descriptors of ``FILES``.
        dtype: dtype of the result; ``auto`` for that of the embedding, bfloat16 where the embedding is packed.

    Returns:
        A summary for people.

    Raises:
        ModelLoadError: the file is malformed, or its kind is not supported.
        OSError: a file cannot be written.
    """
    file = GgufFile(fd, name)
    values = Values(name, {**file.values})
    model = read_model(values, file.tensors, _divisors(file))
    vocabulary = int(file.tensors["token_embd.weight"].shape[0])
    text = read_text(values, vocabulary)
    if dtype == "auto":
        names = {"F32": "float32", "F16": "float16"}
        dtype = names.get(file.tensors["token_embd.weight"].kind.name, "bfloat16")
    stops = {} if not text.stop_ids else {"eos_token_id": list(text.stop_ids)}
    begin = {} if text.begin_id is None else {"bos_token_id": text.begin_id}
    write_json(outputs["config.json"], {**model.config, "torch_dtype": dtype, **begin, **stops})
    write_json(outputs["generation_config.json"], {**begin, **stops})
    write_json(outputs["tokenizer.json"], text.tokenizer)
    write_json(outputs["tokenizer_config.json"], text.config)
    total = data_bytes(model.targets, dtype)
    write_weights(outputs["model.safetensors"], file, model.targets, dtype, progress_of(total))
    for output in outputs.values():
        os.fsync(output)
    kinds = sorted({file.tensors[target.source].kind.name for target in model.targets})
    return {
        "architecture": model.config["architectures"][0],  # type: ignore[index]  # made here
        "tensors": len(model.targets),
        "types": kinds,
        "dtype": dtype,
        "bytes": total,
        "chat_template": "chat_template" in text.config,
    }


def _divisors(file: GgufFile) -> list[float] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape[-1] > MAX_DIVISORS or tensor.rows != 1 or not tensor.kind.plain:
        raise ModelLoadError(f"{file.name}: tensor {ROPE_FACTORS} has shape {list(tensor.shape)}")
    found: list[float] = file.read_rows(ROPE_FACTORS, 0, 1)[0].tolist()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
