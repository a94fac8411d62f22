"""Runs inside a sandbox (and, as the control, outside): says as one JSON line what this process can see and do.

Arguments: ``inside`` or ``outside``, a port on 127.0.0.1, an address of the host's own and a port there, then host
paths to look for.
"""

import json
import os
import resource
import socket
import sys

WRITE_TO = ["/x", "/etc/x", "/opt/x", "/opt/python/lib/x", "/opt/athanor/engine/x", "/proc/x", "/sys/x", "/dev/x"]


def attempt(action):
    """Run something; give "ok" or the name of its error."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "ok"


def connect(host, port):
    """Try a TCP connection."""
    with socket.socket() as probe:
        probe.settimeout(2)
        probe.connect((host, port))


def write(path):
    """Try to make a file."""
    with open(path, "w") as file:
        file.write("x")
    os.remove(path)


def look(loopback_port, address, port, *paths):
    """What can be seen and reached; changes nothing, so that it may run outside too."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    site = f"/opt/python/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    return {
        "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getegid(), os.getgroups()],
        "caps": {key: int(value, 16) for key, value in status.items() if key.startswith("Cap")},
        "pid": os.getpid(),
        "root": sorted(os.listdir("/")),
        "lib": sorted(os.listdir("/lib")),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "loopback": attempt(lambda: connect("127.0.0.1", int(loopback_port))),
        "outside": attempt(lambda: connect(address, int(port))),
        "paths": {path: os.path.exists(path) for path in paths},
        "site": os.listdir(site) if os.path.isdir(site) else [],
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "hostname": socket.gethostname(),
    }


def push():
    """What can be changed; for the inside only."""
    places = [*WRITE_TO, "/tmp/x", "/dev/shm/x"]
    return {
        "writes": {path: attempt(lambda path=path: write(path)) for path in places},
        "setuid": attempt(lambda: os.setuid(0)),
        "chroot": attempt(lambda: os.chroot("/tmp")),
    }


mode, *arguments = sys.argv[1:]
report = look(*arguments)
if mode == "inside":
    report |= push()
print(json.dumps(report), flush=True)
