// A table for NCCL's tuner: any bytes give rows or one error, and what a look-up finds is the first
// row that fits.
#include <cstdlib>
#include <cstring>

#include "fuzz/input.h"
#include "tuner/table.h"

namespace {

using fuzz::require;

bool within(const tuner_range& range, uint64_t value) {
  return value >= range.from && (value < range.to || range.to == TUNER_NO_LIMIT);
}

int64_t first_that_fits(const tuner_table& table, int collective, uint64_t bytes, uint64_t ranks,
                        uint64_t nodes, int registered) {
  for (size_t i = 0; i < table.count; ++i) {
    const tuner_row& row = table.rows[i];
    bool any = row.per_node.from == 0 && row.per_node.to == TUNER_NO_LIMIT;
    bool per_node = any || (ranks % nodes == 0 && within(row.per_node, ranks / nodes));
    if (row.collective == collective && (row.registered < 0 || row.registered == registered) &&
        within(row.bytes, bytes) && within(row.nodes, nodes) && within(row.ranks, ranks) &&
        per_node)
      return static_cast<int64_t>(i);
  }
  return -1;
}

void look_up(const tuner_table& table, uint64_t ranks, uint64_t nodes) {
  tuner_index index;
  require(tuner_index_make(&index, &table, ranks, nodes) == 0, "an index is made");
  auto same = [&](int collective, uint64_t bytes, int registered) {
    require(tuner_find(&index, collective, bytes, registered) ==
                first_that_fits(table, collective, bytes, ranks, nodes, registered),
            "the first row that fits is found");
  };
  for (size_t i = 0; i < table.count && i < 40; ++i) {
    const tuner_range& range = table.rows[i].bytes;
    for (uint64_t bytes : {range.from, range.from - 1, range.to, range.to - 1}) {
      same(table.rows[i].collective, bytes, 0);
      same(table.rows[i].collective, bytes, 1);
    }
  }
  for (int collective = -1; collective < 6; ++collective) same(collective, uint64_t{1} << 20, 0);
  tuner_index_free(&index);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  char error[512] = "";
  tuner_table table;
  const char* text = reinterpret_cast<const char*>(data);
  if (tuner_parse(text, size, "table", &table, error, sizeof error) != 0) {
    require(std::strncmp(error, "table:", 6) == 0, "an error names file, line and column");
    require(table.rows == nullptr, "a table that cannot be read holds nothing");
    return 0;
  }
  tuner_find_shadowed(&table);
  look_up(table, 64, 8);
  look_up(table, 1, 1);
  look_up(table, 7, 2);
  tuner_free(&table);
  return 0;
}
