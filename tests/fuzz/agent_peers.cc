#include "fuzz/agent_peers.h"

#include "overlay/rank_set.h"
#include "wire/key_table.h"

namespace fuzz {

namespace {

using namespace commkit;

// The end of the list that begins at `fields`.
const char* list_end(const char* fields) {
  int depth = 0;
  for (;; ++fields) {
    if (*fields == '[') ++depth;
    if (*fields == ']' && --depth == 0) return fields;
  }
}

void put_fields(Writer& w, Input& in, const char* fields, const char* end, uint16_t port) {
  for (; fields != end; ++fields) {
    switch (*fields) {
      case 'q':
        w.u64(in.u8() < 250 ? in.u8() % 8 : in.number(8));
        break;
      case 'b':
        w.u8(in.u8() < 240 ? in.u8() % 4 : in.u8());
        break;
      case 'h':
        w.u16(in.u8() < 200 ? port : static_cast<uint16_t>(in.number(2)));
        break;
      case 'w':
        w.u32(in.u8() < 128 ? in.u8() * 50u : static_cast<uint32_t>(in.small()));
        break;
      case 'i':
        w.i32(in.small());
        break;
      case 'm':
        w.u32(kMagic);
        break;
      case 'N':
        w.u64(in.u8() < 240 ? kSession : in.number(8));
        break;
      case 'a':
        w.str(in.u8() < 200 ? "127.0.0.1" : text(in));
        break;
      case 's':
        w.str(text(in));
        break;
      case 'R': {
        size_t n = in.below(4);
        w.u32(static_cast<uint32_t>(n));
        for (size_t i = 0; i < n; ++i) {
          int low = in.small();
          w.i32(low).i32(in.u8() < 200 && low < 1000 ? low + in.u8() % 4 : in.small());
        }
        break;
      }
      case 'K':
        w.u8(in.u8() % 16).str(text(in)).str(text(in)).str(text(in)).i64(in.small());
        break;
      case 'P':
        w.u8(in.u8() % 2).i64(in.small()).str(text(in));
        put_fields(w, in, "[s]", nullptr, port);
        break;
      case 'D': {
        KeyTable table;
        for (size_t n = in.below(4); n > 0; --n) {
          KvRequest q;
          q.op = in.u8() % 2 == 0 ? KvOp::kSet : KvOp::kQueuePush;
          q.key = text(in);
          q.value = text(in);
          table.apply(std::move(q), [](KvReply&&) {});
        }
        std::string dump = table.dump();
        if (in.u8() > 230) dump.resize(dump.size() / 2);
        w.str(dump);
        break;
      }
      case 'O':
        // A gather's payloads by rank, a broadcast's payload, or an agreement's digests.
        put_fields(w, in,
                   in.u8() % 3 == 0   ? "[is]"
                   : in.u8() % 2 == 0 ? "s"
                                      : "[ssii]",
                   nullptr, port);
        break;
      case '[': {
        const char* close = list_end(fields);
        uint8_t n = in.u8();
        w.u32(n < 240 ? n % 4 : static_cast<uint32_t>(in.number(4)));
        for (int i = 0; i < n % 4; ++i) put_fields(w, in, fields + 1, close, port);
        fields = close;
        break;
      }
      default:
        require(false, "a field of the grammar is known");
    }
    if (end == nullptr && fields[1] == '\0') return;
  }
}

}  // namespace

std::string payload(Input& in, const char* fields, uint16_t port) {
  Writer w;
  uint8_t how = in.u8();
  if (how >= 240) return in.some(64);
  if (*fields != '\0') put_fields(w, in, fields, nullptr, port);
  std::string bytes = w.take();
  if (how >= 230) bytes.resize(bytes.size() - std::min<size_t>(bytes.size(), in.u8()));
  if (how >= 220 && how < 230) bytes += in.some(8);
  return bytes;
}

}  // namespace fuzz
