"""Runs commands of ``athanor`` for methods of the API: what a command says is the answer, how it ends the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from appliance.common.errors import ApplianceError, ConfigError, InvalidRequestError, UnavailableError
from appliance.operator.cli import exits
from appliance.operator.cli.terminal import Said, said
from isolation.errors import IsolationError
from isolation.keys.errors import KeysError
from policy.errors import PolicyError

_ERRORS: dict[int, type[ApplianceError]] = {exits.USAGE: InvalidRequestError, exits.UNREACHABLE: UnavailableError}
"""Exit code of a command to the error; any other one is a ``ConfigError``: refused, and everything is as it was."""


@contextmanager
def commanding(*, problems: bool = False) -> Iterator[Said]:
    """Have functions of commands run inside the block, in this thread; gives what they say. A command that ends itself
    ends the block: with an error where it failed, quietly where it has a document. ``problems``: whether a document of
    a policy's problems is an answer too.

    Raises:
        ApplianceError: the command failed, or its arguments are wrong.
    """
    code = exits.OK
    with said() as found:
        try:
            yield found
        except typer.Exit as end:
            code = end.exit_code
        except (PolicyError, IsolationError, KeysError) as error:
            raise ConfigError(str(error)) from error
    if found.problem or (code != exits.OK and found.data is None):
        raise _ERRORS.get(code, ConfigError)(found.problem or "\n".join(found.lines))
    if not problems and (lines := problems_of(found.data)):
        raise ConfigError("\n".join(lines))


def problems_of(document: Any) -> list[str]:
    """Return the problems of a policy that a command's document tells; none where it tells something else."""
    if not isinstance(document, dict) or document.get("ok") is not False:
        return []
    return [f"{row['file']}:{row['line']}:{row['column']}: {row['message']}" for row in document.get("problems", ())]


def run_command(command: Callable[..., Any], *args: Any, problems: bool = False, **options: Any) -> Said:
    """Run the function of one command.

    Raises:
        ApplianceError: as ``commanding``.
    """
    with commanding(problems=problems) as found:
        command(*args, **options)
    return found
