// Operations of the whole world over the tree: gather, broadcast, agree; and probes, which ask
// every agent at once what it has (who has not come to an operation, how many keys there are).
#include <algorithm>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

constexpr size_t kMostClasses = 4;  // distinct digests worth naming
constexpr size_t kClosedOps = 256;
constexpr double kProbeSeconds = 1.0;
constexpr size_t kMostGathered = 512u << 20;
constexpr int64_t kMostKeys = int64_t{1} << 40;

void put_payloads(Writer& w, const std::map<int, std::string>& payloads) {
  w.u32(static_cast<uint32_t>(payloads.size()));
  for (const auto& [rank, bytes] : payloads) w.i32(rank).str(bytes);
}

}  // namespace

void Session::rank_op(const RankPtr& conn, std::string_view payload) {
  Reader r(payload);
  uint64_t id = r.u64();
  auto kind = static_cast<OpKind>(r.u8());
  std::string tag = r.str();
  double timeout = r.u32() / 1000.0;
  int peer = r.i32();
  bool gives = r.u8() != 0;
  std::string bytes = r.str(), description = r.str();
  auto refuse = [&](const std::string& why, const std::string& text) {
    Writer w;
    w.u64(id).str(why).str(text);
    conn->stream->send_frame(kOpFailed, w.take());
  };
  if (state_ != State::kFormed)
    return refuse(losses_.empty() ? "agent" : "died",
                  losses_.empty() ? "the world is gone" : losses_.back());
  if (kind < kGather || kind > kAgree) return refuse("usage", "unknown operation");
  if (is_fence(tag)) return refuse("usage", "this tag is the agents' own");
  if (peer >= config_.world_size || peer < (kind == kBroadcast ? 0 : -1)) {
    return refuse("usage", "rank " + std::to_string(peer) + " is outside this world of " +
                               std::to_string(config_.world_size));
  }
  if (auto failed = failed_ops_.find(tag); failed != failed_ops_.end()) {
    return refuse(failed->second.first, failed->second.second);
  }
  // A dead rank can neither give nor agree; the payload of a living one may still be broadcast.
  if (!dead_.empty() && (kind != kBroadcast || dead_.contains(peer)))
    return refuse("died", losses_.back());
  Op& op = ops_[tag];
  if (op.callers.empty() && op.arrived.empty() && !op.result) {
    op.kind = kind;
    op.peer = peer;
  }
  if (op.kind != kind || op.peer != peer) {
    return refuse("usage", "operation '" + tag + "' is used for something else by another rank");
  }
  if (op.callers.count(conn->rank) != 0 || op.delivered.count(conn->rank) != 0) {
    return refuse("usage", "operation '" + tag + "' was already called by this rank");
  }
  op.callers[conn->rank] = id;
  // As in MPI: a rank that only gives need not wait for the receiver.
  bool only_gives = kind == kGather && peer >= 0 && peer != conn->rank;
  if (!only_gives) op.timers.push_back(loop_.after(timeout, [this, tag] { op_expired(tag); }));
  if (kind == kBroadcast) {
    if (gives) {
      op.arrived.add(conn->rank);
      Writer w;
      w.str(tag).u8(kind).i32(peer).str(bytes);
      std::string body = w.take();
      if (root_) return op_down(body);
      Writer up;
      up.str(tag).u8(kind).i32(peer);
      op.arrived.encode(up);
      up.str(bytes);
      parent_->stream->send_frame(kOpUp, up.take());
    }
    return deliver(tag);
  }
  contribute(tag, op, conn->rank, std::move(bytes), std::move(description));
  if (only_gives) {
    auto it = ops_.find(tag);
    if (it != ops_.end()) it->second.callers.erase(conn->rank);
    Writer w;
    w.u64(id).u8(0).strs({});
    conn->stream->send_frame(kOpDone, w.take());
  }
}

void Session::contribute(const std::string& tag, Op& op, int rank, std::string payload,
                         std::string description) {
  op.arrived.add(rank);
  if (op.kind == kGather) {
    op.payloads[rank] = std::move(payload);
  } else {
    merge_class(op, {std::move(payload), std::move(description), 1, rank});
  }
  advance(tag);
}

void Session::merge_class(Op& op, const Op::Class& c) {
  for (auto& known : op.classes) {
    if (known.digest != c.digest) continue;
    known.count += c.count;
    if (c.first < known.first) {
      known.first = c.first;
      known.description = c.description;
    }
    return;
  }
  if (op.classes.size() < kMostClasses) op.classes.push_back(c);
}

void Session::advance(const std::string& tag) {
  auto it = ops_.find(tag);
  if (it == ops_.end() || it->second.sent || it->second.kind == kBroadcast) return;
  Op& op = it->second;
  if (is_fence(tag)) op.arrived.add(absent());
  if (op.arrived.size() < subtree().size()) return;
  op.sent = true;
  size_t bytes = 0;
  for (const auto& [rank, payload] : op.payloads) bytes += payload.size() + 8;
  if (bytes > kMostGathered) {
    if (!root_) {
      Writer expired;
      expired.str(tag);
      parent_->stream->send_frame(kOpExpired, expired.take());
    }
    return op_failed(tag, "usage",
                     "'" + tag.substr(0, tag.rfind('#')) + "': payloads of " +
                         std::to_string(bytes) + " bytes in all; at most " +
                         std::to_string(kMostGathered) + " can be gathered");
  }
  if (root_) return finish(tag, op);
  send_op_up(tag, op);
  // A gather's result comes back only to the receiver's host.
  if (op.kind == kGather && op.peer >= 0 && !subtree().contains(op.peer)) close_op(tag);
}

void Session::send_op_up(const std::string& tag, Op& op) {
  Writer w;
  w.str(tag).u8(op.kind).i32(op.peer);
  op.arrived.encode(w);
  if (op.kind == kGather) {
    put_payloads(w, op.payloads);
    op.payloads.clear();
  } else {
    w.u32(static_cast<uint32_t>(op.classes.size()));
    for (const auto& c : op.classes) w.str(c.digest).str(c.description).i32(c.count).i32(c.first);
  }
  parent_->stream->send_frame(kOpUp, w.take());
}

void Session::op_up(const LinkPtr& link, std::string_view payload) {
  Reader r(payload);
  std::string tag = r.str();
  auto kind = static_cast<OpKind>(r.u8());
  int peer = r.i32();
  RankSet arrived = RankSet::decode(r);
  if (state_ != State::kFormed) return;
  if (kind < kGather || kind > kAgree) throw BadFrame("an unknown operation");
  if (!link->ranks.covers(arrived)) throw BadFrame("an operation of ranks that are not below it");
  if (kind == kBroadcast) {
    if (!root_) return parent_->stream->send_frame(kOpUp, payload);
    Writer w;
    w.str(tag).u8(kind).i32(peer).str(r.view());
    return op_down(w.take());
  }
  if (failed_ops_.count(tag) != 0) return;
  Op& op = ops_[tag];
  if (op.arrived.empty()) {
    op.kind = kind;
    op.peer = peer;
  }
  if (op.kind != kind || op.peer != peer) {
    return op_failed(tag, "usage",
                     "operation '" + tag + "' is used for different things by different ranks");
  }
  if (kind == kGather) {
    if (r.count(8) != static_cast<uint32_t>(arrived.size())) {
      throw BadFrame("payloads of another number of ranks");
    }
    for (int i = 0; i < arrived.size(); ++i) {
      int rank = r.i32();
      if (!arrived.contains(rank)) throw BadFrame("a payload of a rank that has not come");
      op.payloads[rank] = r.str();
    }
  } else {
    uint32_t count = r.count(16);
    for (uint32_t i = 0; i < count; ++i) {
      Op::Class c;
      c.digest = r.str();
      c.description = r.str();
      c.count = r.i32();
      c.first = r.i32();
      if (c.count < 1 || c.count > arrived.size() || !arrived.contains(c.first)) {
        throw BadFrame("a digest of ranks that have not come");
      }
      merge_class(op, c);
    }
  }
  op.arrived.add(arrived);
  advance(tag);
}

void Session::finish(const std::string& tag, Op& op) {
  Writer w;
  w.str(tag).u8(op.kind).i32(op.peer);
  if (op.kind == kGather) {
    put_payloads(w, op.payloads);
    return op_down(w.take());
  }
  if (op.classes.size() <= 1) return op_down(w.take());
  // The most common digest is taken for the right one, the smaller first rank where it is a tie.
  std::sort(op.classes.begin(), op.classes.end(), [](const Op::Class& a, const Op::Class& b) {
    return a.count != b.count ? a.count > b.count : a.first < b.first;
  });
  const Op::Class& right = op.classes[0];
  auto wrong =
      std::min_element(op.classes.begin() + 1, op.classes.end(),
                       [](const Op::Class& a, const Op::Class& b) { return a.first < b.first; });
  op_failed(tag, "mismatch",
            "rank " + std::to_string(wrong->first) + " (host " +
                root_->hosts[static_cast<size_t>(root_->host_of[static_cast<size_t>(wrong->first)])]
                    .hello.host +
                ") differs: it has " + wrong->description + "; rank " +
                std::to_string(right.first) + " and " + std::to_string(right.count - 1) +
                " more have " + right.description);
}

// Takes the result in, and sends it on to whom it concerns.
void Session::op_down(std::string_view payload) {
  Reader r(payload);
  std::string tag = r.str();
  auto kind = static_cast<OpKind>(r.u8());
  int peer = r.i32();
  std::string copy(payload);  // `payload` may lie in a buffer that sending reuses
  bool to_one = kind == kGather && peer >= 0;
  for (auto& [index, link] : children_) {
    if (!link->stream) continue;  // adopted after its end
    if (!to_one || link->ranks.contains(peer)) link->stream->send_frame(kOpDown, copy);
  }
  if (kind == kAgree && is_fence(tag)) {
    close_op(tag);
    return fence_open(tag.substr(std::string(kFenceTag).size()));
  }
  if (to_one && ranks_.count(peer) == 0) return close_op(tag);
  Op& op = ops_[tag];
  op.kind = kind;
  op.peer = peer;
  op.result.emplace();
  if (kind == kGather) {
    uint32_t count = r.count(8);
    for (uint32_t i = 0; i < count; ++i) {
      r.i32();  // ordered by rank, and none is missing
      op.result->push_back(r.str());
    }
  } else if (kind == kBroadcast) {
    op.result->push_back(r.str());
  }
  deliver(tag);
}

void Session::deliver(const std::string& tag) {
  auto it = ops_.find(tag);
  if (it == ops_.end() || !it->second.result) return;
  Op& op = it->second;
  Writer body;
  body.u8(1).strs(*op.result);
  std::string bytes = body.take();
  for (auto& [rank, id] : std::exchange(op.callers, {})) {
    op.delivered.insert(rank);
    auto conn = ranks_.find(rank);
    if (conn == ranks_.end()) continue;
    Writer w;
    w.u64(id);
    conn->second->stream->send_frame(kOpDone, w.take() + bytes);
  }
  // A broadcast may be here before its last receiver.
  size_t living = 0;
  for (auto& [rank, conn] : ranks_) living += conn->gone() ? 0 : 1;
  if (op.kind != kBroadcast || op.delivered.size() >= living) close_op(tag);
}

void Session::close_op(const std::string& tag) {
  auto it = ops_.find(tag);
  if (it == ops_.end()) return;
  for (auto id : it->second.timers) loop_.cancel(id);
  ops_.erase(it);
  closed_ops_.push_back(tag);
  if (closed_ops_.size() > kClosedOps) closed_ops_.pop_front();
}

void Session::op_failed(const std::string& tag, const std::string& kind, const std::string& text) {
  Writer w;
  w.str(tag).str(kind).str(text);
  to_children(kOpFailDown, w.take());
  // For those of our ranks that have yet to call it.
  if (failed_ops_.emplace(tag, std::make_pair(kind, text)).second) failed_order_.push_back(tag);
  if (failed_order_.size() > kClosedOps) {
    failed_ops_.erase(failed_order_.front());
    failed_order_.pop_front();
  }
  auto it = ops_.find(tag);
  if (it == ops_.end()) return;
  for (auto& [rank, id] : it->second.callers) {
    auto conn = ranks_.find(rank);
    if (conn == ranks_.end()) continue;
    Writer failed;
    failed.u64(id).str(kind).str(text);
    conn->second->stream->send_frame(kOpFailed, failed.take());
  }
  close_op(tag);
}

void Session::fail_ops(const std::string& kind, const std::string& text) {
  std::vector<std::string> tags;
  for (const auto& [tag, op] : ops_) tags.push_back(tag);
  for (const auto& tag : tags) op_failed(tag, kind, text);
}

void Session::op_expired(const std::string& tag) {
  if (state_ != State::kFormed) return;
  if (!root_) {
    Writer w;
    w.str(tag);
    return parent_->stream->send_frame(kOpExpired, w.take());
  }
  for (const auto& [id, probe] : probes_) {
    if (probe.kind == kProbeOp && probe.tag == tag) return;  // already asked
  }
  probe(kProbeOp, tag, [this, tag](ProbeAnswer&& answer) {
    RankSet missing = RankSet::all(config_.world_size);
    missing.remove(answer.arrived);
    std::string who =
        missing.empty() ? "every rank has come, but late" : missing.named() + " did not come";
    std::set<std::string> hosts;
    for (const auto& [low, high] : missing.ranges()) {
      for (int rank = low; rank <= high && hosts.size() < 8; ++rank) {
        hosts.insert(root_->hosts[static_cast<size_t>(root_->host_of[static_cast<size_t>(rank)])]
                         .hello.host);
      }
    }
    std::string names;
    for (const auto& host : hosts) names += (names.empty() ? " (host " : ", ") + host;
    if (!names.empty()) names += ")";
    op_failed(tag, "timeout",
              "'" + tag.substr(0, tag.rfind('#')) + "' passed its deadline: " + who + names);
  });
}

// ---------------------------------------------------------------- probes

void Session::probe(ProbeKind kind, const std::string& tag,
                    std::function<void(ProbeAnswer&&)> done) {
  uint64_t id = ++next_probe_;
  auto& probe = probes_[id];
  probe.done = std::move(done);
  Writer w;
  w.u64(id).u8(kind).str(tag);
  probe_down(nullptr, w.take());
}

void Session::probe_down(const LinkPtr& from, std::string_view payload) {
  Reader r(payload);
  uint64_t id = r.u64();
  auto kind = static_cast<ProbeKind>(r.u8());
  std::string tag = r.str();
  auto& probe = probes_[id];
  if (probe.waiting > 0) return;  // asked already
  probe.kind = kind;
  probe.tag = tag;
  probe.from = from;
  if (kind == kProbeOp) {
    bool closed = std::find(closed_ops_.begin(), closed_ops_.end(), tag) != closed_ops_.end();
    auto op = ops_.find(tag);
    if (closed) {
      probe.answer.arrived = local_ranks();
    } else if (op != ops_.end()) {
      probe.answer.arrived.add(op->second.arrived);
      for (const auto& [rank, caller] : op->second.callers) probe.answer.arrived.add(rank);
    }
  } else {
    // Not by a request: one that is made while another is answered has to wait for it.
    if (kind == kProbeKeys) probe.answer.number = static_cast<int64_t>(keys_.counters().keys);
    if (kind == kProbeKeyList) probe.answer.keys = keys_.keys();
  }
  for (auto& [index, link] : children_) {
    if (link->left) continue;
    ++probe.waiting;
    link->stream->send_frame(kProbe, payload);
  }
  if (probe.waiting == 0) return probe_answered(id);
  // An agent that does not answer must not hold up the report about it.
  probe.timer = loop_.after(kProbeSeconds, [this, id] { probe_answered(id); });
}

void Session::probed(std::string_view payload) {
  Reader r(payload);
  uint64_t id = r.u64();
  auto it = probes_.find(id);
  if (it == probes_.end()) return;
  auto& probe = it->second;
  probe.answer.arrived.add(RankSet::decode(r));
  int64_t number = r.i64();
  if (number < 0 || number > kMostKeys) throw BadFrame("a number of keys that cannot be");
  probe.answer.number += number;
  probe.answer.complete = r.u8() != 0 && probe.answer.complete;
  for (auto& key : r.strs()) probe.answer.keys.push_back(std::move(key));
  if (--probe.waiting == 0) probe_answered(id);
}

void Session::probe_answered(uint64_t id) {
  auto it = probes_.find(id);
  if (it == probes_.end()) return;
  Probe probe = std::move(it->second);
  probes_.erase(it);
  loop_.cancel(probe.timer);
  probe.answer.complete = probe.answer.complete && probe.waiting == 0;
  if (root_) return probe.done(std::move(probe.answer));
  Writer w;
  w.u64(id);
  probe.answer.arrived.encode(w);
  w.i64(probe.answer.number).u8(probe.answer.complete ? 1 : 0).strs(probe.answer.keys);
  probe.from->stream->send_frame(kProbed, w.take());
}

}  // namespace commkit
