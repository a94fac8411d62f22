"""The ``athanor`` command. Each subcommand lives in a module of its own and imports what is heavy
only when it runs, so that help and completion are instant.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from appliance.common.quick_dataclasses import quicken_dataclasses
from appliance.operator.cli import (
    attest,
    audit,
    audit_export,
    audit_tiles,
    bench,
    bundle,
    config,
    console,
    demo,
    doctor,
    fleet,
    fleet_members,
    guarded,
    image,
    image_store,
    install,
    kernels,
    key,
    key_list,
    logs,
    model,
    model_bench,
    model_cache,
    model_compare,
    model_serving,
    model_sleep,
    model_verify,
    package,
    policy,
    policy_cases,
    policy_diff,
    policy_edit,
    policy_explain,
    policy_init,
    policy_shadow,
    policy_sign,
    policy_versions,
    reload,
    sandbox,
    selftest,
    serve,
    state,
    statement,
    status,
    tenant,
    tenant_add,
    tenant_list,
    tenant_remove,
    tenant_show,
    tenant_usage,
    top,
    traces,
    usage,
    version,
)
from appliance.operator.cli.help import HelpCommand, HelpGroup

HELP_OPTIONS = ("-h", "--help")

RUN = "Run"
WATCH = "Watch"
GOVERN = "Govern"
MORE = "More"

EXAMPLES = """
athanor demo | a first answer, from nothing
athanor status | sandboxes, tenants, policy
athanor traces 7f3a9c | one request, phase by phase
athanor policy check policy.yaml | problems with line and column
"""

app = typer.Typer(
    name="athanor",
    cls=HelpGroup,
    help="Serve language models to tenants who do not trust each other.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Its tracebacks would be long and show what our own errors say better.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
)


@app.callback()
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=version.callback, help="Print the version.")
    ] = False,
) -> None:
    """The root takes no options but these. Commands that document this application find it in the context, and those
    that start an appliance find there whether this process is theirs alone."""
    context.meta[guarded.OWN_PROCESS] = context.obj == guarded.OWN_PROCESS
    context.obj = app


def _group(name: str, help_text: str, panel: str) -> typer.Typer:
    group = typer.Typer(cls=HelpGroup, no_args_is_help=True, rich_markup_mode="rich")
    app.add_typer(group, name=name, help=help_text, rich_help_panel=panel)
    return group


def _add(
    panel: str,
    name: str,
    function: object,
    epilog: str,
    to: typer.Typer = app,
    *,
    kind: type[HelpCommand] = HelpCommand,
) -> None:
    register = to.command(name, cls=kind, epilog=epilog, rich_help_panel=panel)
    register(function)  # type: ignore[type-var]  # any function that typer can read


_add(RUN, "demo", demo.demo, demo.EXAMPLES)
_add(RUN, "serve", serve.serve, serve.EXAMPLES)
_add(RUN, "install", install.install, install.INSTALL_EXAMPLES)
_add(RUN, "uninstall", install.uninstall, install.UNINSTALL_EXAMPLES)
_add(WATCH, "status", status.status, status.EXAMPLES)
_add(WATCH, "top", top.top, top.EXAMPLES)
_add(WATCH, "console", console.console, console.EXAMPLES)
_add(WATCH, "traces", traces.traces, traces.EXAMPLES)
_add(WATCH, "logs", logs.logs, logs.EXAMPLES)
_add(WATCH, "doctor", doctor.doctor, doctor.EXAMPLES)
_add(WATCH, "bundle", bundle.bundle, bundle.EXAMPLES)
_add(WATCH, "bench", bench.bench, bench.EXAMPLES, kind=bench.BenchCommand)
_add(WATCH, "selftest", selftest.selftest, selftest.EXAMPLES)
_config = _group("config", "List configuration keys, show values and their origins.", GOVERN)
_add("Commands", "reference", config.reference, config.REFERENCE_EXAMPLES, _config)
_add("Commands", "show", config.show, config.SHOW_EXAMPLES, _config)
_policy = _group("policy", "Write, check, compare, test, apply and roll back policies.", GOVERN)
_add("Commands", "init", policy_init.init, policy_init.INIT_EXAMPLES, _policy)
_add("Commands", "check", policy.check, policy.EXAMPLES, _policy)
_add("Commands", "diff", policy_diff.diff, policy_diff.EXAMPLES, _policy)
_add("Commands", "explain", policy_explain.explain, policy_explain.EXAMPLES, _policy)
_add("Commands", "test", policy_cases.run, policy_cases.EXAMPLES, _policy)
_add("Commands", "schema", policy_init.schema, policy_init.SCHEMA_EXAMPLES, _policy)
_add("Commands", "shadow", policy_shadow.shadow, policy_shadow.EXAMPLES, _policy)
_add("Commands", "sign", policy_sign.sign, policy_sign.SIGN_EXAMPLES, _policy)
_add("Commands", "edit", policy_edit.edit, policy_edit.EXAMPLES, _policy)
_add("Commands", "apply", policy_versions.apply, policy_versions.APPLY_EXAMPLES, _policy)
_add("Commands", "history", policy_versions.history, policy_versions.HISTORY_EXAMPLES, _policy)
_add("Commands", "rollback", policy_versions.rollback, policy_versions.ROLLBACK_EXAMPLES, _policy)
_add(GOVERN, "reload", reload.reload, reload.EXAMPLES)
_add(GOVERN, "usage", usage.usage, usage.EXAMPLES)
_key = _group("key", "List, create, import, rotate and revoke API keys.", GOVERN)
_add("Commands", "list", key_list.list_keys, key_list.EXAMPLES, _key)
_add("Commands", "create", key.create, key.EXAMPLES, _key)
_add("Commands", "import", key.import_keys, key.IMPORT_EXAMPLES, _key)
_add("Commands", "rotate", key.rotate, key.ROTATE_EXAMPLES, _key)
_add("Commands", "revoke", key.revoke, key.REVOKE_EXAMPLES, _key)
_audit = _group("audit", "Verify, read and export the audit log.", GOVERN)
_add("Commands", "verify", audit.verify, audit.VERIFY_EXAMPLES, _audit)
_add("Commands", "show", audit.show, audit.SHOW_EXAMPLES, _audit)
_add("Commands", "export", audit_export.export, audit_export.EXAMPLES, _audit)
_add("Commands", "tiles", audit_tiles.tiles, audit_tiles.TILES_EXAMPLES, _audit)
_add("Commands", "witness", audit_tiles.witness, audit_tiles.WITNESS_EXAMPLES, _audit)
_add("Commands", "prove", audit_tiles.prove, audit_tiles.PROVE_EXAMPLES, _audit)
_statement = _group("statement", "Make and verify statements of what a tenant is charged for.", GOVERN)
_add("Commands", "create", statement.create, statement.CREATE_EXAMPLES, _statement)
_add("Commands", "verify", statement.verify, statement.VERIFY_EXAMPLES, _statement)
_attest = _group("attest", "Ask, as a tenant, what serves its requests; verify the answer.", GOVERN)
_add("Commands", "ask", attest.ask, attest.ASK_EXAMPLES, _attest)
_add("Commands", "verify", attest.verify, attest.VERIFY_EXAMPLES, _attest)
_package = _group("package", "Build packages of this installation.", MORE)
_add("Commands", "deb", package.deb, package.DEB_EXAMPLES, _package)
_tenant = _group("tenant", "Add, list, show and remove tenants; destroy and renew their keys.", GOVERN)
_add("Commands", "add", tenant_add.add, tenant_add.EXAMPLES, _tenant)
_add("Commands", "list", tenant_list.list_tenants, tenant_list.EXAMPLES, _tenant)
_add("Commands", "show", tenant_show.show, tenant_show.EXAMPLES, _tenant)
_add("Commands", "remove", tenant_remove.remove, tenant_remove.EXAMPLES, _tenant)
_add("Commands", "usage", tenant_usage.usage, tenant_usage.EXAMPLES, _tenant)
_add("Commands", "shred", tenant.shred, tenant.SHRED_EXAMPLES, _tenant)
_add("Commands", "rotate", tenant.rotate, tenant.ROTATE_EXAMPLES, _tenant)
_add("Commands", "release", tenant.release, tenant.RELEASE_EXAMPLES, _tenant)
_add("Commands", "rewrap", tenant.rewrap, tenant.REWRAP_EXAMPLES, _tenant)
_add("Commands", "root", tenant.root_key, tenant.ROOT_EXAMPLES, _tenant)
_image = _group("image", "Build, verify, sign and choose the sandboxes' image.", MORE)
_add("Commands", "build", image.build, image.BUILD_EXAMPLES, _image)
_add("Commands", "verify", image.verify, image.VERIFY_EXAMPLES, _image)
_add("Commands", "sign", image.sign, image.SIGN_EXAMPLES, _image)
_add("Commands", "list", image_store.list_images, image_store.LIST_EXAMPLES, _image)
_add("Commands", "add", image_store.add, image_store.ADD_EXAMPLES, _image)
_add("Commands", "use", image_store.use, image_store.USE_EXAMPLES, _image)
_add("Commands", "rollback", image_store.rollback, image_store.ROLLBACK_EXAMPLES, _image)
_add("Commands", "remove", image_store.remove, image_store.REMOVE_EXAMPLES, _image)
_state = _group("state", "Show the state version; restore a backup.", MORE)
_add("Commands", "show", state.show, state.SHOW_EXAMPLES, _state)
_add("Commands", "restore", state.restore, state.RESTORE_EXAMPLES, _state)
_kernels = _group("kernels", "Compile the engine's kernels, for this machine or for GPUs.", MORE)
_add("Commands", "build", kernels.build, kernels.BUILD_EXAMPLES, _kernels)
_add("Commands", "gpu", kernels.gpu, kernels.GPU_EXAMPLES, _kernels)
_fleet = _group("fleet", "Show, compare and drain the hosts of a fleet; sign its list of members.", MORE)
_add("Commands", "status", fleet.status, fleet.STATUS_EXAMPLES, _fleet)
_add("Commands", "diff", fleet.diff, fleet.DIFF_EXAMPLES, _fleet)
_add("Commands", "drain", fleet.drain, fleet.DRAIN_EXAMPLES, _fleet)
_add("Commands", "member-key", fleet_members.member_key, fleet_members.MEMBER_KEY_EXAMPLES, _fleet)
_add("Commands", "sign-members", fleet_members.sign_members, fleet_members.SIGN_MEMBERS_EXAMPLES, _fleet)
_sandbox = _group("sandbox", "Compare the sandboxes' programs with their lists of system calls.", MORE)
_add("Commands", "calls", sandbox.calls, sandbox.CALLS_EXAMPLES, _sandbox)
_model = _group("model", "Serve further models and stop them; pull, convert, verify and pin models.", MORE)
_add("Commands", "add", model_serving.add, model_serving.ADD_EXAMPLES, _model)
_add("Commands", "stop", model_serving.stop, model_serving.STOP_EXAMPLES, _model)
_add("Commands", "sleep", model_sleep.sleep, model_sleep.SLEEP_EXAMPLES, _model)
_add("Commands", "wake", model_sleep.wake, model_sleep.WAKE_EXAMPLES, _model)
_add("Commands", "bench", model_bench.bench, model_bench.BENCH_EXAMPLES, _model)
_add("Commands", "convert", model.convert, model.CONVERT_EXAMPLES, _model)
_add("Commands", "compare", model_compare.compare, model_compare.COMPARE_EXAMPLES, _model)
_add("Commands", "digest", model.digest, model.DIGEST_EXAMPLES, _model)
_add("Commands", "manifest", model_cache.manifest, model_cache.MANIFEST_EXAMPLES, _model)
_add("Commands", "pull", model_cache.pull, model_cache.PULL_EXAMPLES, _model)
_add("Commands", "list", model_cache.list_models, model_cache.LIST_EXAMPLES, _model)
_add("Commands", "show", model_cache.show, model_cache.SHOW_EXAMPLES, _model)
_add("Commands", "verify", model_verify.verify, model_verify.VERIFY_EXAMPLES, _model)
_add("Commands", "pin", model_cache.pin, model_cache.PIN_EXAMPLES, _model)
_add("Commands", "unpin", model_cache.unpin, model_cache.UNPIN_EXAMPLES, _model)
_add("Commands", "remove", model_cache.remove, model_cache.REMOVE_EXAMPLES, _model)
_add(MORE, "version", version.version, "")


def for_line(words: Sequence[str]) -> typer.Typer:
    """The application as far as a command line needs it: the command or the group that its first word names, and for
    the overview what that shows of each. All of it where that is no such word: completion, and mistakes, which are told
    with the names that are alike.

    Typer reads the signature of every command that it is given, and that of all takes as long as everything else that
    a command does at its start.
    """
    name = words[0] if words else None
    if name in HELP_OPTIONS:
        return _overview()
    part = copy.copy(app)
    part.registered_commands = [one for one in app.registered_commands if one.name == name]
    part.registered_groups = [one for one in app.registered_groups if one.name == name]
    return part if part.registered_commands or part.registered_groups else app


def _overview() -> typer.Typer:
    """The application with the names and help of all commands and groups, and without what they take."""
    shown, nothing = copy.copy(app), typer.Typer(cls=HelpGroup)
    shown.registered_commands = []
    for command in app.registered_commands:
        one = copy.copy(command)
        one.help, one.callback = command.help or inspect.getdoc(command.callback), _nothing
        shown.registered_commands.append(one)
    shown.registered_groups = []
    for group in app.registered_groups:
        other = copy.copy(group)
        other.typer_instance = nothing
        shown.registered_groups.append(other)
    return shown


def _nothing() -> None:
    """What commands of the overview do: none of them is called."""


def main() -> None:
    """The entry point of the ``athanor`` script; ends the process with a code of ``exits``."""
    quicken_dataclasses()
    for_line(sys.argv[1:])(prog_name="athanor", obj=guarded.OWN_PROCESS)
