"""``athanor policy test``: cases of a policy, decided and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.figures import counted
from appliance.operator.cli import exits
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, output, print_data

if TYPE_CHECKING:
    from policy.cases import CaseFile, CaseResult
    from policy.model import PolicySet

EXAMPLES = """
athanor policy test cases.yaml | the file has or names its policy
athanor policy test cases/*.yaml --policy new.yaml | a draft against the cases that have to hold
athanor policy schema --cases | JSON Schema of a file of cases
"""


@dataclass(frozen=True, slots=True)
class _Tested:
    """Results of one file, and its text for problems."""

    file: str
    text: str
    results: list[CaseResult]

    @property
    def failed(self) -> list[CaseResult]:
        """The cases that did not pass."""
        return [result for result in self.results if not result.passed]


def run(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of cases.")],
    policy: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Policy of all cases, in place of the files' own.")
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Decide cases of a policy, and compare with what they expect.

    A case asks: tenant or credential, model, tokens, feature. It expects allow or deny, and the reason, the rule and
    the numbers that it names. A failed case is printed with its place in the file. Nothing that runs is asked.

    Exit codes: 0 every case passes; 1 one does not, or a file has problems.
    """
    from appliance.operator.cli.policy_sources import load

    given = load(policy, output_format) if policy is not None else None
    tested = [_run(path, given, output_format) for path in paths]
    if not print_data(_document(tested), output_format):
        _show(tested)
    raise typer.Exit(exits.REFUSED if any(one.failed for one in tested) else exits.OK)


def _run(path: Path, given: PolicySet | None, output_format: Format) -> _Tested:
    """Run the cases of one file."""
    from appliance.operator.cli.policy_sources import refuse
    from policy.cases import load_cases, run_cases
    from policy.errors import PolicyError
    from policy.loader import Source

    text = _text(path)
    try:
        file = load_cases(text, str(path))
    except PolicyError as error:
        refuse(error, [Source(str(path), text)], output_format)
    return _Tested(str(path), text, run_cases(file, given or _own(file, path, output_format)))


def _text(path: Path) -> str:
    from policy.positions import MAX_TEXT_BYTES

    with os_errors_as(f"cannot read {path}"), path.open("rb") as stream:
        # A byte more than the reader of YAML takes, which then says that the file is too large.
        data = stream.read(MAX_TEXT_BYTES + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8") from error


def _own(file: CaseFile, path: Path, output_format: Format) -> PolicySet:
    """Load the policy that a file of cases has or names."""
    from appliance.operator.cli.policy_sources import load, refuse
    from policy.errors import PolicyError
    from policy.loader import Source, load_policy

    if file.content.policy_file is not None:
        return load(path.parent / file.content.policy_file, output_format)
    if file.content.policy is None:
        raise ConfigError(f"{path} has neither policy nor policy_file; name one with --policy")
    source = Source(f"{path}, policy", file.content.policy)
    try:
        return load_policy([source])
    except PolicyError as error:
        refuse(error, [source], output_format)


def _document(tested: list[_Tested]) -> dict[str, object]:
    from dataclasses import asdict

    from policy.cases import found

    cases = [
        {"file": one.file, "line": result.line, "name": result.name, "passed": result.passed}
        | {"found": found(result.decision, result.model), "problems": [asdict(problem) for problem in result.problems]}
        for one in tested
        for result in one.results
    ]
    return {"ok": not any(one.failed for one in tested), "cases": cases}


def _show(tested: list[_Tested]) -> None:
    from rich.text import Text

    from appliance.common.figures import printable
    from appliance.operator.cli.policy_sources import print_problems
    from appliance.operator.cli.tables import number, table

    console = output()
    for one in tested:
        for result in one.failed:
            console.print(Text.assemble(("failed ", "bold red"), (printable(result.name), "bold")))
            print_problems(result.problems, {one.file: one.text})
    shown = table("FILE", numbers=("CASES", "FAILED"))
    for one in tested:
        shown.add_row(Text(printable(one.file)), number(len(one.results)), number(len(one.failed)))
    console.print(shown)
    cases, failed = sum(len(one.results) for one in tested), sum(len(one.failed) for one in tested)
    verdict = Text("ok", "bold green") if not failed else Text("failed", "bold red")
    rest = f"   {counted(cases, 'case')}" + (f", {failed:,} failed" if failed else "")
    console.print("", Text.assemble(verdict, rest), sep="\n")
