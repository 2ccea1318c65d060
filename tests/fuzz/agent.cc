// A whole agent, as root or inside the tree, with ranks, store clients, children, a parent, other
// agents and contacts that have passed the opening and then say anything in any order.  It must
// neither end by an error nor grow, and it must leave when all of them have gone.
#include "overlay/agent.h"

#include <map>
#include <memory>

#include "fuzz/agent_peers.h"
#include "fuzz/simulated.h"
#include "overlay/contact.h"
#include "overlay/rank_set.h"

namespace {

using namespace commkit;
using namespace fuzz;

constexpr int kWorld = 8;  // ranks, one a host
constexpr size_t kMostPeers = 12;

class World {
 public:
  explicit World(Input& in) : in_(in) {
    outside().clear();
    freeze();
    int unix_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_un any{};
    any.sun_family = AF_UNIX;
    // An abstract name of the kernel's choice.
    require(bind(unix_fd, reinterpret_cast<sockaddr*>(&any), sizeof(sa_family_t)) == 0 &&
                listen(unix_fd, 64) == 0,
            "a local socket");
    unix_size_ = sizeof unix_;
    getsockname(unix_fd, reinterpret_cast<sockaddr*>(&unix_), &unix_size_);
    loop_ = std::make_unique<Loop>();
    agent_ = std::make_unique<Agent>(*loop_, unix_fd);
  }

  void run() {
    uint8_t scene = in_.u8();
    if (scene % 2 == 0) {
      as_root(scene / 2 % 4);
    } else {
      inside(scene / 2 % 5);
    }
    for (int steps = 0; !in_.done() && steps < 400; ++steps) step();
    end();
  }

 private:
  static Port& outside() {
    static Port port;
    return port;
  }

  bool turn(int turns = 2) {
    if (over_) return false;
    over_ = !fuzz::turn(*loop_, turns);
    return !over_;
  }

  Fields config(bool root) {
    Fields f{{"job_id", "fuzz"}, {"host_key", "0"},   {"host_name", "h0"},
             {"machine", "m"},   {"root_key", "x"},   {"world_size", std::to_string(kWorld)},
             {"degree", "2"},    {"local_size", "1"}, {"heartbeat", "10"},
             {"ifname", "lo"},   {"root_ports", "0"}, {"root_host", "127.0.0.1"}};
    f["root_kind"] = root ? "endpoint" : "published";
    f["root_here"] = root ? "yes" : "no";
    f["root_published"] = root_text(outside().port, {"127.0.0.1"}, "m");
    return f;
  }

  Peer* add(int fd) {
    if (fd < 0) return nullptr;
    peers_.push_back(std::make_unique<Peer>(fd));
    return peers_.back().get();
  }

  Peer* rank(int number, const Fields& fields) {
    if (over_) return nullptr;
    Peer* it = add(connect_to(reinterpret_cast<sockaddr*>(&unix_), unix_size_));
    if (it == nullptr) return nullptr;
    Writer w;
    w.u32(kMagic).u32(30000).u32(0).i32(number).i32(0);
    put(w, fields);
    it->say(kRankJoin, w.take());
    turn();
    return it;
  }

  Hello hello(HelloKind kind, int index) {
    Hello h;
    h.kind = kind;
    h.job = Config::parse(config(true)).job_hash();
    h.session = session_;
    h.index = index;
    h.world_size = kWorld;
    h.local_size = 1;
    h.machine = "m";
    h.host = "h" + std::to_string(index);
    h.pid = 1000 + static_cast<uint32_t>(index);
    h.addresses = {"127.0.0.1"};
    h.port = outside().port;
    return h;
  }

  Peer* greet(const Hello& h) {
    if (over_ || port_ == 0) return nullptr;
    Peer* it = add(connect_port(port_));
    if (it == nullptr) return nullptr;
    it->say(kHello, h.encode(std::string(16, 'n')));
    turn(3);
    return it;
  }

  // A child says which ranks are below it.
  void up(Peer* peer, int index, const std::vector<int>& ranks) {
    if (peer == nullptr) return;
    Writer w;
    w.u32(1).i32(index).u32(static_cast<uint32_t>(ranks.size()));
    for (int one : ranks) w.i32(one).i32(1000 + one);
    peer->say(kUp, w.take());
    turn();
    children_.emplace_back(peer, ranks);
  }

  // Everybody below the agent does the same thing, as it should be done.
  void chorus() {
    uint8_t kind = in_.u8() % 6;
    std::string tag = text(in_), fence = "\1fence/" + tag;
    int peer = in_.u8() % 3 - 1;
    for (auto& [child, ranks] : children_) {
      RankSet set;
      for (int one : ranks) set.add(one);
      Writer w;
      w.str(kind == 3 ? fence : tag).u8(kind == 0 ? kGather : kAgree).i32(kind == 3 ? -1 : peer);
      set.encode(w);
      if (kind == 0) {
        w.u32(static_cast<uint32_t>(ranks.size()));
        for (int one : ranks) w.i32(one).str("payload");
      } else if (kind == 1 || kind == 3) {
        w.u32(1).str(kind == 1 ? text(in_) : "").str("d").i32(set.size()).i32(ranks.front());
      }
      if (kind == 0 || kind == 1 || kind == 3) child->say(kOpUp, w.take());
      Writer keys;
      keys.str("");
      if (kind == 4) child->say(kLeaving, keys.take());
      if (in_.u8() % 8 == 0) return;
    }
    if (peers_.empty()) return;
    Writer w;
    if (kind < 2) {
      w.u64(9)
          .u8(kind == 0 ? kGather : kAgree)
          .str(tag)
          .u32(2000)
          .i32(peer)
          .u8(1)
          .str("x")
          .str("d");
      peers_.front()->say(kRankOp, w.take());
    } else if (kind == 3) {
      w.str(tag);
      RankSet::all(kWorld).encode(w);
      peers_.front()->say(kRankConnected, w.take());
    } else if (kind >= 4) {
      w.u32(1000);
      peers_.front()->say(kRankLeave, w.take());
    }
  }

  // The root of a world of which two children report every rank.
  void as_root(int stage) {
    rank(0, config(true));
    port_ = agent_->port();
    for (int i = 1; i <= 2 && stage > 0; ++i) {
      Peer* child = greet(hello(kContact, i));
      std::string welcome;
      if (child != nullptr && child->hear(kWelcome, &welcome)) session_ = Reader(welcome).u64();
      if (stage > 1)
        up(child, i, i == 1 ? std::vector<int>{1, 3, 4, 7} : std::vector<int>{2, 5, 6});
    }
    advance(0.01);
    turn(3);
    if (stage > 2) store();
  }

  // Agent 1 of 8: under the root, over 3 and 4, and an interior agent.
  void inside(int stage) {
    session_ = kSession;
    rank(1, config(false));
    turn(4);
    int fd = outside().accept_one();
    if (fd < 0) return;
    Peer* parent = add(fd);
    turn();
    std::string said;
    if (!parent->hear(kHello, &said)) return;
    if (stage == 0) return;
    parent->say(kHeld, "");
    Writer w;
    w.u64(kSession)
        .i32(1)
        .i32(2)
        .i32(0)
        .str("h0")
        .u8(1)
        .strs({"127.0.0.1"})
        .u16(outside().port)
        .u8(1);
    parent->say(kWelcome, w.take());
    turn(3);
    std::string where;
    if (!parent->hear(kListens, &where)) return;
    Reader listens(where);
    listens.strs();
    port_ = listens.u16();
    if (stage > 1) {
      for (int i : {3, 4})
        up(greet(hello(kChild, i)), i, i == 3 ? std::vector<int>{3, 7} : std::vector<int>{4});
    }
    if (stage == 2) return;
    Writer go;
    go.u64(5).i32(kWorld).i32(4);
    parent->say(kGo, go.take());
    turn(3);
    if (stage > 3) {
      // It asks for the table when a key of another host is wanted.
      Peer* client = peers_.front().get();
      Writer key;
      key.u64(1).u8(static_cast<uint8_t>(KvOp::kGet)).str("commkit:6/x").str("").str("").i64(0);
      client->say(kRankKey, key.take());
      turn(2);
      parent->say(kTable, table());
      turn(2);
    }
    store();
  }

  std::string table() {
    Writer w;
    w.u32(kWorld);
    for (int i = 0; i < kWorld; ++i) {
      RankSet ranks;
      ranks.add(i);
      w.i32(i == 0 ? -1 : (i - 1) / 2);
      ranks.encode(w);
      w.strs(i < 4 ? std::vector<std::string>{"127.0.0.1"} : std::vector<std::string>{});
      w.u16(i < 4 ? outside().port : 0);
    }
    return w.take();
  }

  // A client of torch's store, by the token that the first rank was told.
  void store() {
    if (over_) return;
    std::string formed;
    if (!peers_.empty() && peers_.front()->hear(kFormed, &formed)) {
      Reader r(formed);
      token_ = get_fields(r)["store_token"];
    }
    Peer* it = add(connect_port(agent_->store_port()));
    if (it != nullptr) it->say(std::string("\0\xce\xf7\x85\x3c", 5));
    turn();
  }

  std::string store_request() {
    static const char* const fields[] = {"4",  "kv",  "kvv", "k", "k8", "*k", "*k", "", "k", "kv",
                                         "*k", "*kv", "",    "4", "kv", "k",  "k",  "", "k8"};
    auto number = [](uint64_t v) { return std::string(reinterpret_cast<char*>(&v), 8); };
    std::string out(1, static_cast<char>(in_.below(19)));
    const char* row = fields[static_cast<size_t>(out[0])];
    if (*row == '*') out += number(1), ++row;
    for (; *row != '\0'; ++row) {
      std::string value = *row == 'k' ? "/" + token_ + "/" + text(in_) : text(in_);
      if (*row == '8' || *row == '4') {
        out += number(in_.u8() % 8).substr(0, *row == '8' ? 8 : 4);
      } else {
        out += number(value.size()) + value;
      }
    }
    return out;
  }

  void step() {
    if (over_) return (void)in_.rest();
    // Whoever the agent has dialled.
    for (int fd; peers_.size() < kMostPeers && (fd = outside().accept_one()) >= 0;) {
      Peer* it = add(fd);
      it->say(in_.u8() < 200 ? kAccepted : kHeld, "");
    }
    uint8_t what = in_.u8();
    Peer* peer = peers_.empty() ? nullptr : peers_[in_.below(peers_.size())].get();
    if (what < 170 && peer != nullptr) {
      const Grammar& message = what < 4 * kMessageCount ? kMessages[what % kMessageCount]
                                                        : kHandovers[what % kHandoverCount];
      peer->say(message.type, payload(in_, message.fields, outside().port));
    } else if (what < 190 && peer != nullptr) {
      peer->say(store_request());
    } else if (what < 194 && peer != nullptr) {
      peer->say(in_.some(32));
    } else if (what < 200 && peer != nullptr) {
      peer->end(what % 2 == 0);
    } else if (what < 204) {
      advance(0.002);
    } else if (what < 208) {
      advance(0.3);
    } else if (what < 210) {
      advance(what == 208 ? 3 : 12);
    } else if (what >= 246 && what < 253) {
      chorus();
    } else if (peers_.size() < kMostPeers) {
      newcomer(what);
    }
    turn(1 + what % 2);
    if (peer != nullptr && in_.u8() % 4 == 0) peer->hear();
  }

  void newcomer(uint8_t what) {
    int index = in_.small();
    if (what < 218) {
      Fields f = config(what % 2 == 0);
      if (what > 214) f["world_size"] = std::to_string(index);
      rank(index, f);
    } else if (what < 226) {
      greet(hello(kContact, index));
    } else if (what < 236) {
      greet(hello(kChild, index));
    } else if (what < 246) {
      greet(hello(kMesh, index));
    } else {
      store();
    }
  }

  // All go away; whatever state the agent is in, it must not stay.
  void end() {
    for (auto& peer : peers_) {
      peer->hear();
      peer->end(in_.u8() % 2 == 0);
    }
    for (int i = 0; i < 400 && !over_; ++i) {
      turn(2);
      outside().clear();
      advance(i < 40 ? 0.05 : 1.0);
    }
    require(over_, "an agent whose peers have all gone leaves");
    peers_.clear();
    agent_.reset();
    loop_.reset();
  }

  Input& in_;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Agent> agent_;
  sockaddr_un unix_{};
  socklen_t unix_size_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;                  // the first is a rank
  std::vector<std::pair<Peer*, std::vector<int>>> children_;  // and their ranks
  uint16_t port_ = 0;
  uint64_t session_ = 0;
  std::string token_;
  bool over_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  World(in).run();
  return 0;
}
