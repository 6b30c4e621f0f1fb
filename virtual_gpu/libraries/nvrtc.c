/* libnvrtc: the source of a kernel that torch writes while it runs is taken, and nothing is made of it. */

#include <stddef.h>

#define NOTHING(name) int name(void) { return 0; }

int nvrtcVersion(int *major, int *minor) { return *major = CUDA, *minor = 0, 0; }
int nvrtcCreateProgram(void **program) { return *program = (void *)0x20, 0; }
NOTHING(nvrtcAddNameExpression)
NOTHING(nvrtcCompileProgram)
NOTHING(nvrtcDestroyProgram)
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { return *lowered = name, 0; }

static int one_byte(void *program, size_t *size) { return *size = 1, 0; }
static int empty(void *program, char *code) { return *code = 0, 0; }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetPTXSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetCUBINSize(void *program, size_t *size) { return one_byte(program, size); }
int nvrtcGetProgramLog(void *program, char *code) { return empty(program, code); }
int nvrtcGetPTX(void *program, char *code) { return empty(program, code); }
int nvrtcGetCUBIN(void *program, char *code) { return empty(program, code); }
