"""The words between gateway and supervisor: to the letter, or refused."""

from __future__ import annotations

import json
import os
import resource
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.control import (
    Attach,
    Control,
    ControlError,
    Fault,
    HandedOver,
    NamespaceQuery,
    Namespaces,
    Release,
    Retention,
    SandboxDown,
    SandboxUp,
    SandboxUse,
    Want,
    Welcome,
    decode,
    encode,
    receive,
    send,
)
from appliance.common.control_models import (
    ApplyModels,
    ModelDrained,
    ModelGone,
    ModelServed,
    ModelsReviewed,
    ReviewModels,
)

MESSAGES: list[Control] = [
    Attach(1),
    Welcome(1, "gvisor/systrap", "none", ["m"]),
    NamespaceQuery(["alpha"]),
    Namespaces({"alpha": "00ff"}),
    Retention({"alpha": 1, "beta": 0}),
    Fault("m", "engine", 3, "broke the protocol"),
    Fault("m", "engine", 3, "broke the protocol", "alpha"),
    Want("m", "alpha"),
    Release("m", "alpha"),
    SandboxUp("m", "text", 1, 42, 0, "00", {"vocab_size": 9}),
    SandboxDown("m", "engine", 1, 2, "failed", "killed", 0.5),
    SandboxUse("m", "engine", 5 << 30, 8 << 30),
    HandedOver("m", "engine", 3, 1),
    HandedOver("m", "engine", 3, 0, "alpha", 1024),
    ModelServed("m", "model", 0, "00ff", "served", 0, ["m:tuned 00ff"], 1, ["bad", "good"]),
    ModelGone("m"),
    ReviewModels("1f", "00ff"),
    ModelsReviewed("1f", ["models.d/m.yaml:1:1: model m: no room"]),
    ApplyModels("1f"),
    ModelDrained("m"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back(message: Control) -> None:
    """Encoding and decoding are each other's inverse."""
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_missing_unknown_and_wrong_are_refused(message: Control) -> None:
    """A message with a key too many, one too few, or a wrong type is no message."""
    values = json.loads(encode(message))
    names = [name for name in values if name != "type"]
    for broken in (
        {**values, "extra": 1},
        {name: value for name, value in values.items() if name != names[0]},
        *({**values, name: wrong} for name in names for wrong in (None, True, [1], {"a": None})),
    ):
        with pytest.raises(ControlError):
            decode(json.dumps(broken).encode())


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_with_the_one_error(data: bytes) -> None:
    """Nothing but ControlError comes out of hostile bytes."""
    with pytest.raises(ControlError):
        decode(data)


def test_descriptors_travel_and_are_close_on_exec() -> None:
    """Three descriptors arrive with their message, and no later child inherits them."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two, open(os.devnull) as file:
        send(one, MESSAGES[5], (file.fileno(),) * 3)
        item = receive(two)
        assert item is not None
        message, fds = item
        assert message == MESSAGES[5] and len(fds) == 3
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)


def test_the_end_of_the_peer_is_told_from_a_message() -> None:
    """A closed socket reads as None."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.close()
    with two:
        assert receive(two) is None


def test_depth_without_end_is_refused_with_the_one_error() -> None:
    """JSON that nests deeper than any parser goes is no message."""
    with pytest.raises(ControlError):
        decode(b"[" * 100_000)


@pytest.mark.parametrize("data", [b"{", b'{"type": "Nothing"}', b"[" * 50_000])
def test_descriptors_beside_rubbish_are_closed(data: bytes) -> None:
    """What comes beside a message that is none does not stay open."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(one, [data], [one.fileno()] * 3)
        with pytest.raises(ControlError):
            receive(two)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_message_whose_descriptors_were_cut_off_is_whole_for_who_repeats(left: int) -> None:
    """Of three descriptors the receiver has room for fewer: it closes those that came and gets the message without any,
    where the peer sends again what did not arrive; everybody else refuses it (control)."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two, open(os.devnull) as file:
        for repeats in (True, False):
            send(one, MESSAGES[5], (file.fileno(),) * 3)
            before = set(os.listdir("/proc/self/fd"))
            taken = [os.dup(file.fileno()) for _ in range(3)]
            limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
            try:
                for _ in range(left):
                    os.close(taken.pop())
                if repeats:
                    assert receive(two, repeats=True) == (MESSAGES[5], ())
                else:
                    with pytest.raises(ControlError, match="cut off"):
                        receive(two)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                for fd in taken:
                    os.close(fd)
            assert set(os.listdir("/proc/self/fd")) == before
