"""``athanor policy explain``: the decision on one request, with the rule that makes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data
from policy.model import Feature

if TYPE_CHECKING:
    from policy.decision import Decision
    from policy.model import PolicySet
    from policy.routes import RouteChoice
    from policy.simulate import Load

EXAMPLES = """
athanor policy explain policy.yaml --tenant alpha --model athanor-mini | before the prompt is tokenised
athanor policy explain policy.yaml --credential key:alpha-1 --model athanor-mini --input-tokens 900 | with its count
athanor policy explain policy.yaml --tenant alpha --model athanor-mini --running 8 -o json | while eight run
athanor policy explain policy.yaml --tenant alpha --model fast --unready athanor-mini | where a route leads
"""

Names = list[str] | None
Unready = Annotated[Names, typer.Option(metavar="NAME", help="Model that cannot serve; may be repeated.")]
Busy = Annotated[Names, typer.Option(metavar="NAME", help="Model in which requests wait; may be repeated.")]


def explain(  # noqa: PLR0913 - a parameter is an option
    path: Annotated[Path, typer.Argument(metavar="POLICY", help="File or folder of the policy.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="Served model, or route, that is asked for.")],
    tenant: Annotated[str | None, typer.Option(metavar="ID", help="Tenant that asks.")] = None,
    credential: Annotated[
        str | None, typer.Option(metavar="NAME", help="Credential in its place: key:ID or a SPIFFE URI.")
    ] = None,
    input_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Prompt tokens [not counted].")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Output tokens for each choice [as many as allowed].")
    ] = None,
    choices: Annotated[int, typer.Option(metavar="N", min=1, help="Outputs asked for.")] = 1,
    feature: Annotated[
        Feature | None, typer.Option(metavar="NAME", help="What it uses: structured_output, tokenize or tools.")
    ] = None,
    running: Annotated[int, typer.Option(metavar="N", min=0, help="The tenant's running requests.")] = 0,
    requests_left: Annotated[
        int | None, typer.Option(metavar="N", help="Requests that it has left in this minute [all].")
    ] = None,
    tokens_left: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that it has left in this minute [all].")
    ] = None,
    spent_today: Annotated[
        float, typer.Option(metavar="AMOUNT", min=0, help="What it has spent today, in the policy's currency.")
    ] = 0.0,
    spent_this_month: Annotated[
        float, typer.Option(metavar="AMOUNT", min=0, help="What it has spent this month.")
    ] = 0.0,
    unready: Unready = None,
    busy: Busy = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Explain the decision on one request, and name its rule.

    Shows the numbers that were compared and what is granted. Decides as the gateway does: before the prompt is
    tokenised, then with --input-tokens. Of a route it shows where it leads, and the model that is chosen while all can
    serve, or those of --unready and --busy cannot. Nothing that runs is asked.

    Exit codes: 0 allowed; 1 denied, or the policy has problems.
    """
    from appliance.operator.cli.policy_sources import load
    from policy.simulate import Question, chosen, decide

    if (tenant is None) == (credential is None):
        fail(exits.USAGE, "exactly one of --tenant and --credential names the caller")
    question = Question(
        tenant=tenant,
        credential=credential,
        model=model,
        input_tokens=input_tokens,
        max_tokens=max_tokens,
        choices=choices,
        feature=feature,
    )
    policy = load(path, output_format)
    now = _load(running, requests_left, tokens_left, spent_today, spent_this_month)
    now = replace(now, unready=tuple(unready or ()), busy=tuple(busy or ()))
    decision, choice = decide(policy, question, now), chosen(policy, question, now)
    _show(policy, tenant or policy.principals.get(credential or "", ""), model, decision, choice, output_format)
    raise typer.Exit(exits.OK if decision.allowed else exits.REFUSED)


def _load(running: int, requests_left: int | None, tokens_left: int | None, today: float, this_month: float) -> Load:
    """Load of the tenant at this moment of the day and the month."""
    import time

    from appliance.common.usage.periods import period_of
    from policy.simulate import Load

    now = time.time()
    period = period_of(now)
    return Load(
        running=running,
        requests_left=requests_left,
        tokens_left=tokens_left,
        spent_today=today,
        spent_this_month=this_month,
        day_left_s=period.day_ends - now,
        month_left_s=period.month_ends - now,
    )


def _show(
    policy: PolicySet, tenant: str, model: str, decision: Decision, choice: RouteChoice | None, output_format: Format
) -> None:
    from dataclasses import asdict

    from rich.text import Text

    from appliance.common.figures import printable
    from policy.explain import explain as explained
    from policy.explain import explain_route

    known = tenant if tenant in policy.tenants else None
    routed = None if choice is None else {"alias": model, **asdict(choice)}
    if print_data({"tenant": known, **asdict(decision), "route": routed}, output_format):
        return
    first, *rest = explained(decision).splitlines()
    if choice is not None:
        rest[:0] = explain_route(policy.routes[model], choice).splitlines()
    effect, _, message = first.partition(": ")
    console = output()
    style = "bold green" if decision.allowed else "bold red"
    console.print(Text.assemble((effect, style), f": {printable(message)}"), soft_wrap=True)
    for line in rest:
        name, _, value = line.partition(": ")
        console.print(Text.assemble((f"{name}: ", "dim"), printable(value)), soft_wrap=True)
