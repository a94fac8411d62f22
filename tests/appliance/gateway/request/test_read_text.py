"""Parts of an output to deltas: content, reasoning, calls, stop strings, ends; and a sandbox that tells nonsense."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from appliance.common.errors import InternalError
from appliance.gateway.generate_request import CallDelta, Delta, FinishReason
from appliance.gateway.request.read_text import ReadText
from isolation.ipc.messages import Finish
from isolation.ipc.output import OutputRead, Part, PartKind

CONTENT, REASONING, CALL, ARGUMENTS, CALLED, REFUSED = PartKind


class Reading:
    """Answers with the parts of a list, one message after the other."""

    def __init__(self, *answers: Sequence[tuple[PartKind, int, str]], over: bool = False) -> None:
        self._answers = [tuple(Part(*part) for part in answer) for answer in answers]
        self._over = over
        self.pushed: list[tuple[list[int], Finish]] = []
        self.closed = 0

    async def push(self, token_ids: Sequence[int], ending: Finish) -> OutputRead:
        """Answer."""
        self.pushed.append((list(token_ids), ending))
        parts = self._answers[len(self.pushed) - 1]
        return OutputRead(1, self._over and len(self.pushed) == len(self._answers), 4, parts)

    def close(self) -> None:
        """Note it."""
        self.closed += 1


def text_of(reading: Reading, stops: Sequence[str] = (), *, shows_reasoning: bool = True) -> ReadText:
    """A text with two tools."""
    names = frozenset(("get", "now"))
    return ReadText(reading, names, stops, None, shows_reasoning=shows_reasoning)  # type: ignore[arg-type]


async def deltas(text: ReadText, *batches: tuple[list[int], Finish]) -> list[tuple[Delta, int]]:
    """The deltas of some batches."""
    return [await text.decode(token_ids, (), finish) for token_ids, finish in batches]


async def test_a_call_is_passed_on_as_it_comes() -> None:
    """Name and id at its beginning, then its arguments, joined within a batch; the end says that it is complete."""
    reading = Reading(
        [(REASONING, 0, "hm"), (CONTENT, 1, "So: "), (CALL, 1, "get"), (ARGUMENTS, 1, '{"n"')],
        [(ARGUMENTS, 0, ": "), (ARGUMENTS, 1, "1}"), (CALLED, 1, ""), (CALL, 1, "now"), (ARGUMENTS, 1, "{}")],
        [(CALLED, 0, "")],
    )
    text = text_of(reading)
    first, second, third = await deltas(text, ([1, 2], Finish.NONE), ([3, 4], Finish.NONE), ([5, 6], Finish.STOP))
    delta = first[0]
    assert (delta.reasoning, delta.text, delta.token_ids, first[1]) == ("hm", "So: ", (1, 2), 2)
    assert len(delta.calls) == 1 and delta.calls[0].call_id.startswith("call_")
    assert (delta.calls[0].index, delta.calls[0].name, delta.calls[0].arguments) == (0, "get", '{"n"')
    more, begun = second[0].calls
    assert more == CallDelta(0, arguments=": 1}")
    assert (begun.index, begun.name, begun.arguments) == (1, "now", "{}")
    assert begun.call_id != delta.calls[0].call_id
    assert (third[0].calls, third[1]) == ((), 2)
    # The token that ends the output has no text.
    assert reading.pushed[-1] == ([5], Finish.STOP)
    assert text.reason(Finish.STOP) is FinishReason.TOOL_CALLS
    assert text.reason(Finish.LENGTH) is FinishReason.LENGTH, "cut, whatever was complete before"
    assert text.reasoning_tokens == 4


async def test_a_call_that_is_cut_is_never_complete() -> None:
    """Its output has reached its limit; control: the one before it was complete."""
    text = text_of(Reading([(CALL, 0, "now"), (ARGUMENTS, 0, "{}"), (CALLED, 0, ""), (CALL, 0, "get")]))
    await deltas(text, ([1], Finish.LENGTH))
    assert text.reason(Finish.LENGTH) is FinishReason.LENGTH


async def test_a_call_that_is_none_is_taken_back() -> None:
    """The reason is kept, what was read of it is content, and the next call has the next number."""
    text = text_of(
        Reading([(CALL, 0, "get"), (REFUSED, 0, "the call is odd"), (CONTENT, 0, "<call>"), (CALL, 0, "now")])
    )
    ((delta, _),) = await deltas(text, ([1], Finish.NONE))
    first, refused, second = delta.calls
    assert (first.index, refused, second.index) == (0, CallDelta(0, refused=True), 1)
    assert (text.refused, delta.text) == ("the call is odd", "<call>")
    assert text.reason(Finish.STOP) is FinishReason.STOP


async def test_a_stop_string_ends_the_content_and_not_the_arguments() -> None:
    """What comes behind it is neither shown nor charged; the string in arguments has no effect."""
    text = text_of(
        Reading(
            [(CALL, 0, "get"), (ARGUMENTS, 0, '{"a": "END"}'), (CALLED, 0, "")],
            [(CONTENT, 0, "so E"), (CONTENT, 1, "ND more"), (CONTENT, 2, "x")],
        ),
        ["END"],
    )
    (first, _), (second, used) = await deltas(text, ([1], Finish.NONE), ([2, 3, 4], Finish.NONE))
    assert first.calls[0].arguments == '{"a": "END"}' and not first.text
    assert (second.text, second.token_ids, used) == ("so ", (2, 3), 2)
    assert text.stopped == "END" and text.over


async def test_the_only_call_ends_the_output() -> None:
    """Tokens behind it are not charged; control: without the sandbox's word the output goes on."""
    for over in (True, False):
        text = text_of(Reading([(CALL, 0, "now"), (ARGUMENTS, 0, "{}"), (CALLED, 1, "")], over=over))
        ((_, used),) = await deltas(text, ([1, 2, 3], Finish.NONE))
        assert (text.over, used) == (over, 2 if over else 3)
        assert text.reason(Finish.NONE) is FinishReason.TOOL_CALLS


async def test_hidden_reasoning_is_counted_and_not_shown() -> None:
    """By the policy's word tokens are charged and counted, and neither text nor ids of theirs are shown. Control: those
    of the content are, and without the word those of the reasoning."""
    answers = [[(REASONING, 0, "secret"), (CONTENT, 1, "x")], [(CONTENT, 0, "y")]]
    for shows in (False, True):
        text = text_of(Reading(*answers), shows_reasoning=shows)
        (first, used), (second, _) = await deltas(text, ([1, 2], Finish.NONE), ([3], Finish.NONE))
        assert (first.reasoning, first.token_ids) == (("secret", (1, 2)) if shows else ("", ()))
        assert (first.text, used, second.token_ids, text.reasoning_tokens) == ("x", 2, (3,), 4)


@pytest.mark.parametrize(
    "parts",
    [
        [(CALL, 0, "rm")],
        [(CALL, 0, "get"), (CALL, 0, "now")],
        [(ARGUMENTS, 0, "{}")],
        [(CALLED, 0, "")],
        [(CALL, 0, "now"), (CALLED, 0, "")] * 129,
    ],
    ids=["a tool that was not offered", "a call in a call", "arguments of none", "the end of none", "too many"],
)
async def test_what_a_sandbox_cannot_say_is_a_defect(parts: list[tuple[PartKind, int, str]]) -> None:
    """A sandbox that was taken over cannot have the caller run a tool that it never offered."""
    with pytest.raises(InternalError):
        await deltas(text_of(Reading(parts)), ([1], Finish.NONE))


async def test_the_end_of_a_text_ends_its_reading() -> None:
    """As often as it is asked for."""
    reading = Reading([])
    text_of(reading).close()
    assert reading.closed == 1
