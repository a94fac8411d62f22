"""``athanor policy explain``: the decision on one request, with the rule that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.moments import MOMENTS, read_moment
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data
from policy.feature import Feature

if TYPE_CHECKING:
    from policy.decision import Decision
    from policy.loader import Source
    from policy.model import PolicySet
    from policy.origins import Origin
    from policy.request import Content
    from policy.routes import RouteChoice
    from policy.simulate import Load, Question

EXAMPLES = """
athanor policy explain policy.yaml --tenant alpha --model athanor-mini | before the prompt is tokenised
athanor policy explain policy.yaml --credential key:alpha-1 --model athanor-mini --input-tokens 900 | with its count
athanor policy explain policy.yaml --tenant alpha --model athanor-mini --running 8 -o json | while eight run
athanor policy explain --tenant alpha --model athanor-mini | by the policy of the service's configuration
athanor policy explain policy.yaml --tenant alpha --model fast --unready athanor-mini | where a route leads
"""

MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Output tokens for each choice [as many as allowed].")
]
RequestsLeft = Annotated[int | None, typer.Option(metavar="N", help="Requests that it has left in this minute [all].")]
TokensLeft = Annotated[int | None, typer.Option(metavar="N", help="Tokens that it has left in this minute [all].")]
InputTokensLeft = Annotated[
    int | None, typer.Option(metavar="N", help="Prompt tokens left of input_tokens_per_minute [all].")
]
OutputTokensLeft = Annotated[
    int | None, typer.Option(metavar="N", help="Output tokens left of output_tokens_per_minute [all].")
]
KvTokensHeld = Annotated[int, typer.Option(metavar="N", min=0, help="Tokens of KV that its running requests may need.")]
EndUserRunning = Annotated[int, typer.Option(metavar="N", min=0, help="Running requests of the end user.")]
EndUserRequestsLeft = Annotated[
    int | None, typer.Option(metavar="N", help="Requests that the end user has left in this minute [all].")
]
EndUserOutputLeft = Annotated[
    int | None,
    typer.Option("--end-user-output-left", metavar="N", help="Output tokens that the end user has left [all]."),
]
SpentToday = Annotated[
    float, typer.Option(metavar="AMOUNT", min=0, help="What it has spent today, in the policy's currency.")
]
SpentThisMonth = Annotated[float, typer.Option(metavar="AMOUNT", min=0, help="What it has spent this month.")]

Wanted = Annotated[
    Feature | None,
    typer.Option(
        metavar="NAME",
        help="What it uses: structured_output, tokenize, tools, attestation, embeddings, rerank, batches, "
        "stored_responses, wake.",
    ),
]
Credential = Annotated[
    str | None, typer.Option(metavar="NAME", help="Credential in its place: key:ID or a SPIFFE URI.")
]
Names = list[str] | None
Policy = Annotated[
    Path | None, typer.Argument(metavar="[POLICY]", help="File or folder of the policy; that of --config without it.")
]
Fields = Annotated[Names, typer.Option("--field", metavar="NAME", help="Field that it uses; may be repeated.")]
Roles = Annotated[
    Names, typer.Option("--role", metavar="ROLE", help="Role of one of its messages, or plain; may be repeated.")
]
Region = Annotated[str | None, typer.Option(metavar="NAME", help="Region of the appliance [not asked about].")]
Address = Annotated[str | None, typer.Option(metavar="IP", help="Address of the caller [not asked about].")]
At = Annotated[
    str | None, typer.Option(metavar="TIME", help=f"Time of the request, for hours: {MOMENTS} [not asked about].")
]
ContentBytes = Annotated[int, typer.Option(metavar="N", min=0, help="Bytes of its content.")]
Unready = Annotated[Names, typer.Option(metavar="NAME", help="Model that cannot serve; may be repeated.")]
Busy = Annotated[Names, typer.Option(metavar="NAME", help="Model in which requests wait; may be repeated.")]

LAST_YEAR = 9_998
"""Last year of a request's time: what is left of its month must have an end, and dates end with 9999."""

Asleep = Annotated[Names, typer.Option(metavar="NAME", help="Model that sleeps; may be repeated.")]
External = Annotated[
    Names, typer.Option(metavar="NAME", help="Model that is computed outside of the appliance; may be repeated.")
]


def explain(  # noqa: PLR0913 - a parameter is an option
    path: Policy = None,
    *,
    model: Annotated[str, typer.Option(metavar="NAME", help="Served model, or route, that is asked for.")],
    config: Config = DEFAULT_CONFIG,
    tenant: Annotated[str | None, typer.Option(metavar="ID", help="Tenant that asks.")] = None,
    credential: Credential = None,
    input_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Prompt tokens [not counted].")] = None,
    max_tokens: MaxTokens = None,
    choices: Annotated[int, typer.Option(metavar="N", min=1, help="Outputs asked for.")] = 1,
    feature: Wanted = None,
    address: Address = None,
    region: Region = None,
    at: At = None,
    content_bytes: ContentBytes = 0,
    fields: Fields = None,
    roles: Roles = None,
    running: Annotated[int, typer.Option(metavar="N", min=0, help="The tenant's running requests.")] = 0,
    requests_left: RequestsLeft = None,
    tokens_left: TokensLeft = None,
    input_tokens_left: InputTokensLeft = None,
    output_tokens_left: OutputTokensLeft = None,
    queued: Annotated[int, typer.Option(metavar="N", min=0, help="Its requests that wait for a limit.")] = 0,
    kv_tokens_held: KvTokensHeld = 0,
    end_user_running: EndUserRunning = 0,
    end_user_requests_left: EndUserRequestsLeft = None,
    end_user_output_left: EndUserOutputLeft = None,
    spent_today: SpentToday = 0.0,
    spent_this_month: SpentThisMonth = 0.0,
    unready: Unready = None,
    busy: Busy = None,
    asleep: Asleep = None,
    external: External = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Explain the decision on one request, and name its rule.

    Shows the numbers that were compared and what is granted, and where an inherited value is written. Decides as the
    gateway does: before the prompt is tokenised, then with --input-tokens. Of a route it shows where it leads, and the
    model that is chosen while all can serve, or --unready, --busy and --asleep name some. Nothing that runs is asked.

    Exit codes: 0 allowed, or it waits; 1 denied, or the policy has problems.
    """
    from policy.simulate import Load, Question

    _check_caller(tenant, credential)
    moment = None if at is None else _moment(at)
    asked: dict[str, Any] = {"tenant": tenant, "credential": credential, "model": model, "input_tokens": input_tokens}
    asked |= {"max_tokens": max_tokens, "choices": choices, "feature": feature, "region": region, "unix_s": moment}
    question = Question(**asked, address=_address(address), content=_content(content_bytes, fields or (), roles or ()))
    policy, sources = _policy(path, config, output_format)
    now = Load(running=running, queued=queued, requests_left=requests_left, tokens_left=tokens_left)
    now = replace(now, kv_tokens_held=kv_tokens_held, spent_today=spent_today, spent_this_month=spent_this_month)
    now = replace(now, input_tokens_left=input_tokens_left, output_tokens_left=output_tokens_left)
    now = replace(now, end_user_running=end_user_running, end_user_requests_left=end_user_requests_left)
    now = _at_moment(replace(now, end_user_output_tokens_left=end_user_output_left), moment)
    now = _with_states(now, asleep, external, unready, busy)
    shown = _decided(policy, sources, question, now)
    _show(policy, tenant or policy.principals.get(credential or "", ""), shown, output_format)
    raise typer.Exit(exits.REFUSED if shown.denied else exits.OK)


def _check_caller(tenant: str | None, credential: str | None) -> None:
    if (tenant is None) == (credential is None):
        fail(exits.USAGE, "exactly one of --tenant and --credential names the caller")


def _decided(policy: PolicySet, sources: Sequence[Source], question: Question, load: Load) -> _Shown:
    """The decision on a request, with what is shown of it."""
    from policy.origins import find_origin
    from policy.simulate import chosen, decide

    decision = decide(policy, question, load)
    origin = find_origin(sources, decision.rule)
    return _Shown(decision, origin, question.model, chosen(policy, question, load))


def _policy(path: Path | None, config: Path, output_format: Format) -> tuple[PolicySet, list[Source]]:
    """The policy that is asked, with its texts: that of the configuration where no path is given."""
    from appliance.common.config_loader import load_config
    from appliance.operator.cli.policy_sources import load_with_sources

    return load_with_sources(path or load_config(config).policy, output_format)


def _content(size: int, fields: Sequence[str], roles: Sequence[str]) -> Content:
    """What a request holds; a name that no rule can have is a usage error."""
    from policy.content import REQUEST_FIELDS, ROLES
    from policy.request import Content

    for option, names, known in (("--field", fields, [*REQUEST_FIELDS]), ("--role", roles, [*ROLES])):
        for name in names:
            if name not in known:
                fail(exits.USAGE, f"{option} {name}: known are {', '.join(known)}")
    return Content(bytes=size, fields=frozenset(fields), roles=frozenset(roles))


def _address(text: str | None) -> str | None:
    """Return an address; a text that is none is a usage error."""
    from ipaddress import ip_address

    if text is not None:
        try:
            ip_address(text)
        except ValueError:
            fail(exits.USAGE, f"--address {text}: it is no IP address, such as 10.0.0.7 or 2001:db8::7")
    return text


def _moment(text: str) -> float:
    """Return the Unix time of a text; one that is none, or of a year whose end has no date, is a usage error."""
    moment = read_moment(text, datetime.now(UTC), "--at")
    if moment.year > LAST_YEAR:
        fail(exits.USAGE, f"--at {text}: the last year is {LAST_YEAR}")
    return moment.timestamp()


def _check_amounts(*amounts: float) -> None:
    """Check that amounts are some that the usage book can have; others are a usage error."""
    from appliance.common.usage.periods import MOST
    from policy.prices import BILLIONTHS

    for amount in amounts:
        if not 0 <= amount <= MOST / BILLIONTHS:
            fail(exits.USAGE, f"{amount:g} spent: an amount is not below 0 and at most {MOST // BILLIONTHS:,}")


def _with_states(load: Load, asleep: Names, external: Names, unready: Names, busy: Names) -> Load:
    """Return a load with the states of models."""
    asleep_, external_, unready_, busy_ = (tuple(names or ()) for names in (asleep, external, unready, busy))
    return replace(load, asleep=asleep_, external=external_, unready=unready_, busy=busy_)


def _at_moment(load: Load, unix_s: float | None) -> Load:
    """Return a load, of amounts that there can be, with what is left of the day and the month at a Unix time; None for
    now."""
    import time

    from appliance.common.usage.periods import period_of

    _check_amounts(load.spent_today, load.spent_this_month)
    now = time.time() if unix_s is None else unix_s
    period = period_of(now)
    return replace(load, day_left_s=period.day_ends - now, month_left_s=period.month_ends - now)


_STYLES = {"allow": "bold green", "wait": "bold yellow", "deny": "bold red"}
"""Effect -> its style."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is shown of a request's decision."""

    decision: Decision
    origin: Origin | None
    """Where the deciding value is written."""
    model: str
    """Name that was asked for."""
    choice: RouteChoice | None
    """Model that the route of this name leads to; None where it is no route."""

    @property
    def denied(self) -> bool:
        """Whether the request is neither served nor kept waiting."""
        from policy.decision import Effect

        return self.decision.effect is Effect.DENY


def _show(policy: PolicySet, tenant: str, shown: _Shown, output_format: Format) -> None:
    from dataclasses import asdict

    from rich.text import Text

    from appliance.common.figures import printable
    from policy.explain import explain as explained
    from policy.explain import explain_route

    decision, origin, choice = shown.decision, shown.origin, shown.choice
    found = {"tenant": tenant if tenant in policy.tenants else None, **asdict(decision)}
    found["route"] = None if choice is None else {"alias": shown.model, **asdict(choice)}
    if print_data(found | {"origin": None if origin is None else asdict(origin)}, output_format):
        return
    first, *rest = explained(
        decision, str(origin) if origin is not None and origin.path != decision.rule else ""
    ).splitlines()
    if choice is not None:
        rest[:0] = explain_route(policy.routes[shown.model], choice).splitlines()
    effect, _, message = first.partition(": ")
    console = output()
    style = _STYLES[effect]
    console.print(Text.assemble((effect, style), f": {printable(message)}"), soft_wrap=True)
    for line in rest:
        name, _, value = line.partition(": ")
        console.print(Text.assemble((f"{name}: ", "dim"), printable(value)), soft_wrap=True)
