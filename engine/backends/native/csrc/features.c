/* Which instructions this machine runs, found by trying them: one that the processor or a sandbox refuses ends in SIGILL
 * or SIGSEGV, and both are caught here.
 */
#define _GNU_SOURCE
#include "athanor.h"
#include "simd.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static sigjmp_buf escape;
static void escape_now(int number) {
    (void)number;
    siglongjmp(escape, 1);
}

/* Run `trial`; 1 when it ends, 0 when the machine does not know an instruction of it. */
int survives(void (*trial)(void)) {
    struct sigaction action = {0}, old_ill, old_segv;
    action.sa_handler = escape_now;
    sigaction(SIGILL, &action, &old_ill);
    sigaction(SIGSEGV, &action, &old_segv);
    int alive = 0;
    if (!sigsetjmp(escape, 1)) {
        trial();
        alive = 1;
    }
    sigaction(SIGILL, &old_ill, 0);
    sigaction(SIGSEGV, &old_segv, 0);
    return alive;
}

#if defined(__AMX_TILE__)
static void try_tiles(void) {
    static char data[1024];
    configure_tiles();
    _tile_loadd(0, data, 64);
    _tile_release();
}
#endif

/* Whether the tiles may be used: Linux gives their state to a process that asks (arch_prctl, ARCH_REQ_XCOMP_PERM),
 * a sandbox may refuse. Asked once. */
int probe_amx(void) {
#if defined(__AMX_TILE__)
    static int known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, 0x1023, 18) == 0 && survives(try_tiles);
    return known;
#else
    return 0;
#endif
}
