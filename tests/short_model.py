"""athanor-mini with its first layer alone, for tests of what is done to model folders: a third of its numbers, each
class of tensors, its own vocabulary and tokenizer, and real weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from appliance.common.catalog import embedded_model

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

TENSORS = 11
"""Nine of the layer, the embedding and the last norm."""

WEIGHT_BYTES = 5_605_632
"""Of all tensors, in bfloat16."""


@cache
def short_model() -> Path:
    """Return the folder, made at the first call of a process; it goes with the temporary directory of the tests.

    Its files may be read by everybody, as the embedded model's.
    """
    folder = Path(tempfile.mkdtemp(prefix="short-")) / "athanor-mini"
    shutil.copytree(embedded_model(), folder, ignore=shutil.ignore_patterns(WEIGHTS, CONFIG))
    described = json.loads((embedded_model() / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**described, "num_hidden_layers": 1}, indent=2))
    whole = load_file(embedded_model() / WEIGHTS)
    kept = {name: one for name, one in whole.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    for path in (folder.parent, folder):
        path.chmod(0o755)
    for path in (folder / WEIGHTS, folder / CONFIG):
        path.chmod(0o644)
    return folder
