// The tuner's table: text in which the first row that fits decides.  docs/tune.md describes it.
#ifndef COMMKIT_TUNER_TABLE_H
#define COMMKIT_TUNER_TABLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TUNER_NO_LIMIT UINT64_MAX

// From `from` to below `to`; to TUNER_NO_LIMIT: without end.
typedef struct {
  uint64_t from, to;
} tuner_range;

typedef struct {
  int32_t line;         // in the file, from 1
  int32_t shadowed_by;  // the line of an earlier row that fits wherever this one does; 0: none
  int32_t collective;
  int32_t registered;           // buffers: 0 no, 1 yes, -1 either
  int32_t algorithm, protocol;  // -1 both: NCCL's own choice
  int32_t channels;             // 0: NCCL's own
  int32_t unused;
  uint64_t chunk;  // bytes; 0: NCCL's own
  tuner_range bytes, nodes, ranks, per_node;
} tuner_row;

typedef struct {
  tuner_row* rows;
  size_t count;
  uint64_t fingerprint;  // of the rows: comments and spaces do not count
} tuner_table;

// 0, or -1 with `error` saying "path:line:column: what is wrong".  `name` stands for the path.
int tuner_parse(const char* text, size_t size, const char* name, tuner_table* table, char* error,
                size_t room);
int tuner_load(const char* path, tuner_table* table, char* error, size_t room);
void tuner_free(tuner_table* table);
void tuner_find_shadowed(tuner_table* table);
const char* tuner_algorithm_name(int algorithm);
const char* tuner_protocol_name(int protocol);

// What a communicator of that many ranks and nodes may need of a table, ready to be looked up.
typedef struct {
  uint64_t from;
  int64_t row;  // -1: none from here on
} tuner_step;
typedef struct {
  tuner_step* steps;
  size_t count;
} tuner_steps;
typedef struct {
  tuner_steps of[5][2];  // by collective, by whether buffers are registered
  size_t rows;           // of the table that can apply
} tuner_index;

// 0, or -1 if there is no memory.
int tuner_index_make(tuner_index* index, const tuner_table* table, size_t ranks, size_t nodes);
void tuner_index_free(tuner_index* index);
// The row's place in the table, or -1.
int64_t tuner_find(const tuner_index* index, int collective, uint64_t bytes, int registered);

#ifdef __cplusplus
}
#endif

#endif
