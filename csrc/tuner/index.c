// Which row decides for one communicator: its ranks and nodes are known once and for all, so that a
// look-up has only the size left to search for.
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "table.h"

static int within(const tuner_range* range, uint64_t value) {
  return value >= range->from && (value < range->to || range->to == TUNER_NO_LIMIT);
}

// Of a communicator with unequal nodes there is no number of ranks per node.
static int applies(const tuner_row* row, uint64_t ranks, uint64_t nodes) {
  int even = nodes > 0 && ranks % nodes == 0;
  int any = row->per_node.from == 0 && row->per_node.to == TUNER_NO_LIMIT;
  return within(&row->nodes, nodes) && within(&row->ranks, ranks) &&
         (any || (even && within(&row->per_node, ranks / nodes)));
}

static int by_size(const void* a, const void* b) {
  uint64_t left = *(const uint64_t*)a, right = *(const uint64_t*)b;
  return left < right ? -1 : left > right;
}

static size_t place_of(const uint64_t* points, size_t count, uint64_t point) {
  const uint64_t* found = bsearch(&point, points, count, sizeof point, by_size);
  return (size_t)(found - points);
}

// The first stretch at or after `k` that no row has taken.
static size_t open_from(size_t* next, size_t k) {
  size_t root = k;
  while (next[root] != root) root = next[root];
  while (next[k] != root) {
    size_t above = next[k];
    next[k] = root;
    k = above;
  }
  return root;
}

static int make_steps(tuner_steps* out, const tuner_table* table, const int64_t* rows,
                      size_t count) {
  if (count == 0) return 0;
  uint64_t* points = malloc((2 * count + 1) * sizeof *points);
  size_t* next = malloc((2 * count + 2) * sizeof *next);
  tuner_step* steps = malloc((2 * count + 1) * sizeof *steps);
  if (points == NULL || next == NULL || steps == NULL) {
    free(points);
    free(next);
    free(steps);
    return -1;
  }
  size_t found = 0;
  points[found++] = 0;
  for (size_t i = 0; i < count; i++) {
    const tuner_range* bytes = &table->rows[rows[i]].bytes;
    points[found++] = bytes->from;
    if (bytes->to != TUNER_NO_LIMIT) points[found++] = bytes->to;
  }
  qsort(points, found, sizeof *points, by_size);
  size_t stretches = 0;
  for (size_t i = 0; i < found; i++) {
    if (i == 0 || points[i] != points[stretches - 1]) points[stretches++] = points[i];
  }
  for (size_t k = 0; k <= stretches; k++) next[k] = k;
  for (size_t k = 0; k < stretches; k++) {
    steps[k].from = points[k];
    steps[k].row = -1;
  }
  // Earlier rows take their stretches first.
  for (size_t i = 0; i < count; i++) {
    const tuner_range* bytes = &table->rows[rows[i]].bytes;
    size_t end = bytes->to == TUNER_NO_LIMIT ? stretches : place_of(points, stretches, bytes->to);
    size_t k = open_from(next, place_of(points, stretches, bytes->from));
    for (; k < end; k = open_from(next, k)) {
      steps[k].row = rows[i];
      next[k] = k + 1;
    }
  }
  for (size_t k = 0; k < stretches; k++) {
    if (out->count == 0 || steps[k].row != steps[out->count - 1].row)
      steps[out->count++] = steps[k];
  }
  out->steps = steps;
  free(points);
  free(next);
  return 0;
}

int tuner_index_make(tuner_index* index, const tuner_table* table, size_t ranks, size_t nodes) {
  memset(index, 0, sizeof *index);
  if (table->count == 0) return 0;
  int64_t* rows = malloc(table->count * sizeof *rows);
  int result = rows != NULL ? 0 : -1;
  for (int collective = 0; result == 0 && collective < kCollectives; collective++) {
    for (int registered = 0; result == 0 && registered < 2; registered++) {
      size_t count = 0;
      for (size_t i = 0; i < table->count; i++) {
        const tuner_row* row = &table->rows[i];
        if (row->collective == collective &&
            (row->registered < 0 || row->registered == registered) && applies(row, ranks, nodes))
          rows[count++] = (int64_t)i;
      }
      result = make_steps(&index->of[collective][registered], table, rows, count);
    }
  }
  for (size_t i = 0; result == 0 && i < table->count; i++)
    index->rows += (size_t)applies(&table->rows[i], ranks, nodes);
  free(rows);
  if (result != 0) tuner_index_free(index);
  return result;
}

void tuner_index_free(tuner_index* index) {
  for (int collective = 0; collective < kCollectives; collective++) {
    for (int registered = 0; registered < 2; registered++)
      free(index->of[collective][registered].steps);
  }
  memset(index, 0, sizeof *index);
}

int64_t tuner_find(const tuner_index* index, int collective, uint64_t bytes, int registered) {
  if (collective < 0 || collective >= kCollectives) return -1;
  const tuner_steps* steps = &index->of[collective][registered != 0];
  if (steps->count == 0) return -1;
  // The first step is from 0.  Without branches, which a processor could not foresee.
  const tuner_step* at = steps->steps;
  for (size_t left = steps->count; left > 1;) {
    size_t half = left / 2;
    at += (size_t)(at[half].from <= bytes) * half;
    left -= half;
  }
  return at->row;
}

static int covers(const tuner_range* outer, const tuner_range* inner) {
  return outer->from <= inner->from && outer->to >= inner->to;
}

void tuner_find_shadowed(tuner_table* table) {
  for (size_t i = 0; i < table->count; i++) {
    tuner_row* row = &table->rows[i];
    for (size_t k = 0; k < i && row->shadowed_by == 0; k++) {
      const tuner_row* other = &table->rows[k];
      int registered = other->registered < 0 || other->registered == row->registered;
      if (other->collective == row->collective && registered &&
          covers(&other->bytes, &row->bytes) && covers(&other->nodes, &row->nodes) &&
          covers(&other->ranks, &row->ranks) && covers(&other->per_node, &row->per_node))
        row->shadowed_by = other->line;
    }
  }
}
