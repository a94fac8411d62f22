"""Section ``models[].adapters`` of the configuration: low-rank adapters (LoRA) of a model."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from appliance.common.config_section import Section


class AdapterConfig(Section):
    """Adapters (LoRA) of the model, a list with one entry for each (docs/adapters.md). The policy says which tenants
    may use which, as MODEL:NAME."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    """Name of the adapter behind its model's, MODEL:NAME. It is unique in the list."""
    path: Path = Field(strict=False)
    """Folder as PEFT writes it, with adapter_config.json and adapter_model.safetensors. Nothing else of it is read."""
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 digest of these two files in hex (`athanor model digest` prints it). Other files are left out, with a
    line in the log."""
