// An agent whose own ranks have left, while ranks below it have not, hands its children and its
// keys to its parent and leaves: what ends a host's processes when its last rank has ended, such as
// a cgroup's end, then ends nobody else's world.
//
//   parent                    agent                      child
//     <-------- kHandover ------
//     --------- kTakeOver ----->
//                               --------- kNewParent ----->   dials the parent (kHello, kAccepted)
//                               <-------- kParentReady ----
//     until here kStay calls it off; from here on it is done
//                               --------- kMove ---------->   says all else to its new parent
//                               <-------- kMoved ----------
//     <-------- kLeaving -------   keys, children: the parent begins to read what they say
//     --------- kLeavingAck --->   what came before it goes down the old way
//                               ------- end of stream ---->   begins to read what its parent says
//
// So nothing is lost, doubled or out of order in either direction.  Meanwhile the last local rank
// that leaves is held, for a short time.  The root cannot be replaced: it holds its last rank for
// longer, and stays.
#include <algorithm>
#include <exception>
#include <utility>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

// Most worlds end at about the same time everywhere: then there is nothing to hand over.
constexpr double kGraceSeconds = 0.25;
constexpr double kHoldSeconds = 2.0, kRootHoldSeconds = 5.0;
constexpr double kStepSeconds = 1.5, kAgainSeconds = 0.1;

}  // namespace

bool Session::ranks_have_gone() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const auto& one) { return one.second->gone(); });
}

bool Session::subtree_has_left() const {
  return std::all_of(children_.begin(), children_.end(),
                     [](const auto& one) { return one.second->left; });
}

// ---------------------------------------------------------------- the last local rank

void Session::told_to_leave(const RankPtr& conn, bool open) {
  double seconds = std::min(root_ ? kRootHoldSeconds : kHoldSeconds, conn->leave_until - now());
  bool holds = state_ == State::kFormed && !over_ && ranks_have_gone() && !subtree_has_left() &&
               dead_.empty() && seconds > 0;
  held_leaves_.emplace_back(conn, open);
  if (!holds) return release_leaves();
  if (hold_timer_ == 0) hold_timer_ = loop_.after(seconds, [this] { release_leaves(); });
}

void Session::release_leaves() {
  loop_.cancel(hold_timer_);
  hold_timer_ = 0;
  for (auto& [conn, open] : std::exchange(held_leaves_, {})) {
    Writer w;
    w.u8(open ? 1 : 0);
    conn->stream->send_frame(kLeft, w.take());
  }
}

// ---------------------------------------------------------------- who leaves

void Session::hand_over_in(double seconds) {
  if (root_ || handover_ != Handover::kNone || handover_timer_ != 0) return;
  handover_timer_ = loop_.after(seconds < 0 ? kGraceSeconds : seconds, [this] {
    handover_timer_ = 0;
    ask_handover();
  });
}

void Session::ask_handover() {
  if (state_ != State::kFormed || leaving_ || over_ || !ranks_have_gone() || subtree_has_left())
    return;
  // One at a time on each edge; and whoever has asked us comes first.
  if (!promised_.empty() || !probes_.empty() || new_parent_ || new_parent_dialer_ || old_parent_)
    return hand_over_in(kAgainSeconds);
  handover_ = Handover::kAsked;
  parent_->stream->send_frame(kHandover, "");
  handover_timer_ = loop_.after(kStepSeconds, [this] {
    handover_timer_ = 0;
    call_off("the parent did not answer in time");
  });
}

void Session::take_over_answered(std::string_view payload) {
  if (handover_ != Handover::kAsked) return;
  handover_ = Handover::kPreparing;
  Writer w;
  w.i32(parent_->index).str(parent_->host);
  std::string place = w.take() + std::string(payload);
  for (auto& [index, link] : children_) {
    link->ready = false;
    if (!link->left) link->stream->send_frame(kNewParent, place);
  }
  loop_.cancel(handover_timer_);
  handover_timer_ = loop_.after(kStepSeconds, [this] {
    handover_timer_ = 0;
    call_off("a child did not reach the parent in time");
  });
  advance_handover();
}

void Session::parent_ready(const LinkPtr& link, const std::string& why) {
  if (handover_ != Handover::kPreparing) return;
  if (!why.empty()) return call_off("host " + link->host + ": " + why);
  link->ready = true;
  advance_handover();
}

void Session::child_moved(const LinkPtr& link) {
  if (handover_ != Handover::kMoving) return;
  link->moved = true;
  advance_handover();
}

void Session::advance_handover() {
  auto all = [this](auto&& done) {
    return std::all_of(children_.begin(), children_.end(),
                       [&](const auto& one) { return one.second->left || done(*one.second); });
  };
  if (handover_ == Handover::kPreparing && all([](const Link& link) { return link.ready; })) {
    handover_ = Handover::kMoving;
    loop_.cancel(handover_timer_);
    handover_timer_ = 0;
    for (auto& [index, link] : children_) {
      if (!link->left) link->stream->send_frame(kMove, "");
    }
  }
  if (handover_ != Handover::kMoving || leaving_) return;
  if (!all([](const Link& link) { return link.moved; })) return;
  log("handing children and keys over to host " + parent_->host);
  // What they have said to us for operations that wait for others.
  for (auto& [tag, op] : ops_) {
    if (op.sent || op.kind == kBroadcast || op.arrived.empty()) continue;
    op.sent = true;
    send_op_up(tag, op);
  }
  start_leaving();
}

void Session::call_off(const std::string& why) {
  if (handover_ != Handover::kAsked && handover_ != Handover::kPreparing) return;
  log("children and keys stay here: " + why);
  bool prepared = handover_ == Handover::kPreparing;
  handover_ = Handover::kNone;
  loop_.cancel(handover_timer_);
  handover_timer_ = 0;
  parent_->stream->send_frame(kStay, "");
  for (auto& [index, link] : children_) {
    if (prepared && !link->left) link->stream->send_frame(kStay, "");
  }
  hand_over_in(kStepSeconds);
}

// ---------------------------------------------------------------- its parent

void Session::handover_asked(const LinkPtr& link) {
  bool free = state_ == State::kFormed && !leaving_ && !over_ && handover_ == Handover::kNone &&
              agent_.listening();
  if (!free) return link->stream->send_frame(kStay, "");
  promised_.insert(link->index);
  Writer w;
  w.str(config_.machine).strs(addresses_at(link->stream->fd())).u16(agent_.port());
  link->stream->send_frame(kTakeOver, w.take());
}

bool Session::adopts(int index) const {
  return state_ == State::kFormed && !promised_.empty() && children_.count(index) == 0;
}

void Session::promise_over(int index) {
  if (promised_.erase(index) == 0 || !promised_.empty()) return;
  for (auto& [child, link] : std::exchange(adopted_, {})) link->stream->close();
}

// The children of a child that is leaving.
void Session::adopt(const LinkPtr& from, Reader& r) {
  std::vector<LinkPtr> come;
  uint32_t count = r.done() ? 0 : r.count(12);
  for (uint32_t i = 0; i < count; ++i) {
    int index = r.i32();
    std::string host = r.str();
    RankSet ranks = RankSet::decode(r);
    if (!from->ranks.covers(ranks)) throw BadFrame("children whose ranks are not below it");
    if (children_.count(index) != 0) throw BadFrame("children of it that are ours");
    from->ranks.remove(ranks);
    auto it = adopted_.find(index);
    LinkPtr link = it == adopted_.end() ? std::make_shared<Link>() : it->second;
    if (it != adopted_.end()) adopted_.erase(it);
    link->index = index;
    link->ranks = ranks;
    link->host = host;
    children_[index] = link;
    if (root_ && index > 0 && static_cast<size_t>(index) < root_->hosts.size())
      root_->hosts[static_cast<size_t>(index)].parent = 0;
    if (link->stream && !link->stream->closed()) {
      come.push_back(link);
      continue;
    }
    // Its end has been seen here already.
    link->left = true;
    lose({ranks, {"host " + host + " with " + ranks.named() + " is lost: it has ended"}});
  }
  promise_over(from->index);
  for (auto& link : come) {
    log("host " + link->host + " was below host " + from->host + ", which leaves");
    loop_.defer([this, alive = std::weak_ptr<bool>(alive_), link] {
      if (!alive.expired()) read_held(link);
    });
  }
}

// ---------------------------------------------------------------- its children

void Session::new_parent(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  int index = r.i32();
  std::string host = r.str(), machine = r.str();
  std::vector<std::string> addresses = r.strs();
  uint16_t port = r.u16();
  if (state_ != State::kFormed || leaving_ || link != parent_) return;
  if (index < 0 || index >= index_) throw BadFrame("a parent that comes after its child");
  // Our own children must know to whom they go.
  if (handover_ == Handover::kMoving) return say_parent_ready("is handing its own children over");
  call_off("the parent leaves first");
  std::vector<SocketAddress> to;
  for (const auto& address : addresses) {
    auto parsed = SocketAddress::parse(address, port);
    if (parsed && (!parsed->is_loopback() || machine == config_.machine)) to.push_back(*parsed);
  }
  drop_new_parent();
  Dialer::Outcome outcome;
  outcome.open = [this, index, host](StreamPtr stream, uint16_t, const std::string&) {
    loop_.defer([dialer = std::move(new_parent_dialer_)] {});
    new_parent_ = std::make_shared<Link>();
    new_parent_->stream = std::move(stream);
    new_parent_->index = index;
    new_parent_->host = host;
    new_parent_->open = new_parent_->waits = true;
    link_frames(new_parent_);
    say_parent_ready("");
  };
  outcome.failed = [this](const std::string& why, bool) {
    loop_.defer([dialer = std::move(new_parent_dialer_)] {});
    say_parent_ready("cannot reach its new parent: " + why);
  };
  new_parent_dialer_ = Dialer::dial(loop_, std::move(to), hello(kChild), terms(), outcome);
}

void Session::say_parent_ready(const std::string& why) {
  Writer w;
  w.str(why);
  parent_->stream->send_frame(kParentReady, w.take());
}

void Session::drop_new_parent() {
  if (new_parent_dialer_) new_parent_dialer_->stop();
  new_parent_dialer_.reset();
  if (new_parent_) new_parent_->stream->close();
  new_parent_.reset();
}

void Session::move() {
  if (!new_parent_ || state_ != State::kFormed) return;
  old_parent_ = std::exchange(parent_, std::exchange(new_parent_, nullptr));
  old_parent_->stream->send_frame(kMoved, "");
  if (table_wanted_ && table_.empty()) parent_->stream->send_frame(kTableAsk, "");
  log("the parent on host " + old_parent_->host + " leaves; the next is host " + parent_->host);
}

void Session::old_parent_left() {
  LinkPtr link = std::exchange(old_parent_, nullptr);
  gone_.insert(link->index);
  cancel_calls_of(link);
  reroute(link);
  read_held(parent_);
}

// ---------------------------------------------------------------- either

void Session::stay(const LinkPtr& link) {
  if (link != parent_) return promise_over(link->index);
  drop_new_parent();
  if (handover_ != Handover::kAsked) return;
  handover_ = Handover::kNone;
  loop_.cancel(handover_timer_);
  handover_timer_ = 0;
  hand_over_in(kAgainSeconds);
}

// What was said before its time.
void Session::read_held(const LinkPtr& link) {
  link->waits = false;
  try {
    for (const auto& [type, payload] : std::exchange(link->held, {}))
      link_frame(link, type, payload);
  } catch (const std::exception& error) {
    link->stream->give_up(error.what());
  }
}

}  // namespace commkit
