"""A request to a model's tokenizer alone: token ids of a prompt, or text of token ids, under one decision.

It costs a request of the tenant's rate and a slot while it runs, and no tokens, since no engine works for it: its texts
take turns with the prompts of other tenants, as every prompt's do. What the tokenizer did for a text that cannot be
used is charged as that of any prompt.
"""

from __future__ import annotations

from appliance.common.errors import ContextLengthError
from appliance.gateway.generate_request import Tokenized, TokenizerRequest, TokenPrompt
from appliance.gateway.request.lifecycle import Lifecycle
from policy.feature import Feature


class TokenizerSession:
    """Runs one request to a tokenizer."""

    def __init__(self, life: Lifecycle, request: TokenizerRequest) -> None:
        self.life = life
        self._request = request

    async def tokenize(self) -> Tokenized:
        """Return the token ids of the prompt. They are counted up to twice what the tenant may have in one prompt.

        Raises:
            ApplianceError: typed, at any point.
        """
        life = self.life
        reservation = await life.admit(0, feature=Feature.TOKENIZE)
        await life.place(reservation)
        with life.encoding(reservation, 0) as client:
            token_ids = await client.encode(self._request.prompt, life.until)
            life.outcome.input_tokens = len(token_ids)
        capacity = life.pair.text.capacity
        return Tokenized(token_ids, capacity.max_context if capacity is not None else 0)

    async def detokenize(self) -> str:
        """Return the text of the token ids, of as many as a prompt of the tenant may have twice over.

        Raises:
            ApplianceError: typed, at any point.
        """
        life, prompt = self.life, self._request.prompt
        assert isinstance(prompt, TokenPrompt), "a front end makes no other"
        reservation = await life.admit(0, feature=Feature.TOKENIZE)
        await life.place(reservation)
        with life.encoding(reservation, 0) as client:
            if len(prompt.token_ids) > client.most_counted:
                raise ContextLengthError(
                    f"{len(prompt.token_ids)} token ids are too many; at most {client.most_counted} are taken",
                    param=prompt.param,
                )
            text = await client.text_of(prompt, life.until)
            life.outcome.input_tokens = len(prompt.token_ids)
        return text
