"""Cases of a policy: read from YAML, decided as the gateway decides, compared. Every problem has its place in the file.

Pure: the caller reads the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import BaseModel, ValidationError

from policy.case_schema import AskSchema, CaseFileSchema, CaseSchema, ExpectSchema, UseSchema
from policy.decision import Decision
from policy.errors import PolicySchemaError, Problem
from policy.model import PolicySet
from policy.positions import Locator, Path, dotted, load_yaml
from policy.request import Content
from policy.simulate import Load, Question, chosen, decide
from policy.wording import worded

MAX_PROBLEMS = 100
"""Largest number of problems reported for one file."""

RETRY_TOLERANCE_S = 1e-6
"""Largest difference in seconds between an expected retry time and the computed one: float arithmetic."""


@dataclass(frozen=True, slots=True)
class CaseFile:
    """Cases of one file, with the position of each part."""

    name: str
    content: CaseFileSchema
    locator: Locator

    def problem(self, path: Path, message: str) -> Problem:
        """Return a problem with the place of ``path`` in the file."""
        return Problem(self.name, *self.locator(path), dotted(path), message)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one case."""

    name: str
    line: int
    """Line of the case in its file."""
    decision: Decision
    model: str
    """Model that serves: the one that is asked for, or that its route leads to."""
    problems: tuple[Problem, ...]
    """Differences from what is expected; none when the case passes."""

    @property
    def passed(self) -> bool:
        """Return whether the decision is as expected."""
        return not self.problems


def load_cases(text: str, name: str) -> CaseFile:
    """Read a file of cases; ``name`` is the file in its problems.

    Raises:
        PolicySyntaxError: the text is not the YAML we accept (see ``policy.positions``).
        PolicySchemaError: the YAML is no file of cases.
    """
    data, locator = load_yaml(text, name)
    try:
        file = CaseFile(name, CaseFileSchema.model_validate(data), locator)
    except ValidationError as error:
        raise PolicySchemaError(_problems(error, name, locator)[:MAX_PROBLEMS]) from None
    problems = list(_contradictions(file))
    if problems:
        raise PolicySchemaError(problems[:MAX_PROBLEMS])
    return file


def run_cases(file: CaseFile, policy: PolicySet) -> list[CaseResult]:
    """Decide every case and compare, in the order of the file."""
    results = []
    for index, case in enumerate(file.content.cases):
        asked, use = question(case.ask), load(case.use)
        decision, choice = decide(policy, asked, use), chosen(policy, asked, use)
        model = asked.model if choice is None else choice.model
        problems = tuple(_differences(file, ("cases", index, "expect"), case.expect, decision, model))
        results.append(CaseResult(case.name, file.locator(("cases", index))[0], decision, model, problems))
    return results


def question(ask: AskSchema) -> Question:
    """Return the question of a case."""
    values = ask.model_dump()
    at = values.pop("at")
    size, names, roles = (values.pop(key) for key in ("content_bytes", "fields", "roles"))
    content = Content(bytes=size, fields=frozenset(names), roles=frozenset(roles))
    return Question(**values, unix_s=None if at is None else read_moment(at), content=content)


def read_moment(text: str) -> float:
    """Return the Unix time of a moment, which is UTC where it names no zone."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def load(use: UseSchema) -> Load:
    """Return the load of a case."""
    values = use.model_dump()
    return Load(**values | {key: tuple(values[key]) for key in ("unready", "busy", "asleep", "external")})


def found(decision: Decision, model: str | None = None) -> dict[str, str | int | float | None]:
    """Return the parts of a decision that a case can expect, by their keys; ``model`` serves the request, if known."""
    obligations = decision.obligations
    return {
        "effect": decision.effect.value,
        "reason": decision.reason.value,
        "rule": decision.rule,
        "limit": decision.limit,
        "actual": decision.actual,
        "retry_after_s": decision.retry_after_s,
        "granted": obligations.max_output_tokens if obligations is not None else None,
        "downgraded": (obligations.downgraded or None) if obligations is not None else None,
        "namespace": obligations.namespace.value if obligations is not None else None,
        "model": model,
    }


def _differences(file: CaseFile, path: Path, expect: ExpectSchema, decision: Decision, model: str) -> Iterator[Problem]:
    actual = found(decision, model)
    for key in sorted(expect.model_fields_set, key=list(actual).index):
        wanted = getattr(expect, key)
        if _equal(wanted, actual[key]):
            continue
        message = f"expected {_word(wanted)}, found {_word(actual[key])}"
        if key == "effect":
            message += f": {decision.message} ({decision.rule})"
        yield file.problem((*path, key), message)
        if key == "effect":
            # What else differs follows from it.
            return


def _equal(wanted: str | float | None, actual: str | float | None) -> bool:
    if isinstance(wanted, float) and isinstance(actual, int | float):
        return abs(wanted - actual) <= RETRY_TOLERANCE_S
    return wanted == actual


def _word(value: str | float | None) -> str:
    return "none" if value is None else str(value)


def _contradictions(file: CaseFile) -> Iterator[Problem]:
    """Find what each key alone allows and all together do not."""
    if file.content.policy is not None and file.content.policy_file is not None:
        yield file.problem(("policy_file",), "policy and policy_file are both given; leave one out")
    for index, case in enumerate(file.content.cases):
        objection = _objection(case)
        if objection:
            yield file.problem(("cases", index, "ask"), objection)


def _objection(case: CaseSchema) -> str:
    if (case.ask.tenant is None) == (case.ask.credential is None):
        return "exactly one of tenant and credential names the caller"
    if case.ask.input_tokens is None and (case.ask.admitted or case.ask.uncounted or case.ask.longest_input):
        return "admitted, uncounted and longest_input need input_tokens"
    if case.ask.served is not None and not case.ask.admitted:
        return "served is of a request that was admitted: add admitted: true, or leave it out"
    return ""


def _problems(error: ValidationError, name: str, locator: Locator) -> list[Problem]:
    problems = []
    for item in error.errors(include_url=False):
        path: Path = item["loc"]
        unknown = item["type"] == "extra_forbidden"
        place = locator.key(path) if unknown else locator(path)
        problems.append(Problem(name, *place, dotted(path), worded(item, _known(path) if unknown else ())))
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


_BELOW: dict[str, type[BaseModel]] = {"ask": AskSchema, "use": UseSchema, "expect": ExpectSchema}


def _known(path: Sequence[str | int]) -> tuple[str, ...]:
    """Return the valid keys beside an unknown one at ``path``."""
    if len(path) == 1:
        return tuple(CaseFileSchema.model_fields)
    return tuple(_BELOW.get(str(path[-2]), CaseSchema).model_fields)
