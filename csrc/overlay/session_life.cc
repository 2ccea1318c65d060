// What links and ranks say while a session lasts; heartbeats and losses.
#include <algorithm>
#include <cstdio>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

// What is lost within this time is told together.
constexpr double kLossSeconds = 0.02;
constexpr size_t kMostLossTexts = 9;

// Up, down, or along the tree and between interior agents.
bool may_say(uint16_t type, bool parent, bool child) {
  switch (type) {
    case kUp:
    case kFailUp:
    case kLostUp:
    case kOpUp:
    case kOpExpired:
    case kProbed:
    case kTableAsk:
    case kListens:
    case kHandover:
    case kParentReady:
    case kMoved:
      return child;
    case kGo:
    case kFailDown:
    case kProgress:
    case kLossDown:
    case kOpDown:
    case kOpFailDown:
    case kProbe:
    case kTable:
    case kTakeOver:
    case kNewParent:
    case kMove:
      return parent;
    case kLeaving:
      return !parent;
    case kLeavingAck:
      return !child;
    default:
      return true;
  }
}

}  // namespace

void Session::link_frame(const LinkPtr& link, uint16_t type, std::string_view payload) {
  auto child = children_.find(link->index);
  bool parent = link == parent_ || link == old_parent_;
  if (!may_say(type, parent, child != children_.end() && child->second == link)) {
    throw BadFrame("a message of type " + std::to_string(type) + ", which is not for it to send");
  }
  Reader r(payload);
  switch (type) {
    case kBeat:
      return;
    case kUp: {
      if (state_ != State::kJoining) return;  // of a host that came too late
      std::vector<HostReport> reports;
      uint32_t count = r.count(8);
      for (uint32_t i = 0; i < count; ++i) {
        HostReport report;
        report.index = r.i32();
        uint32_t ranks = r.count(8);
        for (uint32_t j = 0; j < ranks; ++j) {
          int rank = r.i32();
          if (rank < 0 || rank >= config_.world_size) throw BadFrame("a rank outside the world");
          report.ranks.emplace_back(rank, r.i32());
          link->ranks.add(rank);
        }
        reports.push_back(std::move(report));
      }
      return report(std::move(reports));
    }
    case kFailUp: {
      std::string kind = r.str(), text = r.str();
      // Without a text it asks at its deadline who is missing, and stays for the answer.
      if (!text.empty() || state_ == State::kJoining) link->failed = true;
      link->failed_text = text;
      // The world has formed meanwhile: when the child goes, this is the reason.
      if (state_ != State::kJoining) return;
      if (root_) return fail_join(kind, text);
      // The root decides, and tells everybody the same.
      flush_reports();
      if (auto up = uplink()) up->send_frame(kFailUp, payload);
      return;
    }
    case kLostUp: {
      Loss loss = Loss::decode(r);
      if (!link->ranks.covers(loss.ranks)) throw BadFrame("a loss of ranks that are not below it");
      link->failed_text.clear();  // passed on from below, of what is now told
      return lose(std::move(loss));
    }
    case kOpUp:
      return op_up(link, payload);
    case kOpExpired:
      return op_expired(r.str());
    case kProbed:
      return probed(payload);
    case kLeaving:
      return child_leaving(link, payload);
    case kGo: {
      uint64_t epoch = r.u64();
      int hosts = r.i32(), interior = r.i32();
      if (hosts <= index_ || hosts > kMostRanks || interior < 1 || interior > hosts) {
        throw BadFrame("a number of hosts that cannot be");
      }
      if (state_ == State::kJoining) go(epoch, hosts, interior);
      return;
    }
    case kListens:
      if (root_) listens(link->index, r);
      return;
    case kTableAsk:
      return table_asked(link);
    case kTable:
      return table_came(payload);
    case kFailDown: {
      std::string kind = r.str(), text = r.str();
      return fail(kind, text);
    }
    case kProgress: {
      std::string text = r.str();
      to_children(kProgress, std::string(payload));
      return notice("progress", text);
    }
    case kLossDown:
      return loss_down(payload);
    case kOpDown:
      if (state_ == State::kFormed) op_down(payload);
      return;
    case kOpFailDown: {
      std::string tag = r.str(), kind = r.str(), text = r.str();
      return op_failed(tag, kind, text);
    }
    case kProbe:
      return probe_down(link, payload);
    case kLeavingAck:
      link->acked = true;
      return finish_leaving();
    case kKeyRequest:
      return key_request(link, payload);
    case kKeyReply:
      return key_reply(link, payload);
    case kKeyCancel:
      return key_cancel(link, payload);
    case kKeyMoved:
      return key_moved(link, payload);
    case kHandover:
      return handover_asked(link);
    case kTakeOver:
      return take_over_answered(payload);
    case kNewParent:
      return new_parent(link, payload);
    case kParentReady:
      return parent_ready(link, r.str());
    case kMove:
      return move();
    case kMoved:
      return child_moved(link);
    case kStay:
      return stay(link);
    default:
      log(link->stream->peer() + " sent a message of unknown type " + std::to_string(type));
  }
}

void Session::start_beats() {
  if (beat_timer_ != 0) return;
  beat_due_ = now() + config_.heartbeat / 4;
  beat_timer_ = loop_.after(config_.heartbeat / 4, [this] { beat(); });
}

void Session::beat() {
  std::vector<LinkPtr> links;
  for (auto& [index, link] : children_) links.push_back(link);
  for (const auto& [index, link] : adopted_) links.push_back(link);
  if (parent_) links.push_back(parent_);
  if (new_parent_) links.push_back(new_parent_);
  std::vector<LinkPtr> silent;
  // This process itself stood still: what the others sent meanwhile has not been read yet.
  double late = now() - beat_due_;
  bool stalled = late > config_.heartbeat / 4;
  for (auto& link : links) {
    if (link->left || link->moved || !link->stream || link->stream->closed()) continue;
    link->stream->send_frame(kBeat, "");
    if (stalled) link->heard += late;
    if (now() - link->heard > config_.heartbeat) silent.push_back(link);
  }
  beat_timer_ = 0;
  start_beats();
  for (auto& link : silent) {
    link->stream->close();
    char text[64];
    std::snprintf(text, sizeof text, "said nothing for %g s", config_.heartbeat);
    link_lost(link, text);
  }
}

void Session::link_lost(const LinkPtr& link, const std::string& why) {
  if (state_ == State::kFailed || over_) return;
  if (link == old_parent_) return old_parent_left();
  if (link == new_parent_) return new_parent_.reset();
  if (auto it = adopted_.find(link->index); it != adopted_.end() && it->second == link) {
    adopted_.erase(it);
    return;
  }
  if (link == parent_) {
    if (leaving_) {
      // It has left as well, or is gone: nobody is left to whom our keys could matter.
      link->acked = true;
      return finish_leaving();
    }
    return fail(state_ == State::kJoining ? "join" : "died",
                "host " + config_.host_name +
                    " lost the rest of the world: its parent agent on host " + link->host +
                    " is gone (" + why + ")");
  }
  if (state_ == State::kJoining) {
    auto child = children_.find(link->index);
    if (child != children_.end() && child->second != link) return;  // it has come again
  }
  cancel_calls_of(link);
  promise_over(link->index);
  if (link->left || link->moved) return reroute(link);
  link->left = true;
  std::string text = "host " + link->host + " with " +
                     (link->ranks.empty() ? std::string("no ranks yet") : link->ranks.named()) +
                     " is lost: " + (link->failed_text.empty() ? why : link->failed_text);
  log(text);
  if (state_ == State::kJoining && root_ && link->ranks.empty() && !link->failed)
    return child_may_return(link, text);
  // It goes because its join failed, and the root, which knows, has yet to answer: with the failure
  // of all, or with a world that had formed before.
  if (state_ == State::kJoining && link->failed && !root_) return;
  if (state_ == State::kJoining) return fail_join("join", text + ", while joining");
  lose({link->ranks, {text}});
  reroute(link);
  advance_handover();
  check_over();
}

void Session::rank_ended(const RankPtr& conn, const std::string& how) {
  if (conn->gone()) {
    conn->ended = true;
    return check_over();
  }
  conn->ended = true;
  agent_.drop_store(conn->token, false, "its rank has ended");
  for (auto& [theirs, mine] : std::exchange(conn->keys, {})) cancel_call(mine);
  std::string who = "rank " + std::to_string(conn->rank) + " (pid " + std::to_string(conn->pid) +
                    " on host " + config_.host_name + ")";
  auto it = ranks_.find(conn->rank);
  if (it == ranks_.end() || it->second != conn) return check_over();  // an extra, already told
  if (state_ == State::kJoining) {
    fail_join("join", who + " " + (how.empty() ? "exited or gave up" : how) + " while joining");
  } else if (state_ == State::kFormed) {
    RankSet ranks;
    ranks.add(conn->rank);
    // Ending without a word but with exit code 0 is ordinary: it is recorded, not announced.
    Loss loss;
    loss.ranks = ranks;
    if (!how.empty()) loss.texts.push_back(who + " " + how);
    lose(loss);
  }
  check_over();
}

void Session::lose(Loss loss) {
  if (state_ == State::kJoining) {
    return fail_join("join", loss.texts.empty() ? loss.ranks.named() + " exited while joining"
                                                : loss.texts.front());
  }
  if (state_ != State::kFormed) return;
  pending_loss_.merge(loss);
  if (loss_timer_ == 0) loss_timer_ = loop_.after(kLossSeconds, [this] { flush_losses(); });
}

void Session::flush_losses() {
  loop_.cancel(loss_timer_);
  loss_timer_ = 0;
  if (state_ != State::kFormed || pending_loss_.ranks.empty()) return;
  Loss loss = std::exchange(pending_loss_, {});
  Writer w;
  loss.encode(w);
  std::string payload = w.take();
  if (root_) return loss_down(payload);
  parent_->stream->send_frame(kLostUp, payload);
}

void Session::loss_down(std::string_view payload) {
  std::string copy(payload);
  to_children(kLossDown, copy);
  Reader r(copy);
  loss_here(Loss::decode(r));
}

void Session::loss_here(const Loss& loss) {
  if (state_ != State::kFormed) return;
  dead_.add(loss.ranks);
  for (const auto& text : loss.texts) {
    losses_.push_back(text);
    announced_ = text;
    notice("died", text);
  }
  if (loss.texts.empty()) {
    losses_.push_back(loss.ranks.named() + " has exited");
    log(losses_.back());
  }
  std::string text = losses_.back();
  // Operations that wait for the dead cannot end.
  std::vector<std::string> tags;
  for (const auto& [tag, op] : ops_) {
    if (op.kind != kBroadcast || dead_.contains(op.peer)) tags.push_back(tag);
  }
  for (const auto& tag : tags) op_failed(tag, "died", text);
  for (auto& [rank, conn] : ranks_) {
    if (conn->creating && !loss.texts.empty()) agent_.drop_store(conn->token, true, text);
    if (conn->leaving) try_leave(conn, true);
  }
}

void Loss::merge(const Loss& other) {
  ranks.add(other.ranks);
  for (const auto& text : other.texts) {
    if (texts.size() < kMostLossTexts) texts.push_back(text);
  }
  // Beyond those named one by one, the ranks are.
  if (texts.size() >= kMostLossTexts) {
    texts.resize(kMostLossTexts);
    texts.back() = "in all " + ranks.named() + " are gone";
  }
}

void Loss::encode(Writer& w) const {
  ranks.encode(w);
  w.strs(texts);
}

Loss Loss::decode(Reader& r) {
  Loss loss;
  loss.ranks = RankSet::decode(r);
  loss.texts = r.strs();
  return loss;
}

void Session::rank_frame(const RankPtr& conn, uint16_t type, std::string_view payload) {
  Reader r(payload);
  switch (type) {
    case kRankOp:
      return rank_op(conn, payload);
    case kRankKey:
      return rank_key(conn, payload);
    case kRankKeyCancel: {
      auto it = conn->keys.find(r.u64());
      if (it == conn->keys.end()) return;
      uint64_t mine = it->second;
      conn->keys.erase(it);
      return cancel_call(mine);
    }
    case kRankCreating:
      conn->creating = r.u8() != 0;
      if (conn->creating && !announced_.empty()) agent_.drop_store(conn->token, true, announced_);
      return;
    case kRankConnected:
      return rank_connected(conn, payload);
    case kRankLeave:
      return rank_leave(conn, r.u32() / 1000.0);
    case kRankExiting:
      conn->said_exit = true;
      conn->exit_reason = r.str();
      // The others need not wait for its end, and it is not to be counted as one that has come.
      if (state_ == State::kJoining && !conn->exit_reason.empty() && !conn->gone())
        rank_ended(conn, "ended: " + conn->exit_reason);
      return;
    case kRankRoot:
      if (root_ && (agent_.listening() || config_.root_kind == RootKind::kLocal)) {
        Writer w;
        w.str(own_root_text());
        return conn->stream->send_frame(kRootIs, w.take());
      }
      root_asked_.push_back(conn);
      return;
    default:
      throw BadFrame("a message of unknown type " + std::to_string(type));
  }
}

}  // namespace commkit
