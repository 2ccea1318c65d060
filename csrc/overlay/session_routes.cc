// Where a key's owner is, and the way there: the tree, and direct connections between agents that
// listen, which fetch the list of hosts when they first need it.
#include <algorithm>
#include <utility>

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

// Agents on the way may have left and handed their children over: the next that is known counts.
LinkPtr Session::tree_hop(int index) {
  for (; index > 0; index = parent_of(index)) {
    auto it = children_.find(index);
    if (it == children_.end()) continue;
    return !it->second->left ? it->second : leaving_ ? parent_ : nullptr;
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
    auto self = weak.lock();
    if (!self) return;
    if (state_ == State::kJoining) return ahead_.push_back({weak, type, std::string(payload)});
    link_frame(self, type, payload);
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

// What was said to us while the news that the world has formed was still on its way down to us.
void Session::catch_up() {
  for (const auto& said : std::exchange(ahead_, {})) {
    auto link = said.link.lock();
    if (!link) continue;
    try {
      link_frame(link, said.type, said.payload);
    } catch (const BadFrame& error) {
      log(link->stream->peer() + " sent a malformed frame: " + error.what());
      link->stream->close();
    }
  }
}

void Session::add_mesh(StreamPtr stream, const Hello& h) {
  auto child = children_.find(h.index);
  bool known =
      h.index == index_ || (parent_ && h.index == parent_->index) ||
      (child != children_.end() && child->second->stream && !child->second->stream->closed()) ||
      mesh_.count(second_link(h.index)) != 0;
  if (known) {
    // Requests are told apart by the index of who asks.
    log(stream->peer() + " says that it is agent " + std::to_string(h.index) +
        ", which is connected already");
    return stream->close();
  }
  LinkPtr link = accept(std::move(stream), h);
  // Both sides may have dialled: each keeps sending on its own connection, so the order of requests
  // holds.
  if (!mesh_.emplace(h.index, link).second) mesh_.emplace(second_link(h.index), link);
  mesh_frames(link);
}

}  // namespace commkit
