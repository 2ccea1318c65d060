#include "wire/key_table.h"

#include <limits>
#include <utility>
#include <vector>

#include "net/codec.h"

namespace commkit {
namespace {

constexpr uint8_t kDumpVersion = 1;

// As std::stoll reads it, which is what torch uses: blanks, a sign, digits, anything after them.
std::optional<int64_t> leading_number(const std::string& text) {
  size_t at = text.find_first_not_of(" \t\n\v\f\r");
  if (at == std::string::npos) return std::nullopt;
  bool negative = text[at] == '-';
  if (text[at] == '-' || text[at] == '+') ++at;
  const uint64_t most = uint64_t{std::numeric_limits<int64_t>::max()} + (negative ? 1 : 0);
  uint64_t value = 0;
  size_t start = at;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
    uint64_t digit = static_cast<uint64_t>(text[at] - '0');
    if (value > (most - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  if (at == start) return std::nullopt;
  return static_cast<int64_t>(negative ? uint64_t{0} - value : value);
}

// Wraps around, as the addition does in torch on every machine there is.
int64_t sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

KvReply refused(const KvRequest& request, const std::string& holds) {
  KvReply reply;
  reply.found = false;
  reply.value = "key " + request.key + " holds '" + holds.substr(0, 32) +
                "', expected a decimal number of 64 bits to add to";
  return reply;
}

// What a wait is answered by a key: its value too, unless that is long.
KvReply awaited(const std::string& value) {
  KvReply reply;
  if (value.size() > kMostAwaited) return reply;
  reply.number = -1;
  reply.value = value;
  return reply;
}

KvReply in_queue() {
  KvReply reply;
  reply.number = 1;
  return reply;
}

}  // namespace

uint64_t KeyTable::apply(KvRequest&& request, Done done) {
  uint64_t id = ++last_id_;
  ++operations_;
  if (auto reply = take(request)) {
    // Before those it wakes: whoever set a key goes on first.
    answers_.push_front({id, std::move(done), std::move(*reply)});
  } else {
    wait(id, request.key, request.op, std::move(done));
  }
  answer();
  return id;
}

// The reply, or nothing: the request has to wait.  Those it wakes are queued in answers_.
std::optional<KvReply> KeyTable::take(KvRequest& q) {
  KvReply reply;
  auto it = values_.find(q.key);
  bool exists = it != values_.end();
  switch (q.op) {
    case KvOp::kSet:
      put(q.key, std::move(q.value));
      wake(q.key, true);
      return reply;
    case KvOp::kCompareSet:
      // A missing key that was expected to hold something: torch answers with the expectation.
      reply.value = exists ? it->second : q.expected;
      if (exists ? it->second == q.expected : q.expected.empty()) {
        reply.value = q.value;
        put(q.key, std::move(q.value));
        wake(q.key, true);
      }
      return reply;
    case KvOp::kGet:
      reply.found = exists;
      if (exists) reply.value = it->second;
      return reply;
    case KvOp::kAdd: {
      std::optional<int64_t> old = exists ? leading_number(it->second) : 0;
      if (!old) return refused(q, it->second);
      reply.number = sum(*old, q.amount);
      put(q.key, std::to_string(reply.number));
      wake(q.key, true);
      return reply;
    }
    case KvOp::kBarrier: {
      std::optional<int64_t> old = exists ? leading_number(it->second) : 0;
      if (!old) return refused(q, it->second);
      reply.number = sum(*old, 1);
      put(q.key, std::to_string(reply.number));
      bool complete = reply.number >= q.amount;
      wake(q.key, complete);
      if (!complete) return std::nullopt;
      return reply;
    }
    case KvOp::kCheck:
      reply.found = exists || queues_.count(q.key) > 0;
      return reply;
    case KvOp::kWait:
      if (!exists && queues_.count(q.key) == 0) return std::nullopt;
      return exists ? awaited(it->second) : in_queue();
    case KvOp::kDelete:
      reply.found = exists;
      reply.number = exists ? 1 : 0;
      if (exists) {
        bytes_ -= it->first.size() + it->second.size();
        values_.erase(it);
      }
      return reply;
    case KvOp::kAppend:
      if (exists) {
        it->second += q.value;
        bytes_ += q.value.size();
      } else {
        put(q.key, std::move(q.value));
      }
      wake(q.key, true);
      return reply;
    case KvOp::kNumKeys:
      reply.number = static_cast<int64_t>(values_.size());
      return reply;
    case KvOp::kListKeys:
      reply.keys = keys();
      return reply;
    case KvOp::kQueuePush: {
      bytes_ += q.key.size() + q.value.size();
      auto& queue = queues_[q.key];
      queue.push_back(std::move(q.value));
      reply.number = static_cast<int64_t>(queue.size());
      serve_queue(q.key);
      return reply;
    }
    case KvOp::kQueuePop:
      if (queues_.count(q.key) > 0) {
        reply = pop(q.key);
        // Whoever was woken for this element may be gone without it; the next must not sleep on
        // what is left.
        serve_queue(q.key);
        return reply;
      }
      if (q.amount == 1) return std::nullopt;
      reply.found = false;
      return reply;
    case KvOp::kQueueLen: {
      auto queue = queues_.find(q.key);
      reply.number = queue == queues_.end() ? 0 : static_cast<int64_t>(queue->second.size());
      return reply;
    }
  }
  reply.found = false;
  reply.value = "operation " + std::to_string(static_cast<int>(q.op)) + " is unknown";
  return reply;
}

void KeyTable::put(const std::string& key, std::string value) {
  auto [it, fresh] = values_.try_emplace(key);
  bytes_ += value.size() + (fresh ? key.size() : 0);
  bytes_ -= it->second.size();
  it->second = std::move(value);
}

KvReply KeyTable::pop(const std::string& key) {
  auto it = queues_.find(key);
  KvReply reply;
  reply.number = static_cast<int64_t>(it->second.size());
  reply.value = std::move(it->second.front());
  bytes_ -= key.size() + reply.value.size();
  it->second.pop_front();
  if (it->second.empty()) queues_.erase(it);
  return reply;
}

void KeyTable::wait(uint64_t id, const std::string& key, KvOp op, Done done) {
  waiters_[key].emplace(id, Waiter{op, std::move(done)});
  waiting_for_.emplace(id, key);
}

void KeyTable::forget(const std::string& key, uint64_t id) {
  waiting_for_.erase(id);
  auto it = waiters_.find(key);
  it->second.erase(id);
  if (it->second.empty()) waiters_.erase(it);
}

void KeyTable::cancel(uint64_t id) {
  if (auto it = waiting_for_.find(id); it != waiting_for_.end()) {
    forget(std::string(it->second), id);
    return;
  }
  for (Answer& one : answers_) {
    if (one.id == id) one.done = nullptr;
  }
}

// A key was written: queue the answers of those who waited for it.  Barriers end with the arrival
// that completes them and, as in torch, with any other write to their key.
void KeyTable::wake(const std::string& key, bool barriers) {
  auto it = waiters_.find(key);
  if (it == waiters_.end()) return;
  std::vector<uint64_t> woken;
  for (auto& [id, waiter] : it->second) {
    if (waiter.op == KvOp::kWait || (waiter.op == KvOp::kBarrier && barriers)) {
      bool waits = waiter.op == KvOp::kWait;
      answers_.push_back(
          {id, std::move(waiter.done), waits ? awaited(values_.at(key)) : KvReply{}});
      woken.push_back(id);
    }
  }
  for (uint64_t id : woken) forget(key, id);
}

// A queue has an element: the first who waits to pop gets it; else the first who waits for the
// key is told, and one only, since it will come back for one element.
void KeyTable::serve_queue(const std::string& key) {
  auto it = waiters_.find(key);
  if (it == waiters_.end() || queues_.count(key) == 0) return;
  for (KvOp wanted : {KvOp::kQueuePop, KvOp::kWait}) {
    for (auto& [id, waiter] : it->second) {
      if (waiter.op != wanted) continue;
      KvReply reply = wanted == KvOp::kQueuePop ? pop(key) : in_queue();
      answers_.push_back({id, std::move(waiter.done), std::move(reply)});
      forget(key, uint64_t{id});
      return;
    }
  }
}

// Callbacks come last, when the table is whole, since they may call apply() and cancel().
void KeyTable::answer() {
  if (answering_) return;
  struct Guard {
    bool& flag;
    explicit Guard(bool& f) : flag(f) { flag = true; }
    ~Guard() { flag = false; }
  } guard(answering_);
  while (!answers_.empty()) {
    Answer one = std::move(answers_.front());
    answers_.pop_front();
    if (one.done) one.done(std::move(one.reply));
  }
}

std::string KeyTable::dump() const {
  Writer out;
  out.u8(kDumpVersion);
  out.u32(static_cast<uint32_t>(values_.size()));
  for (const auto& [key, value] : values_) out.str(key).str(value);
  out.u32(static_cast<uint32_t>(queues_.size()));
  for (const auto& [key, queue] : queues_) {
    out.str(key).u32(static_cast<uint32_t>(queue.size()));
    for (const auto& element : queue) out.str(element);
  }
  return out.take();
}

void KeyTable::restore(std::string_view dumped) {
  // Read all of it first: a broken dump changes nothing.
  Reader in(dumped);
  if (in.u8() != kDumpVersion) throw BadFrame("dumped keys of another version");
  // Memory follows what is there, not the counts.
  std::vector<std::pair<std::string, std::string>> values;
  for (uint32_t n = in.count(8); n > 0; --n) {
    std::string key = in.str();
    values.emplace_back(std::move(key), in.str());
  }
  std::vector<std::pair<std::string, std::vector<std::string>>> queues;
  for (uint32_t n = in.count(8); n > 0; --n) {
    std::string key = in.str();
    queues.emplace_back(std::move(key), in.strs());
  }
  if (!in.done()) throw BadFrame("dumped keys are followed by something else");
  for (auto& [key, value] : values) {
    if (values_.count(key) > 0) continue;
    put(key, std::move(value));
    wake(key, true);
  }
  for (auto& [key, elements] : queues) {
    if (elements.empty()) continue;
    auto& queue = queues_[key];
    for (const auto& element : elements) bytes_ += key.size() + element.size();
    queue.insert(queue.begin(), std::make_move_iterator(elements.begin()),
                 std::make_move_iterator(elements.end()));
    for (size_t i = 0; i < elements.size(); ++i) serve_queue(key);
  }
  answer();
}

std::vector<std::string> KeyTable::keys() const {
  std::vector<std::string> out;
  out.reserve(values_.size());
  for (const auto& [key, value] : values_) out.push_back(key);
  return out;
}

KeyTable::Counters KeyTable::counters() const {
  return {operations_, values_.size(), queues_.size(), waiting_for_.size(), bytes_};
}

}  // namespace commkit
