"""Whether the carrier of sealed KV and the store behind it answer, as the supervisor asks them. Blocks."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from appliance.common.carrier_wire import NAME_BYTES, CarrierRequest, ObjectStatus, Order, read_object, send_all
from appliance.common.errors import CarrierError, reason_of
from appliance.operator.doctor.finding import Area, Finding, Subject

ASK_S = 4.0
"""Longest wait: a carrier gives a store 2 s, and a second for the connection."""

_SAID = {
    ObjectStatus.AWAY: "the store does not answer the carrier; the log of athanor-carrier has the reason",
    ObjectStatus.REFUSED: "the store refuses what the carrier asks; its user needs SET, GET and UNLINK",
}


def carrier_problem(path: Path) -> str | None:
    """Ask the carrier on this socket for an object that nobody has; returns why nothing serves, or nothing.

    None: this user may not ask, which says nothing of the carrier.
    """
    until = time.monotonic() + ASK_S
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(ASK_S)
            peer.connect(str(path))
            send_all(peer, (CarrierRequest(Order.GET, (secrets.token_bytes(NAME_BYTES),), (1,)).encode(),), until)
            status, _ = read_object(peer, 1, until)
    except PermissionError:
        return None
    except TimeoutError:
        return f"the carrier does not answer within {ASK_S:g} s"
    except OSError as error:
        return f"the carrier cannot be asked: {reason_of(error)}"
    except CarrierError as error:
        return str(error)
    return _SAID.get(status, "")


def check_carrier(problem: str | None) -> Iterator[Finding]:
    """Judge what the carrier answered; None where it was not asked, which finds nothing."""
    if problem is None:
        return
    subject = Subject(Area.SERVICE, "kv_store")
    if not problem:
        yield subject.ok("the store of sealed KV answers")
        return
    means = "KV leaves no more and does not come back; requests compute it anew"
    yield subject.warning(f"the store of sealed KV does not serve: {problem}", means, "athanor logs, or see kv_store")
