/* Stands for the driver's libnvidia-ml where there is none. Values are in files beside the library, read at each call: a
 * file card0, card1, ... for each card with lines NAME NUMBER; `state` is 0 there, 15 lost, 16 to be reset, -1 hang, -2
 * crash, -3 not listed. The file `init` has what nvmlInit returns. -DOLD leaves out what old drivers have not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CARDS 16
#define UNKNOWN (-999)
typedef int R;
typedef unsigned int U;
typedef unsigned long long L;
typedef struct { int number; L xids; } *Card;
static struct { int number; L xids; } cards[CARDS];

static long long value(const char *file, const char *name) {
  Dl_info here;
  char path[PATH_MAX], word[64];
  long long found, result = UNKNOWN;
  dladdr((void *)value, &here);
  snprintf(path, sizeof path, "%.*s/%s", (int)(strrchr(here.dli_fname, '/') - here.dli_fname), here.dli_fname, file);
  FILE *lines = fopen(path, "r");
  if (!lines) return UNKNOWN;
  while (fscanf(lines, "%63s %lld", word, &found) == 2)
    if (!strcmp(word, name)) result = found;
  fclose(lines);
  return result;
}

static long long of(Card card, const char *name) {
  char file[16];
  snprintf(file, sizeof file, "card%d", card->number);
  return value(file, name);
}

/* 0, or the error that every call about this card gives; 3 is NOT_SUPPORTED. */
static R state(Card card) {
  long long found = of(card, "state");
  while (found == -1) pause();
  if (found == -2) abort();
  return found == UNKNOWN || found == -3 ? 0 : (R)found;
}

#define TOLD(card, name, target) \
  R bad = state(card); \
  if (bad) return bad; \
  if (of(card, name) == UNKNOWN) return 3; \
  *(target) = of(card, name);

R nvmlInitWithFlags(U flags) { long long found = value("init", "status"); return found == UNKNOWN ? 0 : (R)found; }
R nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(R status) { return status == 9 ? "Driver Not Loaded" : "an error"; }
R nvmlDeviceGetCount_v2(U *count) {
  char file[16];
  R bad = nvmlInitWithFlags(0);
  if (bad) return bad;
  for (*count = 0; *count < CARDS; ++*count) {
    snprintf(file, sizeof file, "card%d", *count);
    if (value(file, "state") == UNKNOWN || value(file, "state") == -3) break;
    cards[*count].number = *count;
  }
  return 0;
}
R nvmlDeviceGetHandleByIndex_v2(U index, Card *card) {
  *card = (Card)&cards[index];
  return state(*card) == 15 ? 15 : 0;
}
R nvmlDeviceGetMinorNumber(Card card, U *minor) { *minor = card->number; return 0; }
R nvmlDeviceGetUUID(Card card, char *text, U length) {
  snprintf(text, length, "GPU-0000000%d-aaaa-bbbb-cccc-dddddddddddd", card->number);
  return state(card);
}
R nvmlDeviceGetMemoryInfo(Card card, L *memory) {
  TOLD(card, "total", &memory[0])
  memory[2] = of(card, "used");
  memory[1] = memory[0] - memory[2];
  return 0;
}
R nvmlDeviceGetUtilizationRates(Card card, U *rates) {
  TOLD(card, "busy", &rates[0])
  rates[1] = of(card, "memory_busy");
  return 0;
}
R nvmlDeviceGetPowerUsage(Card card, U *power) { TOLD(card, "power", power) return 0; }
R nvmlDeviceGetEnforcedPowerLimit(Card card, U *power) { TOLD(card, "power_limit", power) return 0; }
R nvmlDeviceGetTemperature(Card card, U sensor, U *degrees) { TOLD(card, "temperature", degrees) return 0; }
R nvmlDeviceGetTemperatureThreshold(Card card, U which, U *degrees) { TOLD(card, "slowdown", degrees) return 0; }
R nvmlDeviceGetComputeRunningProcesses_v3(Card card, U *count, void *target) {
  struct { U pid; L bytes; U instance, compute; } *rows = target;
  R bad = state(card);
  if (bad) return bad;
  if (of(card, "pid") == UNKNOWN) { *count = 0; return 0; }
  if (!rows) { *count = 1; return 7; }
  *count = 1;
  rows[0].pid = (U)of(card, "pid");
  rows[0].bytes = (L)of(card, "held");
  rows[0].instance = rows[0].compute = ~0u;
  return 0;
}
#ifndef OLD
R nvmlDeviceGetTotalEccErrors(Card card, U kind, U since, L *count) {
  if (kind != 1 || since != 0) return 2;
  TOLD(card, "ecc", count)
  return 0;
}
R nvmlDeviceGetRemappedRows(Card card, U *corrected, U *uncorrected, U *pending, U *failed) {
  TOLD(card, "remapped", uncorrected)
  *corrected = 0;
  *pending = of(card, "remap_pending") == 1;
  *failed = of(card, "remap_failed") == 1;
  return 0;
}
R nvmlDeviceGetCurrentClocksEventReasons(Card card, L *bits) { TOLD(card, "clocks", bits) return 0; }
R nvmlDeviceGetMigMode(Card card, U *now, U *later) { TOLD(card, "mig", now) *later = *now; return 0; }
R nvmlEventSetCreate(void **set) { *set = cards; return 0; }
R nvmlDeviceRegisterEvents(Card card, L kinds, void *set) { return kinds == 8 && set == cards ? 0 : 2; }
/* One event for each time that `xids` is higher than what was told; its number is `xid`. */
R nvmlEventSetWait_v2(void *set, void *target, U timeout_ms) {
  struct { Card card; L kind, data; U instance, compute; } *event = target;
  for (U waited = 0;; waited += 5) {
    for (int number = 0; number < CARDS; number++) {
      long long wanted = of((Card)&cards[number], "xids");
      if (wanted > (long long)cards[number].xids) {
        cards[number].xids++;
        event->card = (Card)&cards[number];
        event->kind = 8;
        event->data = of(event->card, "xid");
        return 0;
      }
    }
    if (waited >= timeout_ms) return 10;
    usleep(5000);
  }
}
#endif
