"""Whether the endpoint of an external model answers: asks it for its models, as a client with its key does. Blocks."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

from appliance.common.errors import ConfigError
from appliance.common.external_config import ExternalConfig
from appliance.common.strict_json import JsonError, parse_json

ASK_S = 5.0
"""Longest wait for each step: the connection, and each part of the answer."""

MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of the list of models."""

MAX_KEY_BYTES = 8 << 10


def endpoint_problem(config: ExternalConfig) -> str:
    """Return why an endpoint does not serve its model; empty where it does, as far as its list of models tells."""
    parts = urlsplit(config.url)
    host, headers = parts.hostname or "", {"accept": "application/json", "accept-encoding": "identity"}
    connection: http.client.HTTPConnection | None = None
    try:
        if config.api_key_file is not None:
            headers["authorization"] = f"Bearer {_key(config)}"
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=config.ca_file)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=ASK_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=ASK_S)
        connection.request("GET", parts.path.rstrip("/") + "/models", headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return f"it answers {answer.status} when it is asked for its models"
        return _lacks(answer.read(MAX_ANSWER_BYTES), config.model)
    except TimeoutError:
        return f"it does not answer within {ASK_S:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"it does not answer: {error}"
    except ConfigError as error:
        return error.message
    finally:
        if connection is not None:
            connection.close()


def _key(config: ExternalConfig) -> str:
    assert config.api_key_file is not None
    with config.api_key_file.open("rb") as file:
        key = file.read(MAX_KEY_BYTES).decode("latin-1").strip()
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise ConfigError(f"{config.api_key_file} holds no key")
    return key


def _lacks(answer: bytes, model: str) -> str:
    try:
        listed = parse_json(answer)
    except JsonError as error:
        return f"its list of models is not acceptable JSON: {error}"
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return "it gives no list of models"
    names = [one.get("id") for one in entries if isinstance(one, dict)]
    return "" if model in names else f"it serves no model {model}"
