"""Readings of outputs across sandboxes: another one is given all tokens, and goes on where the last had come to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from appliance.common.errors import InternalError, UnavailableError
from appliance.gateway.sandboxes.output_reading import OutputReading
from isolation.ipc.messages import Failed, FailureCode, Finish
from isolation.ipc.output import OutputRead, Part, PartKind, ReadOutput, Thinking


class Link:
    """A text sandbox that notes what it is sent."""

    def __init__(self) -> None:
        self.jobs: list[ReadOutput] = []
        self.closed: list[int] = []

    def close_output(self, request: int) -> None:
        """Note it."""
        self.closed.append(request)


class Client:
    """Sends each job to the sandbox of the moment; the first jobs of ``lost`` come to one that ends."""

    def __init__(self, answer: OutputRead | Failed) -> None:
        self.link = Link()
        self.answer = answer
        self.lost: list[Link] = []

    async def ask(self, make_job: Callable[[Any], ReadOutput], _until: float) -> OutputRead | Failed:
        """Answer."""
        for link in [*self.lost, self.link]:
            link.jobs.append(make_job(link))
        self.lost = []
        return self.answer


def reading(client: Client) -> OutputReading:
    """One with tools, after a prompt that begins the reasoning."""
    return OutputReading(client, 7, b"{}", Thinking.BEGUN, time.monotonic() + 9)  # type: ignore[arg-type]


NEWS = OutputRead(7, False, 0, (Part(PartKind.CONTENT, 0, "x"),))


async def test_a_sandbox_is_told_the_tools_once_and_then_new_tokens_alone() -> None:
    """The first message has tools and state of the reasoning; later ones have neither, and only what is new."""
    client = Client(NEWS)
    one = reading(client)
    assert await one.push([1, 2], Finish.NONE) is NEWS
    await one.push([3], Finish.STOP)
    first, second = client.link.jobs
    assert (first.begins, first.source, first.thinking, list(first.token_ids), first.shown) == (
        True,
        b"{}",
        Thinking.BEGUN,
        [1, 2],
        0,
    )
    assert (second.begins, second.source, list(second.token_ids), second.shown) == (False, b"", [3], 0)
    assert (first.ending, second.ending) == (Finish.NONE, Finish.STOP)


async def test_another_sandbox_is_given_all_tokens_and_shows_none_twice() -> None:
    """What was shown before it is marked so, also where one ends before it answers."""
    client = Client(NEWS)
    one = reading(client)
    await one.push([1, 2], Finish.NONE)
    client.link, lost = Link(), Link()
    client.lost = [lost]
    await one.push([3], Finish.NONE)
    for link in (lost, client.link):
        (job,) = link.jobs
        assert (job.begins, job.source, list(job.token_ids), job.shown) == (True, b"{}", [1, 2, 3], 2)
    one.close()
    one.close()
    assert (lost.closed, client.link.closed) == ([], [7])


@pytest.mark.parametrize(
    ("code", "kind"), [(FailureCode.OVERLOADED, UnavailableError), (FailureCode.INTERNAL, InternalError)]
)
async def test_a_refusal_is_the_request_s_error(code: FailureCode, kind: type[Exception]) -> None:
    """Too many outputs may be sent again; a defect of the sandbox is ours."""
    with pytest.raises(kind):
        await reading(Client(Failed(7, code, "because"))).push([1], Finish.NONE)


def test_an_output_that_was_never_read_needs_no_end() -> None:
    """Nothing is sent for it."""
    client = Client(NEWS)
    reading(client).close()
    assert client.link.closed == []
