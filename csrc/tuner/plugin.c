// libnccl-tuner-commkit.so: what NCCL calls, and what `commkit tune` calls of the same code.
//
// NCCL's choice stays wherever the table says nothing, says something that NCCL has marked as
// unusable, or cannot be read: this never ends a communicator's creation.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "table.h"

#define PUBLIC __attribute__((visibility("default")))
#define LOG(level, kind, ...)                                            \
  do {                                                                   \
    if (log != NULL) log(level, kind, "commkit", __LINE__, __VA_ARGS__); \
  } while (0)

// One for the process: all its communicators are tuned alike, even if the file changes.
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int loaded;
static tuner_table table;
static char path[4096], problem[4096 + 600];

typedef struct {
  tuner_index index;
  tuner_log log;
  atomic_uchar* refused;  // by row: NCCL would not have it, which has been said
} communicator;

static void load(void) {
  pthread_mutex_lock(&loading);
  if (!loaded) {
    const char* where = getenv("COMMKIT_TUNER_TABLE");
    snprintf(path, sizeof path, "%s", where != NULL ? where : "");
    if (path[0] != '\0') tuner_load(path, &table, problem, sizeof problem);
    loaded = 1;
  }
  pthread_mutex_unlock(&loading);
}

static void say(tuner_log log, size_t ranks, size_t nodes, size_t rows) {
  if (path[0] == '\0') {
    LOG(kLogInfo, TUNER_INIT, "commkit tuner: COMMKIT_TUNER_TABLE is not set; NCCL chooses");
    return;
  }
  if (problem[0] != '\0') {
    LOG(kLogWarn, TUNER_INIT, "commkit tuner: %s; the table is not used, NCCL chooses", problem);
    return;
  }
  LOG(kLogInfo, TUNER_INIT | TUNER_TUNING,
      "commkit tuner: %s, fingerprint %016llx: %zu of %zu rows for %zu ranks on %zu nodes", path,
      (unsigned long long)table.fingerprint, rows, table.count, ranks, nodes);
  const char* variables[] = {"NCCL_ALGO", "NCCL_PROTO"};
  for (int i = 0; i < 2; i++) {
    const char* value = getenv(variables[i]);
    if (value != NULL && value[0] != '\0')
      LOG(kLogInfo, TUNER_INIT | TUNER_TUNING,
          "commkit tuner: %s=%s is set, and NCCL heeds it before the table", variables[i], value);
  }
}

static int begin(size_t ranks, size_t nodes, tuner_log log, void** context) {
  if (context == NULL) return kSuccess;
  *context = NULL;
  load();
  communicator* made = NULL;
  if (table.count > 0) {
    made = calloc(1, sizeof *made);
    if (made != NULL) made->refused = calloc(table.count, sizeof *made->refused);
    if (made == NULL || made->refused == NULL ||
        tuner_index_make(&made->index, &table, ranks, nodes) != 0) {
      if (made != NULL) free(made->refused);
      free(made);
      LOG(kLogWarn, TUNER_INIT, "commkit tuner: no memory for the table; NCCL chooses");
      return kSuccess;
    }
    made->log = log;
  }
  say(log, ranks, nodes, made != NULL ? made->index.rows : 0);
  *context = made;
  return kSuccess;
}

static int end(void* context) {
  communicator* which = context;
  if (which == NULL) return kSuccess;
  tuner_index_free(&which->index);
  free(which->refused);
  free(which);
  return kSuccess;
}

static void refuse(communicator* which, int64_t at) {
  if (atomic_exchange_explicit(&which->refused[at], 1, memory_order_relaxed) != 0) return;
  const tuner_row* row = &table.rows[at];
  tuner_log log = which->log;
  LOG(kLogInfo, TUNER_TUNING,
      "commkit tuner: %s:%d not honoured: NCCL cannot use %s with %s here; NCCL chooses", path,
      row->line, tuner_algorithm_name(row->algorithm), tuner_protocol_name(row->protocol));
}

static int choose(void* context, int collective, size_t bytes, float** costs, int algorithms,
                  int protocols, int registered, int* channels) {
  communicator* which = context;
  if (which == NULL) return kSuccess;
  int64_t at = tuner_find(&which->index, collective, bytes, registered);
  if (at < 0) return kSuccess;
  const tuner_row* row = &table.rows[at];
  if (row->algorithm >= 0) {
    if (costs == NULL) return kSuccess;
    float* cost = (float*)costs;
    // Not ">= 0 fails": what is not a number is not usable either.
    int usable = row->algorithm < algorithms && row->protocol < protocols &&
                 cost[row->algorithm * protocols + row->protocol] >= 0;
    if (!usable) {
      // Channels that suit one algorithm are not forced upon another.
      refuse(which, at);
      return kSuccess;
    }
    cost[row->algorithm * protocols + row->protocol] = 0;
  }
  if (channels != NULL && row->channels > 0) *channels = row->channels;
  return kSuccess;
}

static int init_v3(size_t ranks, size_t nodes, tuner_log log, void** context) {
  return begin(ranks, nodes, log, context);
}

static int init_v5(void** context, uint64_t number, size_t ranks, size_t nodes, tuner_log log,
                   void* domains, void* constants) {
  (void)number, (void)domains, (void)constants;
  return begin(ranks, nodes, log, context);
}

static int info_v3(void* context, int collective, size_t bytes, int operations, float** costs,
                   int algorithms, int protocols, int* channels) {
  (void)operations;
  return choose(context, collective, bytes, costs, algorithms, protocols, 0, channels);
}

static int info_v4(void* context, int collective, size_t bytes, int operations, float** costs,
                   int algorithms, int protocols, int registered, int* channels) {
  (void)operations;
  return choose(context, collective, bytes, costs, algorithms, protocols, registered, channels);
}

// NCCL does not say here whether buffers are registered: a row for either kind will do, unless two
// rows fit that want different chunks.
static int chunk_v6(void* context, int collective, size_t bytes, int algorithm, int protocol,
                    int channels, size_t* chunk) {
  (void)channels;
  communicator* which = context;
  if (which == NULL || chunk == NULL) return kSuccess;
  uint64_t wanted[2] = {0, 0};
  for (int registered = 0; registered < 2; registered++) {
    int64_t at = tuner_find(&which->index, collective, bytes, registered);
    if (at >= 0 && table.rows[at].algorithm == algorithm && table.rows[at].protocol == protocol)
      wanted[registered] = table.rows[at].chunk;
  }
  if (wanted[0] != 0 && wanted[1] != 0 && wanted[0] != wanted[1]) return kSuccess;
  uint64_t one = wanted[0] != 0 ? wanted[0] : wanted[1];
  if (one != 0) *chunk = (size_t)one;
  return kSuccess;
}

PUBLIC const tuner_v3 ncclTunerPlugin_v3 = {"commkit", init_v3, info_v3, end};
PUBLIC const tuner_v4 ncclTunerPlugin_v4 = {"commkit", init_v3, info_v4, end};
PUBLIC const tuner_v5 ncclTunerPlugin_v5 = {"commkit", init_v5, info_v4, end};
PUBLIC const tuner_v6 ncclTunerPlugin_v6 = {"commkit", init_v5, info_v4, end, chunk_v6};

// ---------------------------------------------------------------- for `commkit tune`

// Up to `most` rows into `rows`.  Returns how many there are, or -1 with the error.
PUBLIC int64_t commkit_tuner_rows(const char* file, tuner_row* rows, int64_t most,
                                  uint64_t* fingerprint, char* error, size_t room) {
  tuner_table read;
  if (tuner_load(file, &read, error, room) != 0) return -1;
  tuner_find_shadowed(&read);
  int64_t count = (int64_t)read.count;
  for (int64_t i = 0; i < count && i < most; i++) rows[i] = read.rows[i];
  *fingerprint = read.fingerprint;
  tuner_free(&read);
  return count;
}

// The place of the row that a communicator would use, -1 for none, -2 with the error.
PUBLIC int64_t commkit_tuner_find(const char* file, int collective, uint64_t bytes, uint64_t ranks,
                                  uint64_t nodes, int registered, char* error, size_t room) {
  tuner_table read;
  tuner_index index;
  if (tuner_load(file, &read, error, room) != 0) return -2;
  int64_t at = -2;
  if (tuner_index_make(&index, &read, ranks, nodes) == 0) {
    at = tuner_find(&index, collective, bytes, registered);
    tuner_index_free(&index);
  } else {
    snprintf(error, room, "%s: no memory for the table", file);
  }
  tuner_free(&read);
  return at;
}
