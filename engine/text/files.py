"""A model's files that concern text, read with bounded sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelLoadError
from engine.text.template import MAX_TEMPLATE_BYTES
from engine.text.tokenizer import MAX_TOKENIZER_BYTES

MAX_TOKENIZER_CONFIG_BYTES = 4 << 20
"""Largest tokenizer_config.json in bytes; published ones list their added tokens and reach 0.5 MiB."""

DEFAULT_TEMPLATE = "default"
"""Name of the template for chats, where a model has several."""

TOOL_TEMPLATE = "tool_use"
"""Name of the template for chats with tools, where a model has a separate one."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Tokenizer and templates from the model's directory."""

    tokenizer: bytes
    """Content of tokenizer.json, unparsed."""
    templates: Mapping[str, str]
    """Chat template sources by name; empty for a model without templates."""
    special: Mapping[str, str]
    """Template variables defined by the tokenizer, such as ``bos_token``."""


def read_text_files(model_dir: Path) -> TextFiles:
    """Read tokenizer.json, tokenizer_config.json and chat_template.jinja, which overrides the template in the
    configuration.

    Raises:
        ModelLoadError: a file is missing, too large or malformed.
    """
    config = _config(_read(model_dir, "tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES))
    source = _read(model_dir, "chat_template.jinja", MAX_TEMPLATE_BYTES)
    tokenizer = _read(model_dir, "tokenizer.json", MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        raise ModelLoadError("tokenizer.json is missing")
    templates = _templates(config.get("chat_template"))
    if source is not None:
        try:
            templates[DEFAULT_TEMPLATE] = source.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError("chat_template.jinja is not UTF-8") from error
    return TextFiles(tokenizer, templates, _special(config))


def _read(model_dir: Path, name: str, limit: int) -> bytes | None:
    try:
        with (model_dir / name).open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise ModelLoadError(f"{name} is larger than {limit} bytes")
    return data


def _config(data: bytes | None) -> dict[str, object]:
    if data is None:
        return {}
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"tokenizer_config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError("tokenizer_config.json is not an object")
    return config


def _templates(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    templates = {}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        source = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(source, str):
            raise ModelLoadError("tokenizer_config.json: chat_template is malformed")
        if name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE):
            templates[name] = source
    return templates


def _special(config: Mapping[str, object]) -> dict[str, str]:
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    return special
