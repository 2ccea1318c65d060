// The keys and queues that one owner keeps in memory, with those who wait for them.
// Semantics are those of torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "wire/key_value.h"

namespace commkit {

class KeyTable {
 public:
  using Done = KeyValue::Done;

  struct Counters {
    uint64_t operations = 0;  // taken since the start
    size_t keys = 0;
    size_t queues = 0;   // not empty
    size_t waiting = 0;  // requests not answered yet
    size_t bytes = 0;    // of keys and values, queues included
  };

  KeyTable() = default;
  KeyTable(const KeyTable&) = delete;
  KeyTable& operator=(const KeyTable&) = delete;

  // Takes effect before it returns; `done` is called before that too, unless it has to wait, or
  // apply() itself runs inside a `done`: that one comes first.  `done` must not destroy the table.
  uint64_t apply(KvRequest&& request, Done done);
  void cancel(uint64_t id);

  // Keys and queues as one string, for another owner; those who wait are not part of it.
  std::string dump() const;
  // Adds what dump() wrote, and answers those who waited for it.  A key that is already here is
  // newer and keeps its value; queued elements come before those already here.  Throws BadFrame.
  void restore(std::string_view dumped);

  Counters counters() const;
  // In no order; queues do not count.
  std::vector<std::string> keys() const;

 private:
  struct Waiter {
    KvOp op;
    Done done;
  };
  struct Answer {
    uint64_t id;
    Done done;
    KvReply reply;
  };
  using Waiters = std::map<uint64_t, Waiter>;  // by id, hence in order of arrival

  std::optional<KvReply> take(KvRequest& request);
  void put(const std::string& key, std::string value);
  KvReply pop(const std::string& key);
  void wait(uint64_t id, const std::string& key, KvOp op, Done done);
  void forget(const std::string& key, uint64_t id);
  void wake(const std::string& key, bool barriers);
  void serve_queue(const std::string& key);
  void answer();

  uint64_t last_id_ = 0;
  uint64_t operations_ = 0;
  size_t bytes_ = 0;
  bool answering_ = false;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;  // none is empty
  std::unordered_map<std::string, Waiters> waiters_;                 // none is empty
  std::unordered_map<uint64_t, std::string> waiting_for_;            // id -> key
  std::deque<Answer> answers_;
};

}  // namespace commkit
