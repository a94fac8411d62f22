"""A small supervisor in a process of its own: boots one sandbox and says as JSON lines what happens.

Arguments: directories for ``sys.path`` (joined by ':'), runsc, run directory, mode, the sandbox's code and arguments.
``once`` waits for the sandbox's end and deletes it; ``stay`` waits to be killed; ``clean`` only clears up.
"""

import json
import os
import sys
from pathlib import Path

paths, runsc, run_dir, mode, code, *arguments = sys.argv[1:]
sys.path[:0] = paths.split(":")

from isolation import userns  # noqa: E402
from isolation.environment import guest_environment  # noqa: E402
from isolation.gvisor import GvisorRuntime  # noqa: E402
from isolation.python_rootfs import python_rootfs  # noqa: E402
from isolation.runsc import find_runsc  # noqa: E402
from isolation.spec import Limits, SandboxSpec  # noqa: E402


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
    sandbox = runtime.boot(SandboxSpec("life", argv, guest_environment(threads=1), root, (), limits))
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
