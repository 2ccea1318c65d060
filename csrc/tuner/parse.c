// Text -> rows.  Whatever is not exactly as documented is an error with its place: a row that was
// meant otherwise must not tune anything.
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "table.h"

#define VERSION_LINE "commkit-tuner-table 1"
#define MOST_BYTES ((size_t)64 << 20)
#define MOST_CHANNELS 64
#define MOST_CHUNK ((uint64_t)1 << 30)

static const char* const kCollectiveNames[] = {"broadcast", "reduce", "allgather", "reducescatter",
                                               "allreduce"};
static const char* const kAlgorithmNames[] = {
    "tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"};
static const char* const kProtocolNames[] = {"ll", "ll128", "simple"};

typedef struct {
  const char *text, *end;  // of the line
  const char* at;
  const char* name;
  int line;
  char* error;
  size_t room;
} reader;

typedef struct {
  const char* text;
  size_t size;
} word;

static int wrong(const reader* r, const char* at, const char* format, ...) {
  char reason[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  snprintf(r->error, r->room, "%s:%d:%d: %s", r->name, r->line, (int)(at - r->text) + 1, reason);
  return -1;
}

static int blank(char c) { return c == ' ' || c == '\t'; }

// The next word, of size 0 at the end of the line.
static word next(reader* r) {
  while (r->at < r->end && blank(*r->at)) r->at++;
  word w = {r->at, 0};
  if (r->at < r->end && *r->at == '#') r->at = r->end;
  while (r->at < r->end && !blank(*r->at)) r->at++;
  w.size = (size_t)(r->at - w.text);
  if (w.size > 0 && *w.text == '#') w.size = 0;
  return w;
}

static int is(word w, const char* text) {
  return w.size == strlen(text) && memcmp(w.text, text, w.size) == 0;
}

static int shown(word w) { return w.size < 60 ? (int)w.size : 60; }

static int name_of(const reader* r, word w, const char* what, const char* const* names, int count,
                   int32_t* out) {
  char all[256] = "";
  for (int i = 0; i < count; i++) {
    if (is(w, names[i])) {
      *out = i;
      return 0;
    }
    strcat(all, i > 0 ? ", " : "");
    strcat(all, names[i]);
  }
  return wrong(r, w.text, "%s '%.*s', expected one of %s", what, shown(w), w.text, all);
}

// Digits, then K, M, G or T of 1,024 if `sizes`.
static int number(const reader* r, word w, int sizes, const char* what, uint64_t* out) {
  uint64_t value = 0;
  size_t i = 0;
  for (; i < w.size && w.text[i] >= '0' && w.text[i] <= '9'; i++) {
    uint64_t digit = (uint64_t)(w.text[i] - '0');
    if (value > (UINT64_MAX - digit) / 10)
      return wrong(r, w.text, "%s %.*s is too large", what, shown(w), w.text);
    value = value * 10 + digit;
  }
  if (i > 0 && i + 1 == w.size && sizes) {
    const char* suffixes = "KMGTkmgt";
    const char* suffix = strchr(suffixes, w.text[i]);
    if (suffix != NULL && *suffix != '\0') {
      int shift = 10 * ((int)((suffix - suffixes) % 4) + 1);
      if (value > UINT64_MAX >> shift)
        return wrong(r, w.text, "%s %.*s is too large", what, shown(w), w.text);
      value <<= shift;
      i++;
    }
  }
  if (i == 0 || i != w.size) {
    return wrong(r, w.text, "%s '%.*s', expected %s", what, shown(w), w.text,
                 sizes ? "bytes such as 65536, 64K, 8M or 1G" : "a number");
  }
  *out = value;
  return 0;
}

// A, A..B (below B) or A.. (without end).
static int range(const reader* r, word w, int sizes, const char* what, tuner_range* out) {
  const char* dots = NULL;
  for (size_t i = 0; i + 1 < w.size && dots == NULL; i++) {
    if (w.text[i] == '.' && w.text[i + 1] == '.') dots = w.text + i;
  }
  word from = {w.text, dots != NULL ? (size_t)(dots - w.text) : w.size};
  if (number(r, from, sizes, what, &out->from) != 0) return -1;
  if (out->from == UINT64_MAX) return wrong(r, w.text, "%s is too large", what);
  if (dots == NULL) {
    out->to = out->from + 1;
    return 0;
  }
  word to = {dots + 2, w.size - from.size - 2};
  out->to = TUNER_NO_LIMIT;
  if (to.size == 0) return 0;
  if (number(r, to, sizes, what, &out->to) != 0) return -1;
  if (out->to <= out->from || out->to == TUNER_NO_LIMIT) {
    return wrong(r, w.text,
                 "%s %.*s is empty or too large: it starts at its first number and ends "
                 "below its second",
                 what, shown(w), w.text);
  }
  return 0;
}

static int key(word* w, const char* name) {
  size_t size = strlen(name);
  if (w->size <= size || memcmp(w->text, name, size) != 0 || w->text[size] != '=') return 0;
  w->text += size + 1;
  w->size -= size + 1;
  return 1;
}

static int condition(const reader* r, word w, tuner_row* row, unsigned* seen) {
  const struct {
    const char* name;
    tuner_range* range;
  } counts[] = {{"nodes", &row->nodes}, {"ranks", &row->ranks}, {"per_node", &row->per_node}};
  word value = w;
  for (unsigned i = 0; i < 3; i++) {
    if (!key(&value, counts[i].name)) continue;
    if (*seen & 1u << i) return wrong(r, w.text, "%s is given twice", counts[i].name);
    *seen |= 1u << i;
    if (range(r, value, 0, counts[i].name, counts[i].range) != 0) return -1;
    if (counts[i].range->from == 0)
      return wrong(r, value.text, "%s of 0, expected 1 or more", counts[i].name);
    return 0;
  }
  if (key(&value, "registered")) {
    if (*seen & 8u) return wrong(r, w.text, "registered is given twice");
    *seen |= 8u;
    if (!is(value, "yes") && !is(value, "no"))
      return wrong(r, value.text, "registered '%.*s', expected yes or no", shown(value),
                   value.text);
    row->registered = is(value, "yes");
    return 0;
  }
  return wrong(
      r, w.text,
      "'%.*s', expected nodes=, ranks=, per_node=, registered=, or -> before what is chosen",
      shown(w), w.text);
}

static int choice(reader* r, tuner_row* row) {
  word w = next(r);
  if (w.size == 0)
    return wrong(r, w.text, "nothing after ->, expected an algorithm and a protocol, or default");
  int chosen = !is(w, "default");
  if (chosen) {
    if (name_of(r, w, "algorithm", kAlgorithmNames, kAlgorithms, &row->algorithm) != 0) return -1;
    w = next(r);
    if (w.size == 0) return wrong(r, w.text, "an algorithm without a protocol");
    if (name_of(r, w, "protocol", kProtocolNames, kProtocols, &row->protocol) != 0) return -1;
  }
  while ((w = next(r)).size > 0) {
    word value = w;
    uint64_t found = 0;
    if (key(&value, "channels")) {
      if (row->channels != 0) return wrong(r, w.text, "channels is given twice");
      if (number(r, value, 0, "channels", &found) != 0) return -1;
      if (found > MOST_CHANNELS) {
        return wrong(r, value.text, "channels %.*s, expected 1 to %d, or 0 for NCCL's own",
                     shown(value), value.text, MOST_CHANNELS);
      }
      row->channels = (int32_t)found;
    } else if (key(&value, "chunk")) {
      if (row->chunk != 0) return wrong(r, w.text, "chunk is given twice");
      if (!chosen) return wrong(r, w.text, "a chunk needs an algorithm and a protocol");
      if (number(r, value, 1, "chunk", &found) != 0) return -1;
      if (found < 1 || found > MOST_CHUNK)
        return wrong(r, value.text, "chunk %.*s, expected 1 to 1G", shown(value), value.text);
      row->chunk = found;
    } else {
      return wrong(r, w.text, "'%.*s', expected channels=, chunk= or the end of the line", shown(w),
                   w.text);
    }
  }
  if (!chosen && row->channels == 0)
    return wrong(r, r->text, "the row chooses nothing: leave it out, or give channels=");
  return 0;
}

static int row_of(reader* r, word first, tuner_row* row) {
  const tuner_range any = {0, TUNER_NO_LIMIT};
  memset(row, 0, sizeof *row);
  row->line = r->line;
  row->registered = row->algorithm = row->protocol = -1;
  row->nodes = row->ranks = row->per_node = any;
  if (name_of(r, first, "collective", kCollectiveNames, kCollectives, &row->collective) != 0)
    return -1;
  word w = next(r);
  if (w.size == 0)
    return wrong(r, w.text, "no sizes after the collective, expected 0..64K or 1M..");
  if (range(r, w, 1, "sizes", &row->bytes) != 0) return -1;
  unsigned seen = 0;
  for (;;) {
    w = next(r);
    if (w.size == 0) return wrong(r, w.text, "no -> with what the row chooses");
    if (is(w, "->")) return choice(r, row);
    if (condition(r, w, row, &seen) != 0) return -1;
  }
}

static uint64_t mix(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; i++) hash = (hash ^ (value >> (8 * i) & 0xff)) * 0x100000001b3u;
  return hash;
}

static uint64_t fingerprint(const tuner_table* table) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < table->count; i++) {
    const tuner_row* row = &table->rows[i];
    const int64_t fields[] = {row->collective, row->registered, row->algorithm, row->protocol,
                              row->channels};
    const tuner_range* ranges[] = {&row->bytes, &row->nodes, &row->ranks, &row->per_node};
    for (int k = 0; k < 5; k++) hash = mix(hash, (uint64_t)fields[k]);
    for (int k = 0; k < 4; k++) hash = mix(mix(hash, ranges[k]->from), ranges[k]->to);
    hash = mix(hash, row->chunk);
  }
  return hash;
}

static int add(tuner_table* table, size_t* room, const tuner_row* row) {
  if (table->count == *room) {
    size_t more = *room > 0 ? 2 * *room : 64;
    tuner_row* rows = realloc(table->rows, more * sizeof *rows);
    if (rows == NULL) return -1;
    table->rows = rows;
    *room = more;
  }
  table->rows[table->count++] = *row;
  return 0;
}

static int parse(reader* r, const char* text, size_t size, tuner_table* table) {
  size_t room = 0;
  int versioned = 0;
  const char *at = text, *end = text + size;
  if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
    r->text = text;
    r->line = 1;
    return wrong(r, text, "the file begins with a byte order mark; save it as UTF-8 without one");
  }
  for (r->line = 1; at < end || !versioned; r->line++) {
    const char* stop = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
    r->text = r->at = at;
    r->end = stop != NULL ? stop : end;
    const char* zero = r->end > at ? memchr(at, '\0', (size_t)(r->end - at)) : NULL;
    if (zero != NULL) return wrong(r, zero, "a zero byte: this is not a text file");
    if (r->end > at && r->end[-1] == '\r')
      return wrong(r, r->end - 1,
                   "the line ends with a carriage return; save it with Unix line ends");
    word first = next(r);
    if (first.size > 0 && !versioned) {
      word number_word = next(r);
      if (!is(first, "commkit-tuner-table") || !is(number_word, "1") || next(r).size > 0)
        return wrong(r, first.text, "expected the line '" VERSION_LINE "' before the first row");
      versioned = 1;
    } else if (first.size > 0) {
      tuner_row row;
      if (row_of(r, first, &row) != 0) return -1;
      if (add(table, &room, &row) != 0) return wrong(r, r->text, "no memory for another row");
    }
    if (stop == NULL && !versioned)
      return wrong(r, r->end, "the file ends without the line '" VERSION_LINE "'");
    at = stop != NULL ? stop + 1 : end;
  }
  table->fingerprint = fingerprint(table);
  return 0;
}

int tuner_parse(const char* text, size_t size, const char* name, tuner_table* table, char* error,
                size_t room) {
  reader r = {.name = name, .error = error, .room = room};
  memset(table, 0, sizeof *table);
  if (parse(&r, text, size, table) == 0) return 0;
  tuner_free(table);
  return -1;
}

int tuner_load(const char* path, tuner_table* table, char* error, size_t room) {
  memset(table, 0, sizeof *table);
  FILE* file = fopen(path, "rbe");
  if (file == NULL) {
    snprintf(error, room, "%s: %s", path, strerror(errno));
    return -1;
  }
  size_t size = 0, had = 0;
  char* text = NULL;
  for (;;) {
    if (size == had) {
      had = had > 0 ? 2 * had : 1 << 16;
      char* more = had <= MOST_BYTES ? realloc(text, had) : NULL;
      if (more == NULL) {
        snprintf(error, room, "%s: larger than %zu MiB, or no memory for it", path,
                 MOST_BYTES >> 20);
        free(text);
        fclose(file);
        return -1;
      }
      text = more;
    }
    size_t got = fread(text + size, 1, had - size, file);
    if (got == 0) break;
    size += got;
  }
  int broken = ferror(file);
  if (broken) snprintf(error, room, "%s: %s", path, strerror(errno));
  fclose(file);
  int result = broken ? -1 : tuner_parse(text, size, path, table, error, room);
  free(text);
  return result;
}

void tuner_free(tuner_table* table) {
  free(table->rows);
  memset(table, 0, sizeof *table);
}

const char* tuner_algorithm_name(int algorithm) {
  return algorithm >= 0 && algorithm < kAlgorithms ? kAlgorithmNames[algorithm] : "default";
}

const char* tuner_protocol_name(int protocol) {
  return protocol >= 0 && protocol < kProtocols ? kProtocolNames[protocol] : "default";
}
