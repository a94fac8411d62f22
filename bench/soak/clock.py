"""A calendar clock that can be set, for the processes of the harness's mount namespace and for nobody else.

A small library stands before the C library's ``clock_gettime``, ``gettimeofday`` and ``time`` and adds what a shared
file says to the calendar's clocks. It is loaded by way of ``/etc/ld.so.preload`` in a layer over the namespace's own
``/etc`` (ld.so(8)), since the appliance's processes are started with a minimal environment. ``runsc`` is static and
sandboxes see none of it: for them the clock is the machine's.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from bench.soak.errors import UnavailableError
from bench.soak.room import Room, overlay
from isolation.errors import ProcessError
from isolation.host.process import run

COMPILE_S = 60.0

SOURCE = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const double *ahead;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    int fd = open(FILE_NAME, O_RDONLY | O_CLOEXEC);
    void *found = fd < 0 ? MAP_FAILED : mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    ahead = found == MAP_FAILED ? 0 : found;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)) {
        long long ns = (long long)(*ahead * 1e9) + at->tv_nsec;
        at->tv_sec += ns / 1000000000;
        at->tv_nsec = ns % 1000000000;
        if (at->tv_nsec < 0) { at->tv_nsec += 1000000000; at->tv_sec -= 1; }
    }
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def prepare(room: Room) -> Callable[[float], None]:
    """Make processes that are started from now on see a clock that the result sets (seconds ahead of the machine's).

    Raises:
        UnavailableError: nothing compiles or overlays here.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise UnavailableError("no C compiler")
    shared = room.scratch / "clock"
    shared.write_bytes(bytes(mmap.PAGESIZE))
    shared.chmod(0o644)
    source, library = room.scratch / "clock.c", room.scratch / "clock.so"
    source.write_text(SOURCE.replace("FILE_NAME", f'"{shared}"'))
    try:
        run((compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"), timeout_s=COMPILE_S)
    except ProcessError as error:
        raise UnavailableError(f"the clock does not compile: {error}") from error
    overlay(Path("/etc"), room)
    Path("/etc/ld.so.preload").write_text(f"{library}\n")
    fd = os.open(shared, os.O_RDWR | os.O_CLOEXEC)
    try:
        page = mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)

    def ahead(seconds: float) -> None:
        page[:8] = struct.pack("d", seconds)

    return ahead
