// NCCL's calls of a tuner plugin, versions 3 to 6, with its tables of costs: many communicators in
// many threads, null outputs, unusable entries.  Run under sanitizers, with COMMKIT_TUNER_TABLE
// naming the table of test_tuner_calls.py.  Exit code 0 and the log on stdout, or 1 and what
// failed.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tuner/abi.h"

extern const tuner_v3 ncclTunerPlugin_v3;
extern const tuner_v4 ncclTunerPlugin_v4;
extern const tuner_v5 ncclTunerPlugin_v5;
extern const tuner_v6 ncclTunerPlugin_v6;

#define REQUIRE(holds)                                         \
  do {                                                         \
    if (!(holds)) {                                            \
      printf("line %d does not hold: %s\n", __LINE__, #holds); \
      exit(1);                                                 \
    }                                                          \
  } while (0)

static pthread_mutex_t printing = PTHREAD_MUTEX_INITIALIZER;

static void log_line(int level, unsigned long kind, const char* file, int line, const char* format,
                     ...) {
  (void)kind, (void)file, (void)line;
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&printing);
  printf("%s ", level == kLogWarn ? "WARN" : "INFO");
  vprintf(format, arguments);
  putchar('\n');
  pthread_mutex_unlock(&printing);
  va_end(arguments);
}

typedef struct {
  float costs[kAlgorithms][kProtocols];
  int channels;
} answer;

static void fresh(answer* a) {
  for (int i = 0; i < kAlgorithms; i++) {
    for (int k = 0; k < kProtocols; k++) a->costs[i][k] = (float)(10 + i * kProtocols + k);
  }
  // No NVLS, no CollNet here.
  for (int i = kCollnetDirect; i <= kNvlsTree; i++) {
    for (int k = 0; k < kProtocols; k++) a->costs[i][k] = -1;
  }
  a->channels = 0;
}

static int untouched(const answer* a) {
  answer other;
  fresh(&other);
  return memcmp(a, &other, sizeof other) == 0;
}

// Of the table: below 64K tree/ll on 2 nodes and more, then ring/simple with 4 channels, from 1M
// nvls/simple, which is unusable; registered allgathers get channels alone.
static void same_for_all(const char* version, void* context,
                         int (*info)(void*, int, size_t, answer*, int)) {
  answer a;
  (void)version;
  fresh(&a);
  REQUIRE(info(context, kAllReduce, 1024, &a, 0) == kSuccess);
  REQUIRE(a.costs[kTree][kLl] == 0 && a.channels == 0);
  fresh(&a);
  REQUIRE(info(context, kAllReduce, 65536, &a, 0) == kSuccess);
  REQUIRE(a.costs[kRing][kSimple] == 0 && a.costs[kTree][kLl] == 10 && a.channels == 4);
  fresh(&a);
  REQUIRE(info(context, kAllReduce, 1 << 20, &a, 0) == kSuccess);
  REQUIRE(untouched(&a));
  fresh(&a);
  REQUIRE(info(context, kAllReduce, (size_t)8 << 30, &a, 0) == kSuccess);
  REQUIRE(untouched(&a));
  for (int collective = -1; collective < 12; collective++) {
    if (collective == kAllReduce || collective == kAllGather) continue;
    fresh(&a);
    REQUIRE(info(context, collective, 1024, &a, 0) == kSuccess);
    REQUIRE(untouched(&a));
  }
}

static int by_v3(void* c, int f, size_t n, answer* a, int registered) {
  (void)registered;
  return ncclTunerPlugin_v3.info(c, f, n, 1, (float**)a->costs, kAlgorithms, kProtocols,
                                 &a->channels);
}
static int by_v4(void* c, int f, size_t n, answer* a, int registered) {
  return ncclTunerPlugin_v4.info(c, f, n, 1, (float**)a->costs, kAlgorithms, kProtocols, registered,
                                 &a->channels);
}
static int by_v5(void* c, int f, size_t n, answer* a, int registered) {
  return ncclTunerPlugin_v5.info(c, f, n, 1, (float**)a->costs, kAlgorithms, kProtocols, registered,
                                 &a->channels);
}
static int by_v6(void* c, int f, size_t n, answer* a, int registered) {
  return ncclTunerPlugin_v6.info(c, f, n, 1, (float**)a->costs, kAlgorithms, kProtocols, registered,
                                 &a->channels);
}

static void registered_buffers(void* context, int (*info)(void*, int, size_t, answer*, int)) {
  answer a;
  fresh(&a);
  REQUIRE(info(context, kAllGather, 4096, &a, 0) == kSuccess && untouched(&a));
  REQUIRE(info(context, kAllGather, 4096, &a, 1) == kSuccess && a.channels == 2);
  a.channels = 0;
  REQUIRE(untouched(&a));
}

static void null_outputs(void* context) {
  answer a;
  fresh(&a);
  REQUIRE(ncclTunerPlugin_v6.info(context, kAllReduce, 65536, 1, NULL, kAlgorithms, kProtocols, 0,
                                  &a.channels) == kSuccess);
  REQUIRE(untouched(&a));
  REQUIRE(ncclTunerPlugin_v6.info(context, kAllReduce, 65536, 1, (float**)a.costs, kAlgorithms,
                                  kProtocols, 0, NULL) == kSuccess);
  REQUIRE(a.costs[kRing][kSimple] == 0);
  // An older NCCL with fewer algorithms: nothing is written behind its table.
  fresh(&a);
  REQUIRE(ncclTunerPlugin_v6.info(context, kAllReduce, 65536, 1, (float**)a.costs, 1, kProtocols, 0,
                                  &a.channels) == kSuccess);
  REQUIRE(untouched(&a));
}

static void chunks(void* context) {
  size_t chunk = 12345;
  REQUIRE(ncclTunerPlugin_v6.chunk(context, kAllReduce, 65536, kRing, kSimple, 4, &chunk) ==
          kSuccess);
  REQUIRE(chunk == 131072);
  chunk = 12345;
  REQUIRE(ncclTunerPlugin_v6.chunk(context, kAllReduce, 65536, kTree, kSimple, 4, &chunk) ==
          kSuccess);
  REQUIRE(chunk == 12345);
  REQUIRE(ncclTunerPlugin_v6.chunk(context, kAllReduce, 65536, kRing, kSimple, 4, NULL) ==
          kSuccess);
}

// One communicator of a thread's, from its creation to its end.
static void* one(void* number) {
  uint64_t which = (uint64_t)(uintptr_t)number;
  // NCCL's own numbers: neither is looked at, and neither may change.
  double constants[64];
  int domains[3] = {1, 8, 8};
  for (int i = 0; i < 64; i++) constants[i] = i;
  for (int round = 0; round < 20; round++) {
    void* context = (void*)1;
    REQUIRE(ncclTunerPlugin_v3.init(16, 2, log_line, &context) == kSuccess);
    same_for_all("v3", context, by_v3);
    REQUIRE(ncclTunerPlugin_v3.destroy(context) == kSuccess);
    REQUIRE(ncclTunerPlugin_v4.init(16, 2, log_line, &context) == kSuccess);
    same_for_all("v4", context, by_v4);
    registered_buffers(context, by_v4);
    REQUIRE(ncclTunerPlugin_v4.destroy(context) == kSuccess);
    REQUIRE(ncclTunerPlugin_v5.init(&context, which, 16, 2, log_line, domains, constants) ==
            kSuccess);
    same_for_all("v5", context, by_v5);
    registered_buffers(context, by_v5);
    REQUIRE(ncclTunerPlugin_v5.finalize(context) == kSuccess);
    REQUIRE(ncclTunerPlugin_v6.init(&context, which, 16, 2, log_line, domains, constants) ==
            kSuccess);
    same_for_all("v6", context, by_v6);
    registered_buffers(context, by_v6);
    null_outputs(context);
    chunks(context);
    REQUIRE(ncclTunerPlugin_v6.finalize(context) == kSuccess);
    // On one node the rows for two and more do not apply.
    REQUIRE(ncclTunerPlugin_v4.init(8, 1, NULL, &context) == kSuccess);
    answer a;
    fresh(&a);
    REQUIRE(by_v4(context, kAllReduce, 1024, &a, 0) == kSuccess && untouched(&a));
    REQUIRE(ncclTunerPlugin_v4.destroy(context) == kSuccess);
  }
  for (int i = 0; i < 64; i++) REQUIRE(constants[i] == i);
  return NULL;
}

// Without a table, or with one that cannot be read, nothing is touched and nothing fails.
static void nothing(void) {
  void* context = (void*)1;
  answer a;
  fresh(&a);
  REQUIRE(ncclTunerPlugin_v6.init(&context, 1, 16, 2, log_line, NULL, NULL) == kSuccess);
  REQUIRE(by_v6(context, kAllReduce, 1024, &a, 0) == kSuccess && untouched(&a));
  size_t chunk = 7;
  REQUIRE(ncclTunerPlugin_v6.chunk(context, kAllReduce, 1024, kTree, kLl, 1, &chunk) == kSuccess);
  REQUIRE(chunk == 7);
  REQUIRE(ncclTunerPlugin_v6.finalize(context) == kSuccess);
}

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "nothing") == 0) {
    nothing();
    return 0;
  }
  pthread_t threads[8];
  for (uintptr_t i = 0; i < 8; i++) {
    if (pthread_create(&threads[i], NULL, one, (void*)i) != 0) return 1;
  }
  for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
  return 0;
}
