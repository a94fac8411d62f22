"""Talks to the admin listener, over TCP on loopback or a Unix socket. Standard library only: the
commands that use it answer at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from appliance.common.json_codec import SnapshotError, decode
from appliance.operator.cli import exits
from appliance.operator.cli.terminal import fail

if TYPE_CHECKING:
    import http.client
    import ssl

T = TypeVar("T")

LOOPBACK_ADMIN = "http://127.0.0.1:8082"
"""Admin address of ``athanor demo``, and of a configuration that names none."""

SERVICE_SOCKET = Path("/run/athanor/admin.sock")
"""Admin socket of the installed service, as first configured."""

SERVICE_CONFIG = Path("/etc/athanor")
"""Is there where the service is installed, whether it runs or not."""

ANSWER_S = 10.0
"""Patience for an answer; everything but a reload takes milliseconds."""

MAX_BODY_BYTES = 32 << 20
"""Bytes of an answer: a full trace store is a few MiB."""

NO_LOGIN = "4294967295"
"""Content of /proc/self/loginuid where nobody has logged in (AUDIT_UID_UNSET of linux/audit.h)."""

UNIX = "unix:"

OK = 200
"""HTTP status of an answer to read."""


def default_admin() -> str:
    """Admin address to use when none is given: the installed service's socket where there is one, else
    ``LOOPBACK_ADMIN``."""
    try:
        SERVICE_SOCKET.stat()
    except PermissionError:
        pass  # it is there, and only for the service's group: asking says so
    except OSError:
        return LOOPBACK_ADMIN
    return f"{UNIX}{SERVICE_SOCKET}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and parsed JSON body."""

    status: int
    body: Any

    def message(self) -> str:
        """The listener's own words for a refusal."""
        try:
            return str(self.body["error"]["message"])
        except (KeyError, TypeError):
            return f"the admin listener answered {self.status}"


class UnreachableError(Exception):
    """No admin listener answers on an address, or another program does; the message says which."""


class SilentError(UnreachableError):
    """Somebody listens there and does not answer."""


class AbsentError(UnreachableError):
    """Nobody listens there."""


def ask(
    admin: str, path: str, method: str = "GET", timeout_s: float = ANSWER_S, *, absent: int = exits.UNREACHABLE
) -> Answer:
    """One request to the admin listener at ``http://HOST:PORT``, ``HOST:PORT`` or ``unix:PATH``.

    Ends the command with ``UNREACHABLE`` when nobody answers, or somebody else does, and with ``absent`` when nobody
    listens there.
    """
    try:
        return try_ask(admin, path, method, timeout_s)
    except UnreachableError as error:
        message, hint = error.args
        fail(absent if isinstance(error, AbsentError) else exits.UNREACHABLE, message, hint)


def try_ask(
    admin: str, path: str, method: str = "GET", timeout_s: float = ANSWER_S, tls: ssl.SSLContext | None = None
) -> Answer:
    """Ask, for a command that goes on without an answer. With ``tls`` an address may be ``https://HOST:PORT``.

    Raises:
        UnreachableError: with a message and a hint.
    """
    status, body = _exchange(admin, path, method, timeout_s, tls)
    try:
        return Answer(status, json.loads(body))
    except ValueError:
        raise _stranger(admin) from None


def tell(admin: str, path: str, method: str, timeout_s: float = ANSWER_S) -> None:
    """Send an order and wait for no answer: the listener carries out what it has read, also for a caller that has left.

    Raises:
        UnreachableError: it could not be sent; with a message and a hint.
    """
    import http.client

    connection = _connection(admin, timeout_s, None)
    try:
        connection.request(method, path, headers={"accept": "application/json", **_login(method)})
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(admin, error) from error
    finally:
        connection.close()


def try_text(admin: str, path: str, timeout_s: float = ANSWER_S) -> str:
    """The text of an answer that is no JSON: metrics.

    Raises:
        UnreachableError: with a message and a hint.
    """
    status, body = _exchange(admin, path, "GET", timeout_s)
    if status != OK:
        raise _stranger(admin)
    return body.decode("utf-8", "replace")


def _exchange(
    admin: str, path: str, method: str, timeout_s: float, tls: ssl.SSLContext | None = None
) -> tuple[int, bytes]:
    import http.client

    connection = _connection(admin, timeout_s, tls)
    try:
        connection.request(method, path, headers={"accept": "application/json", **_login(method)})
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES + 1)
    except TimeoutError:
        raise SilentError(
            f"nothing answers at {admin}: no answer within {timeout_s:g} s",
            "something listens there: it hangs, or is busy; `athanor doctor` and `athanor logs -n 20` say more",
        ) from None
    except PermissionError:
        hint = "ask as root, or as a member of the socket's group"
        raise UnreachableError(f"{admin} is not ours to ask: permission denied", hint) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(admin, error) from error
    finally:
        connection.close()
    if len(body) > MAX_BODY_BYTES:
        raise _stranger(admin)
    return response.status, body


def _login(method: str) -> dict[str, str]:
    """Header that tells an order's audit entry who had logged in: after `sudo` the socket's peer is root."""
    if method == "GET":
        return {}
    try:
        login = Path("/proc/self/loginuid").read_text(encoding="ascii").strip()
    except OSError:  # a kernel without audit
        return {}
    from appliance.common.operator_calls import LOGIN_HEADER

    return {} if login == NO_LOGIN else {LOGIN_HEADER: login}


def _stranger(admin: str) -> UnreachableError:
    return UnreachableError(
        f"what answers at {admin} is no admin listener",
        "name the listener with --admin; `listen: admin:` in athanor.yaml has its address",
    )


def _connection(admin: str, timeout_s: float, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
    import http.client

    from appliance.operator.cli.admin_connection import UnixConnection

    if admin.startswith(UNIX):
        return UnixConnection(admin.removeprefix(UNIX), timeout_s)
    parts = urlsplit(admin if "://" in admin else f"http://{admin}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if tls is not None and parts.scheme == "https" and host is not None and parts.path in ("", "/"):
        return http.client.HTTPSConnection(host, port or 443, timeout=timeout_s, context=tls)
    if parts.scheme != "http" or host is None or parts.path not in ("", "/"):
        fail(exits.USAGE, f"{admin} is no admin address", "http://HOST:PORT or unix:PATH")
    return http.client.HTTPConnection(host, port or 80, timeout=timeout_s)


def _unreachable(admin: str, error: Exception) -> UnreachableError:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    start = "start the appliance with `athanor demo`, or name its admin listener with --admin"
    if SERVICE_CONFIG.is_dir():
        start = "`athanor doctor` and `systemctl status athanor.target` say why; --admin names another listener"
    kind = AbsentError if isinstance(error, ConnectionRefusedError | FileNotFoundError) else UnreachableError
    return kind(f"nothing answers at {admin}: {why.lower()}", start)


def read(kind: type[T], answer: Answer, *others: int) -> T:
    """Value in an answer of status 200 or one of ``others``; anything else ends the command."""
    if answer.status not in (OK, *others):
        fail(exits.REFUSED, answer.message())
    try:
        return decode(kind, answer.body)
    except SnapshotError as error:
        fail(
            exits.UNREACHABLE,
            f"the answer is not understood: {error}",
            "the appliance and this command may be of different versions",
        )
