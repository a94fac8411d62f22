"""A small supervisor in a process of its own: boots one sandbox and says as JSON lines what happens.

Arguments: directories for ``sys.path`` (joined by ':'), runsc, run directory, mode, the sandbox's code and arguments.
``once`` waits for the sandbox's end and deletes it; ``copy`` does so with a copy of a checkpoint; ``stay`` waits to be
killed; ``clean`` only clears up.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

paths, runsc, run_dir, mode, code, *arguments = sys.argv[1:]
sys.path[:0] = paths.split(":")

from isolation.gvisor.checkpoint import open_store  # noqa: E402
from isolation.gvisor.environment import guest_environment  # noqa: E402
from isolation.gvisor.gvisor_runtime import GvisorRuntime  # noqa: E402
from isolation.gvisor.runsc import find_runsc  # noqa: E402
from isolation.gvisor.snapshot import save_template  # noqa: E402
from isolation.gvisor.spec import Limits, Mount, SandboxSpec  # noqa: E402
from isolation.host import userns  # noqa: E402
from isolation.image.python_rootfs import python_rootfs  # noqa: E402


def say(**values):
    """One JSON line."""
    print(json.dumps(values), flush=True)


if userns.current_profile() is None:
    userns.enter()
runtime = GvisorRuntime(find_runsc([Path(runsc)]), Path(run_dir))
stale = runtime.cleanup_stale()
root = python_rootfs("text")
if mode != "clean":
    argv = (root.python, "-s", "-S", "-P", "-c", code, *arguments)
    limits = Limits(512 << 20)
    spec = SandboxSpec("life", argv, guest_environment(threads=1), root, (), limits)
    image = None
    if mode == "copy":
        places = [Path(run_dir).parent / name for name in ("empty", "met")]
        for place in places:
            place.mkdir()
            place.chmod(0o755)
        (places[1] / "go").write_text("")
        (places[1].parent / "part").write_text("of a copy")
        (places[1].parent / "part").chmod(0o644)
        with open_store(Path(run_dir).parent / "store").draft() as draft:
            spec = replace(spec, folders=("/model",) if runtime.fills_folders else ())
            template = replace(spec, name="template", mounts=(Mount(places[0], "/ipc"),))
            save_template(runtime, template, draft, waits_line="waits", timeout_s=30.0)
            image = open_store(Path(run_dir).parent / "store").keep(draft, "0" * 64, 1.0).folder
        parts = (Mount(places[1].parent / "part", "/model/part"),) if spec.folders else ()
        spec = replace(spec, mounts=(Mount(places[1], "/ipc"), *parts))
    sandbox = runtime.boot(spec, image=image)
    with open(f"/proc/{sandbox.pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    say(
        profile=runtime.profile.value,
        pid=sandbox.pid,
        family=sorted(sandbox.peer_pids),
        uid=int(status["Uid"].split()[0]),
        caps=int(status["CapEff"], 16),
        seccomp=int(status["Seccomp"]),
        mine={name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "mnt", "net", "ipc", "uts")},
        its={name: os.readlink(f"/proc/{sandbox.pid}/ns/{name}") for name in ("user", "mnt", "net", "ipc", "uts")},
    )
    status = sandbox.wait(60 if mode == "once" else 3600)
    sandbox.delete()
    say(status=status, tail=sandbox.output_tail())
left = {part: os.listdir(Path(run_dir, part)) for part in ("bundles", "runsc")}
say(stale=stale, left=left)
runtime.close()
