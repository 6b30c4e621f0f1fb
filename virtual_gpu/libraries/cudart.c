/* libcudart without a GPU: memory is counted and mapped, streams and events exist, kernels are not run.

   "Device" memory is private memory of this process that costs no page until it is written, so that 80 GiB fit into
   any machine. Copies and fills of up to VGPU_COPY bytes are carried out. The card is described by VGPU_* in the
   environment. CUDA is 12 or 13, whose cudaDeviceProp and cudaPointerAttributes differ (their driver_types.h). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_KERNEL = 209, NOT_SUPPORTED = 801 };
enum { HOST = 1, DEVICE = 2, MANAGED = 3 }; /* cudaMemoryType */
#define GRANULE (2ul << 20)                 /* cudaMalloc takes whole pages of the card's memory */
#define NOTHING(name) int name(void) { return SUCCESS; }

/* ---- the card ---- */

static long fact(const char *name) {
  const char *text = getenv(name);
  if (!text) {
    fprintf(stderr, "virtual_gpu: %s is not set: start it with virtual_gpu.start\n", name);
    abort();
  }
  return atol(text);
}

static size_t total(void) { return fact("VGPU_TOTAL"); }
static size_t context(void) { return fact("VGPU_CONTEXT"); }

/* Of enum cudaDeviceAttr, whose numbers are CUdevice_attribute's. */
static long attribute(int number) {
  switch (number) {
    case 1: case 2: case 3: return 1024;            /* threads of a block, in x, in y */
    case 4: return 64;                              /* in z */
    case 5: return 2147483647;                      /* blocks of a grid in x */
    case 6: case 7: return 65535;                   /* in y, in z */
    case 8: return 49152;                           /* shared memory of a block */
    case 9: return 65536;                           /* constant memory */
    case 10: return 32;                             /* a warp */
    case 11: return 2147483647;                     /* pitch */
    case 12: case 82: return 65536;                 /* registers of a block, of a multiprocessor */
    case 14: return 512;                            /* alignment of textures */
    case 16: return fact("VGPU_MULTIPROCESSORS");
    case 15: case 19: case 31: case 40: case 41: case 78: case 79: case 80: case 83: case 89: case 95: return 1;
    case 51: return 32;                             /* alignment of a texture's pitch */
    case 37: return 256;                            /* memory bus, bits */
    case 38: return 4l << 20;                       /* L2 cache */
    case 39: return fact("VGPU_THREADS");           /* of a multiprocessor */
    case 75: return fact("VGPU_MAJOR");
    case 76: return fact("VGPU_MINOR");
    case 81: return fact("VGPU_SHARED");            /* shared memory of a multiprocessor */
    case 97: return fact("VGPU_SHARED_OPTIN");      /* and what a block may ask for */
    case 106: return fact("VGPU_BLOCKS");           /* of a multiprocessor */
    case 111: return attribute(75) >= 8 ? 1024 : 0; /* shared memory that CUDA keeps of a block */
    case 120: return attribute(75) >= 9;            /* clusters */
    default: return -1;                             /* not known here */
  }
}

int vgpu_unknown(const char *name);
int vgpu_attribute(int *value, int number) {
  long known = attribute(number);
  static char name[32];
  if (known < 0) return snprintf(name, sizeof name, "attribute %d", number), vgpu_unknown(name);
  return *value = (int)known, SUCCESS;
}
int cudaDeviceGetAttribute(int *value, int number, int device) { return vgpu_attribute(value, number); }

struct properties { /* cudaDeviceProp */
  char name[256], uuid[16], luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem, sharedMemPerBlock;
  int regsPerBlock, warpSize;
  size_t memPitch;
  int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if CUDA < 13
  int clockRate;
#endif
  size_t totalConstMem;
  int major, minor;
  size_t textureAlignment, texturePitchAlignment;
#if CUDA < 13
  int deviceOverlap;
#endif
  int multiProcessorCount;
#if CUDA < 13
  int kernelExecTimeoutEnabled;
#endif
  int integrated, canMapHostMemory;
#if CUDA < 13
  int computeMode, maxTexture1DLinear;
#endif
  int textures[39]; /* and surfaces: their largest sizes */
  size_t surfaceAlignment;
  int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver, asyncEngineCount, unifiedAddressing;
#if CUDA < 13
  int memoryClockRate;
#endif
  int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported,
      globalL1CacheSupported, localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if CUDA < 13
  int singleToDoublePrecisionPerfRatio;
#endif
  int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem,
      cooperativeLaunch;
#if CUDA < 13
  int cooperativeMultiDeviceLaunch;
#endif
  size_t sharedMemPerBlockOptin;
  int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor,
      accessPolicyMaxWindowSize;
  size_t reservedSharedMemPerBlock;
  int others[76];
};
_Static_assert(sizeof(struct properties) == (CUDA < 13 ? 1032 : 1008), "cudaDeviceProp has another size");

static int properties(struct properties *it) {
  *it = (struct properties){
      .uuid = "virtual gpu 0000", .totalGlobalMem = total(), .sharedMemPerBlock = attribute(8),
      .regsPerBlock = attribute(12), .warpSize = attribute(10), .memPitch = attribute(11),
      .maxThreadsPerBlock = attribute(1), .maxThreadsDim = {attribute(2), attribute(3), attribute(4)},
      .maxGridSize = {attribute(5), attribute(6), attribute(7)}, .totalConstMem = attribute(9),
      .major = attribute(75), .minor = attribute(76), .textureAlignment = attribute(14),
      .texturePitchAlignment = attribute(51), .multiProcessorCount = attribute(16), .canMapHostMemory = 1,
      .concurrentKernels = 1, .asyncEngineCount = 1, .unifiedAddressing = 1, .memoryBusWidth = attribute(37),
      .l2CacheSize = attribute(38), .maxThreadsPerMultiProcessor = attribute(39), .streamPrioritiesSupported = 1,
      .sharedMemPerMultiprocessor = attribute(81), .regsPerMultiprocessor = attribute(82), .managedMemory = 1,
      .cooperativeLaunch = 1, .sharedMemPerBlockOptin = attribute(97), .maxBlocksPerMultiProcessor = attribute(106),
      .reservedSharedMemPerBlock = attribute(111)};
  strncpy(it->name, getenv("VGPU_NAME"), sizeof it->name - 1);
  return SUCCESS;
}
#if CUDA < 13
int cudaGetDeviceProperties_v2(void *it, int device) { return properties(it); }
#else
int cudaGetDeviceProperties(void *it, int device) { return properties(it); }
#endif

int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device == 0 ? SUCCESS : INVALID_DEVICE; }
int cudaDriverGetVersion(int *version) { return *version = 1000 * CUDA, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 1000 * CUDA, SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = 0, SUCCESS; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) { return snprintf(text, length, "0000:00:00.0"), SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}

/* ---- errors ---- */

static __thread int last;
static const char *unknown = "";
long vgpu_refusals; /* for Python, which says whose error that was */
const char *vgpu_unknown_name(void) { return unknown; }
static int failed(int code) { return last = code; }
int cudaGetLastError(void) { int code = last; last = SUCCESS; return code; }
int cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(int code) {
  return code == SUCCESS         ? "cudaSuccess"
         : code == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation"
         : code == NO_KERNEL     ? "cudaErrorNoKernelImageForDevice"
         : code == INVALID_DEVICE ? "cudaErrorInvalidDevice"
                                 : "cudaErrorNotSupported";
}
const char *vgpu_text(void) { /* what every library says of an error */
  static char text[256];
  snprintf(text, sizeof text, "the virtual GPU does not have this: %s", *unknown ? unknown : "see above");
  return text;
}
const char *cudaGetErrorString(int code) {
  if (code == SUCCESS) return "no error";
  if (code == OUT_OF_MEMORY) return "out of memory";
  if (code == INVALID_DEVICE) return "invalid device ordinal";
  if (code == NO_KERNEL) return "no kernel image is available for execution on the device";
  return vgpu_text();
}

/* Every function that is not written comes to this, with its name; of the runtime, to the one below: how a launch
   ended is asked for later. */
int vgpu_refused(const char *name) {
  vgpu_refusals++;
  const char *way_out = strncmp(name, "cudnn", 5) ? "" : "; torch.backends.cudnn.enabled = False does without cuDNN";
  if (strcmp(unknown, name))
    fprintf(stderr, "virtual_gpu: %s was called, which the virtual GPU does not have%s\n", name, way_out);
  unknown = name;
  return NOT_SUPPORTED;
}
int vgpu_unknown(const char *name) { return failed(vgpu_refused(name)); }

/* ---- memory ---- */

struct span { char *start; size_t size; int kind; };
static struct span *spans;
static size_t count, room, used, highest;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static size_t whole(size_t size) { return (size + GRANULE - 1) / GRANULE * GRANULE; }
static size_t most_copied(void) {
  static size_t bytes;
  return bytes ? bytes : (bytes = fact("VGPU_COPY"));
}

static int take(void **pointer, size_t size, int kind) {
  size_t mapped = whole(size ? size : 1);
  int code = SUCCESS;
  pthread_mutex_lock(&guard);
  if (kind == DEVICE && used + mapped + context() > total()) {
    code = OUT_OF_MEMORY;
  } else {
    char *start = mmap(NULL, mapped + GRANULE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
      code = OUT_OF_MEMORY;
    } else {
      char *aligned = (char *)(((uintptr_t)start + GRANULE - 1) / GRANULE * GRANULE);
      if (aligned > start) munmap(start, aligned - start);
      munmap(aligned + mapped, start + GRANULE - aligned);
      madvise(aligned, mapped, MADV_NOHUGEPAGE);
      if (count == room) spans = realloc(spans, (room = room ? 2 * room : 64) * sizeof *spans);
      spans[count++] = (struct span){aligned, mapped, kind};
      if (kind == DEVICE && (used += mapped) > highest) highest = used;
      *pointer = aligned;
    }
  }
  pthread_mutex_unlock(&guard);
  return code ? failed(code) : SUCCESS;
}

static struct span *find(const void *pointer) { /* with the guard held */
  for (size_t i = 0; i < count; i++)
    if ((char *)pointer >= spans[i].start && (char *)pointer < spans[i].start + spans[i].size) return spans + i;
  return NULL;
}

static int give(void *pointer) {
  if (!pointer) return SUCCESS;
  pthread_mutex_lock(&guard);
  struct span *span = find(pointer);
  if (span) {
    if (span->kind == DEVICE) used -= span->size;
    munmap(span->start, span->size);
    *span = spans[--count];
  }
  pthread_mutex_unlock(&guard);
  return span ? SUCCESS : failed(INVALID_VALUE);
}

static int kind(const void *pointer) {
  pthread_mutex_lock(&guard);
  struct span *span = find(pointer);
  int result = span ? span->kind : 0;
  pthread_mutex_unlock(&guard);
  return result;
}

int cudaMalloc(void **pointer, size_t size) { return take(pointer, size, DEVICE); }
int cudaMallocManaged(void **pointer, size_t size, unsigned flags) { return take(pointer, size, MANAGED); }
int cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return take(pointer, size, HOST); }
int cudaMallocHost(void **pointer, size_t size) { return take(pointer, size, HOST); }
int cudaMemPrefetchAsync(const void *pointer, size_t size, int device, void *stream) { return SUCCESS; } /* it is here */
int cudaFree(void *pointer) { return give(pointer); }
int cudaFreeHost(void *pointer) { return give(pointer); }
int cudaMemGetInfo(size_t *free, size_t *all) {
  return *all = total(), *free = *all - context() - used, SUCCESS;
}

struct pointer { /* cudaPointerAttributes */
  int type, device;
  const void *on_device, *on_host;
#if CUDA >= 13
  long reserved[8];
#endif
};
int cudaPointerGetAttributes(struct pointer *it, const void *pointer) {
  int type = kind(pointer);
  *it = (struct pointer){type, type >= DEVICE ? 0 : -2, type ? pointer : NULL, type == DEVICE ? NULL : pointer};
  return SUCCESS;
}

static int copy(void *to, const void *from, size_t size) {
  if (size <= most_copied() || kind(to) != DEVICE) memmove(to, from, size);
  return SUCCESS;
}
int cudaMemcpy(void *to, const void *from, size_t size, int way) { return copy(to, from, size); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int way, void *stream) { return copy(to, from, size); }
int cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t pitch_from, size_t width, size_t height,
                      int way, void *stream) {
  for (size_t row = 0; row < height && width * height <= most_copied(); row++)
    memmove((char *)to + row * pitch, (const char *)from + row * pitch_from, width);
  return SUCCESS;
}
static int fill(void *start, int value, size_t size) {
  if (size <= most_copied()) {
    memset(start, value, size);
  } else if (!value && kind(start) == DEVICE) { /* whole pages go back, and read as zeros */
    char *first = (char *)(((uintptr_t)start + 4095) / 4096 * 4096), *end = (char *)start + size;
    madvise(first, (end - first) / 4096 * 4096, MADV_DONTNEED);
  }
  return SUCCESS;
}
int cudaMemset(void *start, int value, size_t size) { return fill(start, value, size); }
int cudaMemsetAsync(void *start, int value, size_t size, void *stream) { return fill(start, value, size); }
int cudaGetSymbolAddress(void **address, const void *symbol) { return *address = (void *)symbol, SUCCESS; }

/* ---- streams and events: all is done when it is asked for ---- */

static void *handle(void) { return calloc(1, 16); }
int cudaStreamCreate(void **stream) { return *stream = handle(), SUCCESS; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return *stream = handle(), SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = handle(), SUCCESS; }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, SUCCESS; }
#if CUDA < 13
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id) {
#else
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) {
#endif
  *status = 0;
  if (id) *id = 0;
  return SUCCESS;
}
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return function(data), SUCCESS; }
int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data, unsigned flags) {
  return function(stream, SUCCESS, data), SUCCESS;
}
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaStreamQuery)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaThreadExchangeStreamCaptureMode)

static int now(void *event) { return clock_gettime(CLOCK_MONOTONIC, event), SUCCESS; }
int cudaEventCreate(void **event) { return *event = handle(), now(*event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return *event = handle(), now(*event); }
int cudaEventDestroy(void *event) { return free(event), SUCCESS; }
int cudaEventRecord(void *event, void *stream) { return now(event); }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return now(event); }
int cudaEventElapsedTime(float *milliseconds, struct timespec *from, struct timespec *to) {
  *milliseconds = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) * 1e-6f;
  return SUCCESS;
}
NOTHING(cudaEventQuery)
NOTHING(cudaEventSynchronize)

/* ---- kernels: registered, described, launched, and not run ---- */

void **__cudaRegisterFatBinary(void *binary) { return handle(); }
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaUnregisterFatBinary)
NOTHING(__cudaRegisterFunction)
NOTHING(__cudaRegisterVar)
static int launch(void) { return fact("VGPU_KERNELS") ? SUCCESS : failed(NO_KERNEL); }
int __cudaLaunchKernel(void) { return launch(); }
int cudaLaunchKernel(void) { return launch(); }
int cudaLaunchKernelExC(void) { return launch(); }
int cudaLaunchCooperativeKernel(void) { return launch(); }
NOTHING(cudaFuncSetAttribute)
char __cudaInitModule(void **module) { return 1; }
unsigned __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(unsigned *grid, unsigned *block, size_t *shared, void **stream) {
  for (int i = 0; i < 3; i++) grid[i] = block[i] = 1;
  return *shared = 0, *stream = NULL, SUCCESS;
}
int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, SUCCESS; }

int cudaFuncGetAttributes(void *attributes, const void *function) {
  struct { size_t shared, constant, local; int threads, registers, ptx, binary, cache, dynamic, more[23]; } *a = attributes;
  memset(a, 0, 144);
  a->threads = 1024;
  a->registers = 32;
  a->ptx = a->binary = (int)fact("VGPU_KERNELS");
  a->dynamic = (int)attribute(8);
  return SUCCESS;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  long most = attribute(39) / (threads > 0 ? threads : 1), fitting = shared ? attribute(81) / (long)shared : most;
  most = most < fitting ? most : fitting;
  return *blocks = most < 1 ? 1 : most > attribute(106) ? (int)attribute(106) : (int)most, SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared,
                                                           unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared);
}

/* ---- the driver's functions, which torch asks for by name ---- */

/* An answer of its own for each that is not here, so that it can name itself when it is called. */
#define SLOT(n) static int slot_##n(void) { return vgpu_refused(asked[n]); }
#define SLOTS(n) SLOT(n##0) SLOT(n##1) SLOT(n##2) SLOT(n##3) SLOT(n##4) SLOT(n##5) SLOT(n##6) SLOT(n##7)
#define NAME(n) slot_##n,
#define NAMES(n) NAME(n##0) NAME(n##1) NAME(n##2) NAME(n##3) NAME(n##4) NAME(n##5) NAME(n##6) NAME(n##7)
static char asked[88][64];
SLOTS(1) SLOTS(2) SLOTS(3) SLOTS(4) SLOTS(5) SLOTS(6) SLOTS(7) SLOTS(8)
static int (*const slots[])(void) = {NAMES(1) NAMES(2) NAMES(3) NAMES(4) NAMES(5) NAMES(6) NAMES(7) NAMES(8)};
static int (*slot_of(const char *name))(void) {
  for (int i = 0; i < 64; i++) {
    char *own = asked[10 * (i / 8 + 1) + i % 8];
    if (!*own) strncpy(own, name, sizeof asked[0] - 1);
    if (!strcmp(own, name)) return slots[i];
  }
  return NULL;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *found) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = driver ? dlsym(driver, name) : NULL;
  if (!*function && !(*function = (void *)slot_of(name))) return vgpu_unknown(name);
  if (found) *found = 0;
  return SUCCESS;
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}

/* For libcuda.so.1, and for Python. */
int vgpu_kind(const void *pointer) { return kind(pointer); }
size_t vgpu_highest(void) { return highest + context(); } /* what nvidia-smi would have shown, at most */
