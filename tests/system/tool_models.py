"""Small models that call tools: weights of the embedded model or random ones, with templates of several families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from appliance.common.catalog import embedded_model

WEIGHTS = "model.safetensors"
SEED = 20_261_124

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.name }}: {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}FORM<|im_end|>\n{% endif %}"
)


def _template(form: str, call: str, end: str = "") -> str:
    """A short template that tells of tools and shows earlier calls in a family's format."""
    return _TOOLS.replace("FORM", form) + _CHATML.replace("CALL", call) + end


_ARGUMENTS = "{{ c.function.arguments | tojson }}"
FAMILIES = {
    "hermes": _template(
        "<tool_call>", '<tool_call>{"name": "{{ c.function.name }}", "arguments": ' + _ARGUMENTS + "}</tool_call>"
    ),
    "llama3": _template("<|start_header_id|>", '{"name": "{{ c.function.name }}", "parameters": ' + _ARGUMENTS + "}"),
    "mistral": _template("[TOOL_CALLS]", '{"name": "{{ c.function.name }}", "id": "{{ c.id }}"}'),
    "thinking": _template("<tool_call>", '<tool_call>{"arguments": ' + _ARGUMENTS + "}</tool_call>", "<think>\n")
    + "{# </think> #}{% if false %}</think>{% endif %}",
}
"""Name of a model -> its chat template. The one that thinks begins its answers inside the reasoning."""


def make_models(folder: Path, names: Sequence[str] = tuple(FAMILIES), *, random: Sequence[str] = ()) -> list[Path]:
    """Write the models; those in ``random`` get random weights."""
    made = []
    for name in names:
        path = folder / name
        shutil.copytree(embedded_model(), path)
        described = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": FAMILIES[name]}))
        if name in random:
            _randomise(path / WEIGHTS)
        made.append(path)
    return made


def _randomise(path: Path) -> None:
    """Replace all weights but norms by random numbers of their own spread."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" not in name and tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, path)
    # The sandbox's user reads it.
    path.chmod(0o644)
