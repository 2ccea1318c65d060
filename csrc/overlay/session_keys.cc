// Keys: who owns one, the way there, merged waits.
//
// A key "commkit:<rank>/..." belongs to the agent of that rank; any other key to an interior agent
// by hash. A leaf asks its parent; interior agents know every host's place and reach one another
// directly, so a request takes at most three hops.  An agent that leaves hands its keys to its
// parent, which then owns them.
//
// Waits for one key are merged at every agent: one goes on, its answer goes to all.  Reads are not
// merged: a merged read could return what was there before a write that its reader already knows
// of.
#include <algorithm>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

constexpr std::string_view kOwned = "commkit:";

// The rank that owns the key, or -1.
int owner_rank(const std::string& key) {
  if (key.compare(0, kOwned.size(), kOwned) != 0) return -1;
  size_t at = kOwned.size();
  int rank = 0;
  while (at < key.size() && key[at] >= '0' && key[at] <= '9' && rank < (1 << 24))
    rank = rank * 10 + (key[at++] - '0');
  return at > kOwned.size() && at < key.size() && key[at] == '/' ? rank : -1;
}

// Where the other link is kept when two agents have dialled each other at the same time.
int second_link(int index) { return -1 - index; }

uint64_t fnv1a(const std::string& key) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

}  // namespace

// The store's side of one rank.
class Session::RankKeys : public KeyValue {
 public:
  RankKeys(Session& session, RankPtr conn) : session_(session), conn_(std::move(conn)) {}

  uint64_t request(KvRequest&& request, Done done) override {
    KeyCall call;
    call.request = std::move(request);
    call.done = std::move(done);
    // torch's protocol has no word for "your world is gone": the connection ends, and the api asks
    // why.
    call.fail = [agent = &session_.agent_, token = conn_->token](const std::string& why) {
      agent->loop().defer([agent, token, why] { agent->drop_store(token, false, why); });
    };
    bool waits = call.request.op == KvOp::kWait || call.request.op == KvOp::kBarrier;
    uint64_t id = session_.call(std::move(call));
    // Nor must a wait that begins after a death outlive it: groups are being created.
    if (waits && conn_->creating && !session_.announced_.empty() &&
        session_.calls_.count(id) != 0) {
      session_.loop_.defer([agent = &session_.agent_, token = conn_->token,
                            why = session_.announced_] { agent->drop_store(token, true, why); });
    }
    return id;
  }

  void cancel(uint64_t id) override { session_.cancel_call(id); }

 private:
  Session& session_;
  RankPtr conn_;
};

std::shared_ptr<Session::RankKeys> Session::make_rank_keys(const RankPtr& conn) {
  return std::make_shared<RankKeys>(*this, conn);
}

KeyValue* Session::keys_of(std::string_view token) {
  auto it = by_token_.find(std::string(token));
  return it == by_token_.end() ? nullptr : it->second.get();
}

bool Session::listening(int index) const {
  auto at = static_cast<size_t>(index);
  if (index <= 0) return true;
  if (root_) return at < root_->hosts.size() && root_->hosts[at].listens;
  return at < table_.size() && table_[at].port != 0;
}

// Places follow from the order of arrival, but for agents that could not reach their parent: those
// hang under the root, which knows; so does whoever has its table.  No such agent is inside
// another's subtree.
int Session::parent_of(int index) const {
  auto at = static_cast<size_t>(index);
  if (index <= 0) return -1;
  if (root_) return at < root_->hosts.size() ? root_->hosts[at].parent : -1;
  return at < table_.size() ? table_[at].parent : (index - 1) / std::max(1, degree_);
}

int Session::host_of(int rank) const {
  const auto& list = root_ ? root_->host_of : host_of_rank_;
  return static_cast<size_t>(rank) < list.size() ? list[static_cast<size_t>(rank)] : -1;
}

int Session::alive(int index) const {
  while (index > 0 && gone_.count(index) != 0) index = parent_of(index);
  return index;
}

LinkPtr Session::route(const std::string& key) {
  int rank = owner_rank(key);
  if (rank < 0 || rank >= config_.world_size) {
    return toward(static_cast<int>(fnv1a(key) % static_cast<uint64_t>(interior_)));
  }
  LinkPtr own = leaving_ ? parent_ : nullptr;
  if (ranks_.count(rank) != 0) return own;
  for (auto& [index, link] : children_) {
    if (link->ranks.contains(rank)) return link->left ? own : link;
  }
  int host = host_of(rank);
  if (host < 0) ask_for_table();
  return host < 0 ? parent_ : toward(host);
}

// The next agent on the way to another one; null: the key is ours, its owner being gone or us.
LinkPtr Session::toward(int index) {
  LinkPtr own = leaving_ ? parent_ : nullptr;
  int to = alive(index);
  if (to == index_) return own;
  if (auto it = children_.find(to); it != children_.end())
    return it->second->left ? own : it->second;
  if (!root_ && table_.empty()) {
    ask_for_table();
    return tree_hop(to);
  }
  int hop = to;
  while (!listening(hop)) hop = parent_of(hop);
  hop = alive(hop);
  if (hop == index_) return own;
  if (parent_ && parent_->index == hop) return parent_;
  if (auto it = children_.find(hop); it != children_.end()) {
    return it->second->left ? own : it->second;
  }
  if (root_) return tree_hop(hop);  // the root keeps no connections besides the tree's
  LinkPtr link = mesh(hop);
  return link->broken ? tree_hop(hop) : link;
}

LinkPtr Session::tree_hop(int index) {
  for (int parent = parent_of(index); index > 0; index = parent, parent = parent_of(index)) {
    if (parent != index_) continue;
    auto it = children_.find(index);
    if (it != children_.end()) return it->second;
    break;
  }
  return parent_;
}

void Session::ask_for_table() {
  if (root_ || table_wanted_ || !listens_ || leaving_) return;
  table_wanted_ = true;
  parent_->stream->send_frame(kTableAsk, "");
}

void Session::table_asked(const LinkPtr& link) {
  if (state_ != State::kFormed) return;
  if (root_ && table_bytes_.empty()) table_bytes_ = table_text();
  if (!table_bytes_.empty()) return link->stream->send_frame(kTable, table_bytes_);
  table_asked_.push_back(link);
  ask_for_table();
}

void Session::table_came(std::string_view payload) {
  if (!table_wanted_ || !table_.empty()) return;
  Reader r(payload);
  uint32_t count = r.count(14);
  if (count != static_cast<uint32_t>(hosts_)) throw BadFrame("a table of another number of hosts");
  std::vector<TableEntry> table(count);
  std::vector<int> hosts(static_cast<size_t>(config_.world_size), -1);
  for (uint32_t i = 0; i < count; ++i) {
    table[i].parent = r.i32();
    // Whoever follows parents comes to the root.
    if (table[i].parent < (i == 0 ? -1 : 0) || table[i].parent >= static_cast<int>(i)) {
      throw BadFrame("a parent that comes after its child");
    }
    RankSet ranks = RankSet::decode(r);
    table[i].addresses = r.strs();
    table[i].port = r.u16();
    for (const auto& [low, high] : ranks.ranges()) {
      for (int rank = low; rank <= high && rank < config_.world_size; ++rank) {
        hosts[static_cast<size_t>(rank)] = static_cast<int>(i);
      }
    }
  }
  table_ = std::move(table);
  host_of_rank_ = std::move(hosts);
  table_bytes_ = std::string(payload);
  for (auto& link : std::exchange(table_asked_, {})) link->stream->send_frame(kTable, table_bytes_);
}

LinkPtr Session::mesh(int index) {
  auto& link = mesh_[index];
  if (link) return link;
  link = std::make_shared<Link>();
  link->index = index;
  const auto& entry = table_[static_cast<size_t>(index)];
  std::vector<SocketAddress> to;
  for (const auto& address : entry.addresses) {
    if (auto parsed = SocketAddress::parse(address, entry.port)) to.push_back(*parsed);
  }
  std::weak_ptr<Link> weak = link;
  Dialer::Outcome outcome;
  outcome.open = [this, weak](StreamPtr stream, uint16_t, const std::string&) {
    auto self = weak.lock();
    if (!self) return stream->close();
    loop_.defer([dialer = std::move(self->dialer)] {});
    self->stream = std::move(stream);
    self->open = true;
    mesh_frames(self);
    for (auto& bytes : std::exchange(self->queued, {})) self->stream->send(std::move(bytes));
  };
  outcome.failed = [this, weak](const std::string& why, bool) {
    auto self = weak.lock();
    if (!self) return;
    loop_.defer([dialer = std::move(self->dialer)] {});
    log("cannot reach agent " + std::to_string(self->index) + " directly: " + why +
        "; its keys go along the tree");
    self->broken = true;
    self->queued.clear();
    reroute(self);
  };
  link->dialer = Dialer::dial(loop_, std::move(to), hello(kMesh), terms(), outcome);
  return link;
}

void Session::mesh_frames(const LinkPtr& link) {
  std::weak_ptr<Link> weak = link;
  link->stream->on_frames([this, weak](uint16_t type, std::string_view payload) {
    if (auto self = weak.lock()) link_frame(self, type, payload);
  });
  link->stream->on_close([this, weak](const std::string& why) {
    auto self = weak.lock();
    if (!self) return;
    log("the connection to agent " + std::to_string(self->index) + " ended: " + why);
    for (int key : {self->index, second_link(self->index)}) {
      auto it = mesh_.find(key);
      if (it != mesh_.end() && it->second == self) mesh_.erase(it);
    }
    cancel_calls_of(self);
    reroute(self);
    finish_leaving();
  });
}

void Session::add_mesh(StreamPtr stream, const Hello& h) {
  auto child = children_.find(h.index);
  bool known = h.index == index_ || (parent_ && h.index == parent_->index) ||
               (child != children_.end() && !child->second->stream->closed()) ||
               mesh_.count(second_link(h.index)) != 0;
  if (known) {
    // Requests are told apart by the index of who asks.
    log(stream->peer() + " says that it is agent " + std::to_string(h.index) +
        ", which is connected already");
    return stream->close();
  }
  stream->send_frame(kAccepted, "");
  auto link = std::make_shared<Link>();
  link->stream = std::move(stream);
  link->index = h.index;
  link->host = h.host;
  link->open = true;
  // Both sides may have dialled: each keeps sending on its own connection, so the order of requests
  // holds.
  if (!mesh_.emplace(h.index, link).second) mesh_.emplace(second_link(h.index), link);
  mesh_frames(link);
}

void Session::send_on(const LinkPtr& link, uint16_t type, std::string payload) {
  if (link->open) {
    link->stream->send_frame(type, payload);
  } else {
    link->queued.push_back(frame(type, payload));
  }
}

uint64_t Session::call(KeyCall call) {
  uint64_t id = ++next_call_;
  calls_.emplace(id, std::move(call));
  dispatch(id);
  return id;
}

void Session::dispatch(uint64_t id) {
  KeyCall& call = calls_.at(id);
  call.link.reset();
  call.table_id = 0;
  if (state_ != State::kFormed)
    return fail_call(id, losses_.empty() ? "the world is gone" : losses_.back());
  KvOp op = call.request.op;
  bool blocks = op == KvOp::kWait || op == KvOp::kBarrier ||
                (op == KvOp::kQueuePop && call.request.amount == 1);
  if (leaving_ && blocks && call.from.first >= 0) return give_back(id);
  LinkPtr link;
  if (op == KvOp::kNumKeys || op == KvOp::kListKeys) {
    if (root_) {
      return probe(op == KvOp::kNumKeys ? kProbeKeys : kProbeKeyList, "",
                   [this, id](ProbeAnswer&& found) {
                     if (!found.complete) return fail_call(id, "an agent did not answer in time");
                     KvReply reply;
                     reply.number = found.number;
                     reply.keys = std::move(found.keys);
                     answer(id, std::move(reply));
                   });
    }
    link = parent_;
  } else {
    link = route(call.request.key);
    // Never back to whom it comes from: who knows the place better is further up.
    if (link && link->index == call.from.first && link != parent_) link = parent_;
  }
  if (!link) {
    KvRequest copy = call.request;
    uint64_t at =
        keys_.apply(std::move(copy), [this, id](KvReply&& reply) { answer(id, std::move(reply)); });
    auto it = calls_.find(id);
    if (it != calls_.end()) it->second.table_id = at;
    return;
  }
  if (op == KvOp::kWait && !call.carrier) {
    call.merged = true;
    std::string key = call.request.key;
    auto& merged = merged_[key];
    merged.waiters.insert(id);
    if (merged.upstream != 0) return;
    KeyCall carrier;
    carrier.request = call.request;
    carrier.carrier = true;
    carrier.done = [this, key](KvReply&& reply) {
      auto waiters = std::move(merged_[key].waiters);
      merged_.erase(key);
      // A queue's element is for one of them; the others wait again, at the owner's table.
      bool one = reply.number == 1;
      for (uint64_t waiter : waiters) {
        if (!one || waiter == *waiters.begin()) {
          answer(waiter, KvReply(reply));
        } else if (calls_.count(waiter) != 0) {
          dispatch(waiter);
        }
      }
    };
    carrier.fail = [this, key](const std::string& why) {
      auto waiters = std::move(merged_[key].waiters);
      merged_.erase(key);
      for (uint64_t waiter : waiters) fail_call(waiter, why);
    };
    merged.upstream = ++next_call_;
    uint64_t upstream = merged.upstream;
    calls_.emplace(upstream, std::move(carrier));
    return dispatch(upstream);
  }
  call.link = link;
  Writer w;
  w.u64(id);
  put(w, call.request);
  send_on(link, kKeyRequest, w.take());
}

void Session::answer(uint64_t id, KvReply&& reply) {
  auto it = calls_.find(id);
  if (it == calls_.end()) return;
  KeyCall call = std::move(it->second);
  calls_.erase(it);
  if (call.from.first >= 0) incoming_.erase(call.from);
  call.done(std::move(reply));
}

void Session::fail_call(uint64_t id, const std::string& why) {
  auto it = calls_.find(id);
  if (it == calls_.end()) return;
  KeyCall call = std::move(it->second);
  calls_.erase(it);
  if (call.from.first >= 0) incoming_.erase(call.from);
  if (call.table_id != 0) keys_.cancel(call.table_id);
  if (call.fail) call.fail(why);
}

void Session::cancel_call(uint64_t id) {
  auto it = calls_.find(id);
  if (it == calls_.end()) return;
  KeyCall call = std::move(it->second);
  calls_.erase(it);
  if (call.from.first >= 0) incoming_.erase(call.from);
  if (call.table_id != 0) keys_.cancel(call.table_id);
  if (call.link) {
    Writer w;
    w.u64(id);
    send_on(call.link, kKeyCancel, w.take());
  }
  if (!call.merged) return;
  auto merged = merged_.find(call.request.key);
  if (merged == merged_.end()) return;
  merged->second.waiters.erase(id);
  if (!merged->second.waiters.empty()) return;
  uint64_t upstream = merged->second.upstream;
  merged_.erase(merged);
  cancel_call(upstream);
}

void Session::key_request(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  uint64_t id = r.u64();
  KeyCall call;
  call.request = get_request(r);
  call.from = {link->index, id};
  std::weak_ptr<Link> weak = link;
  call.done = [this, weak, id](KvReply&& reply) {
    auto back = weak.lock();
    if (!back) return;
    Writer w;
    w.u64(id);
    put(w, reply);
    send_on(back, kKeyReply, w.take());
  };
  // Its asker hears of what broke the world by itself.
  call.fail = nullptr;
  auto from = call.from;
  uint64_t mine = ++next_call_;
  incoming_[from] = mine;
  calls_.emplace(mine, std::move(call));
  dispatch(mine);
}

void Session::key_reply(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  uint64_t id = r.u64();
  KvReply reply = get_reply(r);
  auto it = calls_.find(id);
  if (it == calls_.end() || it->second.link != link) return;  // nobody, or another, was asked
  answer(id, std::move(reply));
}

void Session::key_cancel(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  auto it = incoming_.find({link->index, r.u64()});
  if (it != incoming_.end()) cancel_call(it->second);
}

void Session::reroute(const LinkPtr& gone) {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) {
    if (call.link == gone) ids.push_back(id);
  }
  for (uint64_t id : ids) {
    if (calls_.count(id) != 0) dispatch(id);
  }
}

// Whoever asked must ask our successor: nobody is to wait for us any longer.
void Session::give_back(uint64_t id) {
  auto from = calls_.at(id).from;
  cancel_call(id);
  Writer w;
  w.u64(from.second);
  for (auto* links : {&children_, &mesh_}) {
    for (auto& [index, link] : *links) {
      if (link->index == from.first && link->open)
        return link->stream->send_frame(kKeyMoved, w.take());
    }
  }
  if (parent_ && parent_->index == from.first) parent_->stream->send_frame(kKeyMoved, w.take());
}

void Session::give_back_waits() {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) {
    // A pop that another owner is working on may have its element on the way to us.
    bool here = call.table_id != 0 || call.request.op == KvOp::kWait;
    bool blocks = call.request.op == KvOp::kWait || call.request.op == KvOp::kBarrier ||
                  call.request.op == KvOp::kQueuePop;
    if (call.from.first >= 0 && here && blocks) ids.push_back(id);
  }
  for (uint64_t id : ids) {
    if (calls_.count(id) != 0) give_back(id);
  }
}

void Session::key_moved(const LinkPtr& link, std::string_view payload) {
  uint64_t id = Reader(payload).u64();
  auto it = calls_.find(id);
  if (it != calls_.end() && it->second.link == link) dispatch(id);
}

void Session::cancel_calls_of(const LinkPtr& link) {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) {
    if (call.from.first == link->index) ids.push_back(id);
  }
  for (uint64_t id : ids) cancel_call(id);
}

// What waits in our own table waits in its next owner's from now on.
void Session::reroute_table() {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) {
    if (call.table_id != 0) ids.push_back(id);
  }
  for (uint64_t id : ids) {
    auto it = calls_.find(id);
    if (it == calls_.end()) continue;
    keys_.cancel(it->second.table_id);
    dispatch(id);
  }
}

void Session::fail_calls(const std::string& why) {
  std::vector<uint64_t> ids;
  for (const auto& [id, call] : calls_) ids.push_back(id);
  for (uint64_t id : ids) fail_call(id, why);
}

// The same operations for code without torch, over the rank's own connection.
void Session::rank_key(const RankPtr& conn, std::string_view payload) {
  Reader r(payload);
  uint64_t theirs = r.u64();
  KeyCall call;
  call.request = get_request(r);
  std::weak_ptr<RankConn> weak = conn;
  call.done = [weak, theirs](KvReply&& reply) {
    auto back = weak.lock();
    if (!back) return;
    back->keys.erase(theirs);
    Writer w;
    w.u64(theirs);
    put(w, reply);
    back->stream->send_frame(kKeyDone, w.take());
  };
  call.fail = [weak, theirs](const std::string& why) {
    auto back = weak.lock();
    if (!back) return;
    back->keys.erase(theirs);
    Writer w;
    w.u64(theirs).str("died").str(why);
    back->stream->send_frame(kOpFailed, w.take());
  };
  uint64_t mine = ++next_call_;
  conn->keys[theirs] = mine;
  calls_.emplace(mine, std::move(call));
  dispatch(mine);
}

}  // namespace commkit
