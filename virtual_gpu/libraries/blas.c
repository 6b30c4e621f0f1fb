/* libcublas, libcublasLt: handles, and one algorithm for every product, without a workspace; nothing is multiplied. */

#include <stdlib.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }

#ifdef CUBLAS
int cublasCreate_v2(void **handle) { return *handle = calloc(1, 16), 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = 10000 * CUDA, 0; }
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSgemm_v2)
NOTHING(cublasDgemm_v2)
NOTHING(cublasGemmEx)
NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasDgemmStridedBatched)
NOTHING(cublasGemmStridedBatchedEx)
NOTHING(cublasSgemv_v2)
NOTHING(cublasDgemv_v2)
NOTHING(cublasSdot_v2)
NOTHING(cublasDdot_v2)
NOTHING(cublasDotEx)
NOTHING(cublasSgemmEx)
#else
size_t cublasLtGetVersion(void) { return 10000 * CUDA; }
int cublasLtCreate(void **handle) { return *handle = calloc(1, 16), 0; }
int cublasLtMatmulDescCreate(void **result) { return *result = calloc(1, 16), 0; }
int cublasLtMatrixLayoutCreate(void **result) { return *result = calloc(1, 16), 0; }
int cublasLtMatmulPreferenceCreate(void **result) { return *result = calloc(1, 16), 0; }
int cublasLtMatmulDescDestroy(void *it) { return free(it), 0; }
int cublasLtMatrixLayoutDestroy(void *it) { return free(it), 0; }
int cublasLtMatmulPreferenceDestroy(void *it) { return free(it), 0; }
NOTHING(cublasLtDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatmul)
struct found { unsigned long algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct found *found, int *count) {
  memset(found, 0, wanted * sizeof *found);
  return *count = 1, 0;
}
#endif
