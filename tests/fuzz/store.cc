// torch's store protocol as several clients speak it, well or badly, cut anywhere, to one table.
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz/input.h"
#include "wire/key_table.h"
#include "wire/store_session.h"

namespace {

using namespace commkit;
using fuzz::require;

// Answers at once like the agent's own table, or later and in any order like another agent's.
class Keys : public KeyValue {
 public:
  uint64_t request(KvRequest&& request, Done done) override {
    if (!slow) return table.apply(std::move(request), std::move(done));
    uint64_t id = ++next_ | kSlow;
    on_the_way_.push_back({id, std::move(request), std::move(done)});
    return id;
  }
  void cancel(uint64_t id) override {
    if ((id & kSlow) == 0) return table.cancel(id);
    if (auto it = in_table_.find(id); it != in_table_.end()) {
      table.cancel(it->second);
      in_table_.erase(it);
    }
    for (auto& one : on_the_way_) {
      if (one.id == id) one.done = nullptr;
    }
  }
  // One of those on the way arrives.
  void serve(size_t at) {
    if (on_the_way_.empty()) return;
    at %= on_the_way_.size();
    Request one = std::move(on_the_way_[at]);
    on_the_way_.erase(on_the_way_.begin() + static_cast<long>(at));
    if (!one.done) return;
    auto answered = std::make_shared<bool>(false);
    uint64_t id = table.apply(std::move(one.request),
                              [this, answered, mine = one.id, done = one.done](KvReply&& reply) {
                                *answered = true;
                                in_table_.erase(mine);
                                done(std::move(reply));
                              });
    if (!*answered) in_table_[one.id] = id;
  }
  bool idle() const { return on_the_way_.empty(); }

  KeyTable table;
  bool slow = false;

 private:
  static constexpr uint64_t kSlow = uint64_t{1} << 62;
  struct Request {
    uint64_t id;
    KvRequest request;
    Done done;
  };
  uint64_t next_ = 0;
  std::deque<Request> on_the_way_;
  std::map<uint64_t, uint64_t> in_table_;
};

struct Client {
  std::unique_ptr<StoreSession> session;
  bool dropped = false;
  bool holds = false;
  size_t answered = 0;
  std::string wire;
};

std::string number(uint64_t v) {
  std::string out(8, '\0');
  std::memcpy(out.data(), &v, 8);
  return out;
}

std::string text(const std::string& s) { return number(s.size()) + s; }

std::string key(fuzz::Input& in) {
  static const char* const keys[] = {"/t/a",     "/t/b", "/t/q", "init/",  "/t/", "t/a",
                                     "/other/a", "",     "/t/c", "/t/a/b", "/t"};
  uint8_t which = in.u8();
  if (which < 240) return text(keys[which % 11]);
  if (which < 250) return text(in.some(20));
  return number(in.number(8)) + in.some(8);
}

std::string value(fuzz::Input& in) {
  uint8_t which = in.u8();
  if (which < 100) return text(std::to_string(static_cast<int>(which) - 50));
  if (which < 230) return text(in.some(64));
  if (which < 240) return text(std::string(20000, 'x'));
  if (which < 244) return text("9223372036854775807");
  return number(in.number(8)) + in.some(8);
}

std::string request(fuzz::Input& in) {
  static const char* const fields[] = {"4",  "kv",  "kvv", "k", "k8", "*k", "*k", "", "k", "kv",
                                       "*k", "*kv", "",    "4", "kv", "k",  "k",  "", "k8"};
  auto op = static_cast<uint8_t>(in.u8());
  std::string out(1, static_cast<char>(op % 20));
  if (op >= 200) out[0] = static_cast<char>(op);
  const char* row = static_cast<uint8_t>(out[0]) < 19 ? fields[static_cast<uint8_t>(out[0])] : "";
  size_t times = 1;
  if (*row == '*') {
    ++row;
    uint8_t count = in.u8();
    times = count < 200 ? count % 5 : count;
    out += count < 252 ? number(times) : number(in.number(8));
  }
  for (size_t i = 0; i < times; ++i) {
    for (const char* field = row; *field != '\0'; ++field) {
      if (*field == 'k') out += key(in);
      if (*field == 'v') out += value(in);
      if (*field == '8') out += number(static_cast<uint64_t>(static_cast<int64_t>(in.small())));
      if (*field == '4') out += in.bytes(4);
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  Keys keys;
  std::vector<std::unique_ptr<Client>> clients;
  keys.slow = in.u8() % 2 == 1;
  for (int i = 0; i < 3; ++i) {
    auto client = std::make_unique<Client>();
    Client* c = client.get();
    c->session = std::make_unique<StoreSession>(
        [&keys](std::string_view token) -> KeyValue* { return token == "t" ? &keys : nullptr; },
        [c](std::string_view bytes) {
          require(!c->dropped, "nothing is sent to a client that was dropped");
          c->answered += bytes.size();
          if (c->holds && c->answered > 4096) c->session->hold(true);
        },
        [c](std::string_view why) {
          require(!c->dropped, "a client is dropped once");
          require(!why.empty(), "a client is dropped for a reason");
          c->dropped = true;
        });
    if (i == 0) c->session->default_token("t");
    static const char magic[] = {0, '\xce', '\xf7', '\x85', '\x3c'};
    if (in.u8() < 250) c->wire.assign(magic, 5);
    clients.push_back(std::move(client));
  }
  while (!in.done()) {
    uint8_t what = in.u8();
    Client& c = *clients[what % 3];
    switch (what / 3 % 12) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        c.wire += request(in);
        break;
      case 5:
        c.wire += in.some(32);
        break;
      case 6: {
        size_t cut = std::min<size_t>(c.wire.size(), in.u8());
        c.session->feed(c.wire.data(), cut);
        c.wire.erase(0, cut);
        break;
      }
      case 7:
        c.session->feed(c.wire.data(), c.wire.size());
        c.wire.clear();
        break;
      case 8:
        keys.slow = !keys.slow;
        break;
      case 9:
        c.holds = !c.holds;
        c.session->hold(c.holds);
        break;
      case 10:
        keys.serve(in.u8());
        break;
      default:
        c.session->waiting();
        c.answered = 0;
    }
  }
  for (auto& c : clients) {
    c->session->feed(c->wire.data(), c->wire.size());
    c->holds = false;
    c->session->hold(false);
  }
  // What is left waits for a key, and ends with its client.
  clients.clear();
  for (int i = 0; i < 10000 && !keys.idle(); ++i) keys.serve(0);
  require(keys.table.counters().waiting == 0, "whoever is gone waits for nothing");
  return 0;
}
