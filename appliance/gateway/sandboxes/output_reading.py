"""One output as the text sandbox reads it: content, reasoning and calls.

The host keeps the output's tokens. A sandbox that takes the place of one that ended gets all of them, and goes on where
the other one had come to: a reading depends on the tokens alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from appliance.common.errors import InternalError, UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.text_client import TextClient
from appliance.gateway.sandboxes.text_link import TextLink
from isolation.ipc.messages import Failed, FailureCode, Finish
from isolation.ipc.output import OutputRead, ReadOutput, Thinking


class OutputReading:
    """Reads one output."""

    def __init__(self, client: TextClient, request: int, source: bytes, thinking: Thinking, until: float) -> None:
        """
        Args:
            client: asks the text sandbox.
            request: id that no other request has.
            source: JSON of the tools, empty for none.
            thinking: where the prompt leaves the model's reasoning.
            until: deadline in monotonic seconds.
        """
        self._client = client
        self._request = request
        self._source = source
        self._thinking = thinking
        self._until = until
        self._token_ids: array[int] = array("I")
        self._link: TextLink | None = None

    async def push(self, token_ids: Sequence[int], ending: Finish) -> OutputRead:
        """Read more tokens; ``ending`` says whether the output ends behind them, and how.

        Raises:
            ApplianceError: no sandbox could read them in time.
        """
        shown = len(self._token_ids)
        self._token_ids.extend(token_ids)

        def job(link: TextLink) -> ReadOutput:
            if link is self._link:
                return ReadOutput(self._request, 0, Thinking.NONE, ending, self._token_ids[shown:], b"")
            self._link = link
            return ReadOutput(
                self._request, shown, self._thinking, ending, self._token_ids[:], self._source, begins=True
            )

        answer = await self._client.ask(job, self._until)
        if isinstance(answer, Failed):
            if answer.code is FailureCode.OVERLOADED:
                raise UnavailableError("too many outputs are read at once", retry_after_s=RETRY_AFTER_S)
            raise InternalError("what reads the model's output met a defect")
        assert isinstance(answer, OutputRead), "a link checks the kind of an answer"
        return answer

    def close(self) -> None:
        """Have the sandbox forget the output; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.close_output(self._request)
