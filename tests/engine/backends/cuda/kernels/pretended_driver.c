/* Stands for a GPU's driver where there is none: it takes machine code and launches, and starts nothing. It writes the
 * name of each kernel that is launched to descriptor 1, so a test sees what reached the driver. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;

CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
/* Enough of everything: shared memory, threads, registers. */
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1 << 20; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuGetErrorString(int error, const char **text) { *text = "pretended"; return 0; }
/* Machine code is an ELF file. */
CUresult cuModuleLoadData(void **module, const void *image) {
  *module = (void *)1;
  return memcmp(image, "\177ELF", 4) == 0 ? 0 : 200;
}
CUresult cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
CUresult cuPointerGetAttribute(void *value, int attribute, unsigned long pointer) {
  *(unsigned long *)value = pointer;
  return 0;
}
/* What the bulk copy engine is to know of memory: nothing here. */
CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const unsigned long *shape,
                                const unsigned long *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int fill) {
  memset(map, 0, 128);
  return 0;
}
CUresult cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  const char *name = function;
  return write(1, name, strlen(name)) < 0 || write(1, "\n", 1) < 0 ? 1 : 0;
}
