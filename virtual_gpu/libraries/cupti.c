/* libcupti: no profiler of a card. torch's own asks what went wrong, says it, and goes on with the CPU. */

#define FAILED 999 /* CUPTI_ERROR_UNKNOWN */

int cuptiGetVersion(unsigned *version) { return *version = 0, FAILED; }
int cuptiSubscribe(void) { return FAILED; }
int cuptiGetResultString(int code, const char **text) {
  return *text = "the virtual GPU has no profiler: what is measured is of this computer", 0;
}
