"""Validation of public prefixes in policy files: permitted tenants, content, and errors. Pure: ``policy.files`` has
read the files beside the policy."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError

from policy.model import IsolationClass, PublicPrefix, Route, Tenant
from policy.routes import reachable_alone
from policy.schema import MAX_PUBLIC_BYTES, MAX_PUBLIC_MESSAGES, PrefixMessageSchema, PublicPrefixSchema

_MESSAGES = TypeAdapter(list[PrefixMessageSchema])


class PrefixError(Exception):
    """A public prefix cannot be used; ``key`` names the wrong part."""

    def __init__(self, key: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def read_prefix(
    name: str,
    content: PublicPrefixSchema,
    files: Mapping[str, str],
    tenants: Mapping[str, Tenant],
    routes: Mapping[str, Route],
) -> PublicPrefix:
    """Validate one prefix against the tenants of the policy.

    Raises:
        PrefixError: it has no content, several, or too much; or it names a tenant that cannot use it.
    """
    given = [key for key in ("text", "messages", "file") if getattr(content, key) is not None]
    if len(given) != 1:
        raise PrefixError((), f"exactly one of text, messages and file says what it is; found {len(given)} of them")
    chat, source = _source(content, files)
    size = len(source.encode("utf-8", "replace"))
    if size > MAX_PUBLIC_BYTES:
        raise PrefixError((given[0],), f"a public prefix has at most {MAX_PUBLIC_BYTES} bytes; this one has {size}")
    return PublicPrefix(
        id=name, model=content.model, chat=chat, source=source, tenants=_members(content, tenants, routes)
    )


def _source(content: PublicPrefixSchema, files: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether the prefix is a conversation, and its content."""
    if content.text is not None:
        return False, content.text
    if content.messages is not None:
        return True, _json(content.messages)
    assert content.file is not None, "one of the three is given"
    text = files.get(content.file)
    if text is None:
        raise PrefixError(("file",), f"beside the policy there is no UTF-8 text public/{content.file}")
    if not text:
        raise PrefixError(("file",), f"the file public/{content.file} is empty")
    if content.file.endswith(".txt"):
        return False, text
    try:
        messages = _MESSAGES.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise PrefixError(("file",), f"public/{content.file} is no list of messages: {where}: {first['msg']}") from None
    if not 0 < len(messages) <= MAX_PUBLIC_MESSAGES:
        message = f"public/{content.file} has {len(messages)} messages; expected 1 to {MAX_PUBLIC_MESSAGES}"
        raise PrefixError(("file",), message)
    return True, _json(messages)


def _json(messages: list[PrefixMessageSchema]) -> str:
    rows = [{"role": message.role, "content": message.content} for message in messages]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


def _members(
    content: PublicPrefixSchema, tenants: Mapping[str, Tenant], routes: Mapping[str, Route]
) -> tuple[str, ...]:
    # Thousands of tenants are asked about one model.
    routes = {alias: route for alias, route in routes.items() if content.model in route.models}
    if content.tenants == "all":
        return tuple(
            sorted(name for name, tenant in tenants.items() if objection(tenant, name, content.model, routes) is None)
        )
    for index, name in enumerate(content.tenants):
        reason = objection(tenants.get(name), name, content.model, routes)
        if reason is not None:
            raise PrefixError(("tenants", index), reason)
    return tuple(sorted(set(content.tenants)))


def objection(tenant: Tenant | None, name: str, model: str, routes: Mapping[str, Route]) -> str | None:
    """Return the reason why a tenant cannot use a public prefix of this model; None when it can."""
    if tenant is None:
        return f"there is no tenant {name!r}"
    if tenant.isolation_class is not IsolationClass.SHARED:
        return f"tenant {name!r} is of class {tenant.isolation_class.value}, which shares nothing"
    # What is computed with an adapter begins with no public prefix.
    if not reachable_alone(routes, tenant.models, tenant.adapters, (model,)):
        return f"tenant {name!r} may not use the model {model!r}"
    return None
