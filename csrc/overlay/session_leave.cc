// Leaving behind a fence, and the end of a session.
#include <algorithm>
#include <cstdio>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

constexpr double kLeaveSeconds =
    5.0;  // for the parent and the other agents to confirm that we leave

std::string fence_key(const std::string& group, const RankSet& members, const char* what) {
  return "commkit:" + std::to_string(members.first()) + "/fence/" + what + "/" + group;
}

}  // namespace

void Session::rank_connected(const RankPtr& conn, std::string_view payload) {
  Reader r(payload);
  std::string group = r.str();
  RankSet members = RankSet::decode(r);
  if (state_ != State::kFormed || members.empty() || !members.contains(conn->rank)) return;
  conn->groups[group] = members;
  if (members.size() == config_.world_size) {
    // The whole world: one reduction over the tree.
    std::string tag = kFenceTag + group;
    Op& op = ops_[tag];
    op.kind = kAgree;
    return contribute(tag, op, conn->rank, "", "");
  }
  auto& here = confirmed_[group];
  here.add(conn->rank);
  int local = 0;
  for (const auto& [rank, other] : ranks_) local += members.contains(rank) ? 1 : 0;
  if (here.size() < local) return;
  KeyCall add;
  add.request.op = KvOp::kAdd;
  add.request.key = fence_key(group, members, "count");
  add.request.amount = local;
  add.done = [this, group, members](KvReply&& reply) {
    if (reply.number < members.size()) return;
    KeyCall open;
    open.request.op = KvOp::kSet;
    open.request.key = fence_key(group, members, "open");
    open.done = [](KvReply&&) {};
    call(std::move(open));
  };
  call(std::move(add));
}

// Nobody asks before somebody wants to leave: a creation has enough to do.
void Session::await_fence(const std::string& group, const RankSet& members) {
  if (members.size() == config_.world_size || !awaited_fences_.insert(group).second) return;
  KeyCall wait;
  wait.request.op = KvOp::kWait;
  wait.request.key = fence_key(group, members, "open");
  wait.done = [this, group](KvReply&&) { fence_open(group); };
  call(std::move(wait));
}

// Ranks of this subtree that have left or are gone: nobody waits for them to confirm anything.
RankSet Session::absent() const {
  RankSet set;
  for (const auto& [rank, conn] : ranks_) {
    if (conn->gone()) set.add(rank);
  }
  for (const auto& [index, link] : children_) {
    if (link->left) set.add(link->ranks);
  }
  return set;
}

void Session::advance_fences() {
  std::vector<std::string> tags;
  for (const auto& [tag, op] : ops_) {
    if (is_fence(tag)) tags.push_back(tag);
  }
  for (const auto& tag : tags) advance(tag);
}

void Session::fence_open(const std::string& group) {
  open_groups_.insert(group);
  for (auto& [rank, conn] : ranks_) {
    if (conn->leaving) try_leave(conn, false);
  }
}

void Session::rank_leave(const RankPtr& conn, double timeout) {
  bool late = state_ != State::kFormed || !dead_.empty();
  if (!late) {
    for (const auto& [group, members] : conn->groups) await_fence(group, members);
  }
  // After that: each answer that comes at once would look whether this rank may leave.
  conn->leaving = true;
  conn->leave_until = now() + timeout;
  loop_.cancel(conn->leave_timer);
  std::weak_ptr<RankConn> weak = conn;
  conn->leave_timer = loop_.after(timeout, [this, weak] {
    if (auto self = weak.lock()) try_leave(self, true);
  });
  try_leave(conn, late);
}

void Session::try_leave(const RankPtr& conn, bool late) {
  if (conn->left) return;
  bool open = true;
  for (const auto& [group, members] : conn->groups) open = open && open_groups_.count(group) != 0;
  if (!open && !late) return;
  loop_.cancel(conn->leave_timer);
  conn->left = true;
  if (!conn->exit_reason.empty() && state_ == State::kFormed) {
    // It goes because something failed: the others must not wait for it.
    Loss loss;
    loss.ranks.add(conn->rank);
    loss.texts.push_back("rank " + std::to_string(conn->rank) + " (pid " +
                         std::to_string(conn->pid) + " on host " + config_.host_name +
                         ") gave up: " + conn->exit_reason);
    lose(loss);
  }
  agent_.drop_store(conn->token, false, "its rank has left");
  for (auto& [theirs, mine] : std::exchange(conn->keys, {})) cancel_call(mine);
  told_to_leave(conn, open);
  advance_fences();
  check_over();
}

void Session::child_leaving(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  std::string keys = r.str();
  if (auto child = children_.find(link->index); child != children_.end() && child->second == link) {
    // In leaving, too: a child leaves before its parent, but for a parent whose table is already
    // given away.  A child whose keys cannot be read has not left: it is lost.
    if (!keys.empty()) keys_.restore(keys);
    adopt(link, r);
    link->left = true;
  }
  gone_.insert(link->index);
  // What it has not answered it will answer, or give back: to ask again would do things twice.
  link->stream->send_frame(kLeavingAck, "");
  advance_fences();
  advance_handover();
  check_over();
}

void Session::check_over() {
  if (over_) return;
  // Its ranks have been told; whether they try again is up to them.  One that is leaving has nobody
  // left to wait for it, nor for whom it could wait.
  if (state_ == State::kFailed) return contact_ ? void() : over();
  if (leaving_) return;
  if (state_ != State::kFormed || !ranks_have_gone()) return;
  if (!subtree_has_left()) return hand_over_in();
  if (root_) return over();
  start_leaving();
}

void Session::start_leaving() {
  leaving_ = true;
  flush_losses();
  std::vector<LinkPtr> handed;
  for (auto& [index, link] : children_) {
    if (!link->left) handed.push_back(link);
  }
  Writer w;
  w.str(keys_.dump()).u32(static_cast<uint32_t>(handed.size()));
  for (const auto& link : handed) {
    w.i32(link->index).str(link->host);
    link->ranks.encode(w);
  }
  parent_->stream->send_frame(kLeaving, w.take());
  Writer none;
  none.str("");
  std::string empty = none.take();
  for (auto& [index, link] : mesh_) {
    if (link->open) link->stream->send_frame(kLeaving, empty);
  }
  leaving_since_ = now();
  give_back_waits();
  reroute_table();
  end_timer_ = loop_.after(kLeaveSeconds, [this] { over(); });
}

void Session::finish_leaving() {
  if (!leaving_ || over_ || !parent_->acked) return;
  for (const auto& [index, link] : mesh_) {
    if (link->open && !link->acked) return;
  }
  // Requests that came before the others knew: their answers pass through us.
  for (const auto& [id, call] : calls_) {
    if (call.from.first >= 0) {
      loop_.cancel(end_timer_);
      end_timer_ = loop_.after(0.05, [this] {
        if (now() - leaving_since_ > kLeaveSeconds) return over();
        finish_leaving();
      });
      return;
    }
  }
  over();
}

void Session::over() {
  if (over_) return;
  over_ = true;
  release_leaves();
  log("epoch " + std::to_string(epoch_) + " is over here");
  agent_.session_over();
}

void Session::stop(const std::string& why) {
  if (state_ == State::kJoining) return fail_join("join", why);
  if (state_ == State::kFormed && root_ == nullptr) {
    lose({local_ranks(), {"host " + config_.host_name + ": " + why}});
    flush_losses();
  }
  fail("died", why);
}

std::string Session::summary() const {
  if (state_ == State::kFailed) return "the join before it failed: " + losses_.back();
  RankSet here;
  for (const auto& [rank, conn] : ranks_) {
    if (!conn->gone()) here.add(rank);
  }
  if (state_ == State::kJoining) {
    return "host " + config_.host_name + " is not the root: of " +
           std::to_string(config_.world_size) + " ranks it has " + here.named() +
           "; missing: rank 0";
  }
  std::string text = "the previous world of this job (epoch " + std::to_string(epoch_) + ", " +
                     std::to_string(config_.world_size) + " ranks) is still alive";
  if (!here.empty()) {
    text += ": " + here.named() + " on host " + config_.host_name + " (pid " +
            std::to_string(ranks_.at(here.first())->pid) + (here.size() > 1 ? ", ..." : "") + ")";
  }
  return text;
}

Fields Session::inspect() const {
  static const char* names[] = {"joining", "formed", "failed"};
  RankSet here = local_ranks(), living;
  for (const auto& [rank, conn] : ranks_) {
    if (!conn->gone()) living.add(rank);
  }
  return {{"state", names[static_cast<int>(state_)]},
          {"epoch", std::to_string(epoch_)},
          {"index", std::to_string(index_)},
          {"role", root_ ? "root" : "agent"},
          {"world_size", std::to_string(config_.world_size)},
          {"hosts", std::to_string(hosts_)},
          {"ranks", here.text()},
          {"living", living.text()},
          {"children", std::to_string(children_.size())},
          {"mesh", std::to_string(mesh_.size())},
          {"keys", std::to_string(keys_.counters().keys)},
          {"operations", std::to_string(operations())}};
}

}  // namespace commkit
