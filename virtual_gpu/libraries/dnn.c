/* libcudnn.so.9: a version, and one plan without a workspace for every graph of operations. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 1000 * CUDA; }
int cudnnCreate(void **handle) { return *handle = calloc(1, 16), 0; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 20 : 0, 0; }
NOTHING(cudnnDestroy)
NOTHING(cudnnSetStream)
int cudnnGetStream(void *handle, void **stream) { return *stream = NULL, 0; }

int cudnnBackendCreateDescriptor(int type, void **descriptor) { return *descriptor = calloc(1, 64), 0; }
int cudnnBackendDestroyDescriptor(void *descriptor) { return free(descriptor), 0; }
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
  if (type != 15 && values && room > 0) memset(values, 0, 8); /* 15: descriptors, which the caller made */
  if (count) *count = 1;
  return 0;
}
NOTHING(cudnnBackendSetAttribute)
NOTHING(cudnnBackendFinalize)
NOTHING(cudnnBackendExecute)
