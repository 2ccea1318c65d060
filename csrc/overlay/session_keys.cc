// Keys: who owns one, the way there, merged waits.
//
// A key "commkit:<rank>/..." belongs to the agent of that rank; any other key to an interior agent
// by hash. A leaf asks its parent; interior agents know every host's place and reach one another
// directly, so a request takes at most three hops.  An agent that leaves hands its keys to its
// parent, which then owns them, and what is left of its subtree too (session_handover.cc).
//
// Waits for one key are merged at every agent: one goes on, its answer goes to all.  The answer has
// the value with it, for those who began to wait before it was read: torch's get is a wait and a
// read.  Reads are not merged: a merged read could return what was there before a write that its
// reader already knows of.
#include <algorithm>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

// A value that answers a wait was read so many seconds ago at most, when the answer is made.
constexpr double kReadAgo = 0.0002;

// Clocks of two hosts may differ in speed by this.
constexpr double kDrift = 0.01;

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

void Session::send_on(const LinkPtr& link, uint16_t type, std::string payload) {
  if (link->open) {
    link->stream->send_frame(type, payload);
  } else {
    link->queued.push_back(frame(type, payload));
  }
}

uint64_t Session::call(KeyCall call) {
  uint64_t id = ++next_call_;
  ++asked_;
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
    uint64_t at = keys_.apply(std::move(copy), [this, id, op, since = call.since](KvReply&& reply) {
      if (op == KvOp::kWait) awaited(id, reply, std::max(since, now() - kReadAgo));
      answer(id, std::move(reply));
    });
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
    carrier.done = [this, key, sent = carrier.since](KvReply&& reply) {
      auto waiters = std::move(merged_[key].waiters);
      merged_.erase(key);
      // A queue's element is for one of them; the others wait again, at the owner's table.
      bool one = reply.number == 1;
      double read = sent + static_cast<double>(-1 - reply.number) * 1e-6 * (1 - kDrift);
      for (uint64_t waiter : waiters) {
        if (!one || waiter == *waiters.begin()) {
          KvReply copy(reply);
          awaited(waiter, copy, read);
          answer(waiter, std::move(copy));
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

// A wait of ours is answered with a value that was read at `read`.  For who began to wait later it
// is too old: who may know of a later write must not be given it.
void Session::awaited(uint64_t id, KvReply& reply, double read) {
  auto it = calls_.find(id);
  if (it == calls_.end() || reply.number >= 0) return;
  double after = read - it->second.since;
  if (after >= 0) {
    reply.number = -1 - static_cast<int64_t>(after * 1e6);
  } else {
    reply.number = 0;
    reply.value.clear();
  }
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
  ++asked_;
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
  ++asked_;
  conn->keys[theirs] = mine;
  calls_.emplace(mine, std::move(call));
  dispatch(mine);
}

}  // namespace commkit
