"""``athanor demo``: the embedded model, two tenants with keys, everything in one command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.guarded import guard_command
from appliance.operator.cli.options import Settings
from appliance.operator.cli.terminal import errors, fail, output

if TYPE_CHECKING:
    from appliance.operator.demo import DemoReady

EXAMPLES = """
athanor demo | then paste the command it prints
athanor demo --http-port 0 --json | free port; one JSON line when ready
athanor demo --model ./Qwen3-0.6B | another model beside the embedded one
"""


Model = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", exists=True, help="A model folder to serve besides the embedded one; may be repeated."),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Kernels from `athanor kernels build`; by default those that `make run` compiled.",
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where sandboxes are saved for quick starts, or `off`; demos may share one."),
]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe-no-sandbox", help="Run the engine without gVisor. For development on your own prompts only."
    ),
]


def _port(purpose: str) -> Any:
    return typer.Option(metavar="PORT", min=0, max=65_535, help=purpose)


def demo(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready, for scripts.")] = False,
    http_port: Annotated[int, _port("OpenAI API; 0 is any free one.")] = 8080,
    grpc_port: Annotated[int, _port("gRPC.")] = 8081,
    admin_port: Annotated[int, _port("Metrics, status, traces.")] = 8082,
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="Keys and policy; kept between starts.")] = Path(
        ".athanor"
    ),
    model: Model = None,
    kernels: Kernels = None,
    checkpoints: Checkpoints = None,
    unsafe_no_sandbox: Unsafe = False,
    settings: Settings = None,
) -> None:
    """Serve the embedded model to two tenants, in a sandbox.

    Needs no root, no GPU and no configuration. Everything listens on 127.0.0.1. Keys and policy
    are made at the first start and kept in the state directory; ctrl-c stops it.
    """
    scratch = guard_command(context, temporary=False)
    from appliance.common.errors import ApplianceError
    from appliance.common.log_import import import_structlog

    import_structlog()
    from appliance.operator import demo as appliance_demo
    from isolation.errors import IsolationError

    options = appliance_demo.DemoOptions(
        http_port=http_port,
        grpc_port=grpc_port,
        admin_port=admin_port,
        state_dir=state_dir,
        models=tuple(model or ()),
        unsafe_no_sandbox=unsafe_no_sandbox,
        kernels=kernels,
        checkpoints=Path(checkpoints) if checkpoints not in (None, "off") else None,
        no_checkpoints=checkpoints == "off",
        settings=tuple(settings or ()),
    )
    if not as_json and sys.stderr.isatty():
        errors().print("starting: sandboxes, model, a first token ...", style="dim")
    try:
        # A script reads the one line through a pipe while we keep running, so it is flushed.
        code = appliance_demo.run(
            options,
            (lambda ready: print(ready.to_json(), flush=True)) if as_json else _print_banner,
            note=None if scratch is None else scratch.note,
        )
    except (ApplianceError, IsolationError) as error:
        fail(exits.CANNOT_START, str(error))
    raise typer.Exit(code)


def _print_banner(ready: DemoReady) -> None:
    import shutil

    from appliance.operator.cli.banner import print_banner

    program = "athanor" if shutil.which("athanor") else sys.argv[0]
    print_banner(output(), ready, program)
    sys.stdout.flush()
