// What NCCL and a tuner plugin say to each other, versions 3 to 6 of the interface
// (NCCL 2.22, 2.24, 2.28, 2.30).  Declared anew from the documented interface: the plugin is built
// without NCCL.
#ifndef COMMKIT_TUNER_ABI_H
#define COMMKIT_TUNER_ABI_H

#include <stddef.h>
#include <stdint.h>

enum { kSuccess = 0, kInternalError = 3 };

enum { kLogWarn = 2, kLogInfo = 3 };
// Which of NCCL_DEBUG_SUBSYS's kinds a line belongs to.
#define TUNER_INIT 0x1ul
#define TUNER_TUNING 0x40ul
typedef void (*tuner_log)(int level, unsigned long kind, const char* file, int line,
                          const char* format, ...);

// The order of NCCL's ncclFunc_t; others (send, receive) have no algorithm to choose.
enum { kBroadcast, kReduce, kAllGather, kReduceScatter, kAllReduce, kCollectives };
enum { kTree, kRing, kCollnetDirect, kCollnetChain, kNvls, kNvlsTree, kPat, kAlgorithms };
enum { kLl, kLl128, kSimple, kProtocols };

// `costs` is one block of algorithms x protocols floats: -1 is unusable, the lowest is taken.
typedef struct {
  const char* name;
  int (*init)(size_t ranks, size_t nodes, tuner_log log, void** context);
  int (*info)(void* context, int collective, size_t bytes, int operations, float** costs,
              int algorithms, int protocols, int* channels);
  int (*destroy)(void* context);
} tuner_v3;

typedef struct {
  const char* name;
  int (*init)(size_t ranks, size_t nodes, tuner_log log, void** context);
  int (*info)(void* context, int collective, size_t bytes, int operations, float** costs,
              int algorithms, int protocols, int registered, int* channels);
  int (*destroy)(void* context);
} tuner_v4;

// `domains` and `constants` are NCCL's; this plugin reads and writes neither.
typedef struct {
  const char* name;
  int (*init)(void** context, uint64_t communicator, size_t ranks, size_t nodes, tuner_log log,
              void* domains, void* constants);
  int (*info)(void* context, int collective, size_t bytes, int operations, float** costs,
              int algorithms, int protocols, int registered, int* channels);
  int (*finalize)(void* context);
} tuner_v5;

typedef struct {
  const char* name;
  int (*init)(void** context, uint64_t communicator, size_t ranks, size_t nodes, tuner_log log,
              void* domains, void* constants);
  int (*info)(void* context, int collective, size_t bytes, int operations, float** costs,
              int algorithms, int protocols, int registered, int* channels);
  int (*finalize)(void* context);
  int (*chunk)(void* context, int collective, size_t bytes, int algorithm, int protocol,
               int channels, size_t* chunk);
} tuner_v6;

#endif
