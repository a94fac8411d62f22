"""Account of one tenant: what is left of its rates, and what its running requests hold."""

from __future__ import annotations

from dataclasses import dataclass

from policy.limits import Bucket, Rate, charge, full, level, rescale, settle
from policy.model import Limits
from policy.rates import input_rate, output_rate, request_rate, token_rate


@dataclass(frozen=True, slots=True)
class AccountRates:
    """Rates of a tenant; those of input and output tokens are None where there are none of their own."""

    requests: Rate
    tokens: Rate
    input: Rate | None
    output: Rate | None

    @classmethod
    def of(cls, limits: Limits) -> AccountRates:
        """Return the rates that the limits give."""
        return cls(request_rate(limits), token_rate(limits), input_rate(limits), output_rate(limits))


@dataclass(slots=True)
class Account:
    """Buckets of one tenant and its running requests; the arithmetic is that of ``policy.limits``."""

    rates: AccountRates
    requests: Bucket
    tokens: Bucket
    input: Bucket | None
    output: Bucket | None
    concurrency: int = 0
    held_input: int = 0
    """Prompt tokens reserved by requests that are not settled; a rate that is new begins without them."""
    held_output: int = 0

    @classmethod
    def begin(cls, limits: Limits, now: float) -> Account:
        """Return the account of a tenant seen for the first time."""
        rates = AccountRates.of(limits)
        own = _begun(rates.input, 0, now), _begun(rates.output, 0, now)
        return cls(rates, full(rates.requests, now), full(rates.tokens, now), *own)

    def take_request(self, choices: int, now: float) -> None:
        """Take one request of the rate, and a slot for each of its choices."""
        self.requests = Bucket(level(self.requests, self.rates.requests, now) - 1, now)
        self.concurrency += choices

    def take_tokens(self, prompt: int, output: int, now: float) -> None:
        """Take the tokens that a request may use."""
        rates = self.rates
        self.tokens = Bucket(level(self.tokens, rates.tokens, now) - prompt - output, now)
        self.held_input += prompt
        self.held_output += output
        if self.input is not None and rates.input is not None:
            self.input = Bucket(level(self.input, rates.input, now) - prompt, now)
        if self.output is not None and rates.output is not None:
            self.output = Bucket(level(self.output, rates.output, now) - output, now)

    def release(self, prompt: int, output: int, choices: int) -> None:
        """Free the slots and the reserved tokens of a request that has ended."""
        self.concurrency -= choices
        self.held_input -= prompt
        self.held_output -= output

    def refund(self, reserved: tuple[int, int], used: tuple[int, int], now: float) -> None:
        """Give back the tokens that a request did not use; both are prompt and output tokens."""
        rates, (prompt, output) = self.rates, reserved
        self.tokens = settle(self.tokens, rates.tokens, reserved=prompt + output, used=used[0] + used[1], now=now)
        if self.input is not None and rates.input is not None:
            self.input = settle(self.input, rates.input, reserved=prompt, used=used[0], now=now)
        if self.output is not None and rates.output is not None:
            self.output = settle(self.output, rates.output, reserved=output, used=used[1], now=now)

    def charge(self, tokens: int, now: float) -> None:
        """Charge what a refused prompt cost, which nobody could reserve."""
        self.tokens = charge(self.tokens, self.rates.tokens, tokens, now)
        if self.input is not None and self.rates.input is not None:
            self.input = charge(self.input, self.rates.input, tokens, now)

    def cut(self, limits: Limits, now: float) -> None:
        """Follow new limits after the tenant was gone while a request ran: no more is left than they give."""
        rates = self.rates = AccountRates.of(limits)
        self.requests = Bucket(min(self.requests.level, rates.requests.capacity), now)
        self.tokens = Bucket(min(self.tokens.level, rates.tokens.capacity), now)
        self.input, self.output = _begun(rates.input, self.held_input, now), _begun(rates.output, self.held_output, now)

    def follow(self, new: AccountRates, now: float) -> None:
        """Bring the buckets under new rates. A level under the same rate rises as before."""
        old, self.rates = self.rates, new
        if old is new or old == new:
            return
        if old.requests != new.requests:
            self.requests = rescale(self.requests, old.requests, new.requests, now)
        if old.tokens != new.tokens:
            self.tokens = rescale(self.tokens, old.tokens, new.tokens, now)
        self.input = _rescaled(self.input, old.input, new.input, self.held_input, now)
        self.output = _rescaled(self.output, old.output, new.output, self.held_output, now)


def _rescaled(bucket: Bucket | None, old: Rate | None, new: Rate | None, held: int, now: float) -> Bucket | None:
    if bucket is None or old is None or new is None:
        return _begun(new, held, now)
    return bucket if old == new else rescale(bucket, old, new, now)


def _begun(rate: Rate | None, held: int, now: float) -> Bucket | None:
    """Return the bucket of a rate that is new, less what running requests have reserved; None without a rate."""
    return None if rate is None else Bucket(float(rate.capacity - held), now)
