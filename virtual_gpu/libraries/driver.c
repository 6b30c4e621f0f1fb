/* libcuda.so.1: one device with one context that is always current. */

int vgpu_attribute(int *value, int number);
int vgpu_kind(const void *pointer);

static void *context = (void *)0x10;

int cuDriverGetVersion(int *version) { return *version = 1000 * CUDA, 0; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGetAttribute(int *value, int number, int device) { return vgpu_attribute(value, number); }
int cuCtxGetCurrent(void **current) { return *current = context, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuDevicePrimaryCtxRetain(void **result, int device) { return *result = context, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuLogsRegisterCallback(void) { return 801; } /* torch 2.15 goes on without it */
/* A kernel that was compiled meanwhile: it has a name, and nothing runs. */
int cuModuleLoadData(void **module, const void *code) { return *module = (void *)0x30, 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)0x40, 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count) { return *count = 1, 0; }
int cuLaunchKernel(void) { return 0; }
int cuPointerGetAttribute(void *value, int number, const void *pointer) {
  switch (number) {
    case 1: return *(void **)value = context, 0;          /* its context */
    case 2: return *(int *)value = vgpu_kind(pointer), 0; /* its kind of memory */
    case 9: return *(int *)value = 0, 0;                  /* its device */
    default: return *(int *)value = 0, 801;
  }
}
