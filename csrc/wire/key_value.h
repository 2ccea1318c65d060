// Keys, values and queues as one job's ranks see them, wherever they are kept: the interface
// between the store protocol and the distributed keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace commkit {

// What a request carries besides `key`, and what its reply says:
//
//   kSet         value                     answered once set
//   kCompareSet  expected, value (wanted)  value: what the key holds now; `expected` where a
//                                          missing key was expected to hold something
//   kGet                                   value; found = false at once if missing
//   kAdd         amount                    number: the sum; the value is decimal text; a missing
//                                          key counts as 0
//   kCheck                                 found: the key exists, or the queue is not empty
//   kWait                                  answered when kCheck would say found; number: 1 by an
//                                          element of a queue, which only one of those who wait is
//                                          told of; 0 by a key, which all may see; less, and its
//                                          value is with it, read -1 - number microseconds or more
//                                          after the request was made
//   kDelete                                found, number (0 or 1): whether there was such a key;
//                                          queues stay
//   kAppend      value                     answered once appended; a missing key is created
//   kNumKeys     (no key)                  number; queues do not count
//   kListKeys    (no key)                  keys, in no order; queues do not count
//   kQueuePush   value                     number: the queue's length with it
//   kQueuePop    amount                    value; number: the queue's length before.  Empty queue:
//                                          found = false at once, or with amount = 1 wait
//   kBarrier     amount                    adds 1 to the key; answered when that makes `amount` or
//                                          more.  torch's own barrier, which kAdd and kWait
//                                          cannot express
//   kQueueLen                              number
//
// found = false for any other operation means that it was refused, and `value` says why: kAdd to a
// value that is not a number, a wait that can never be answered.
enum class KvOp : uint8_t {
  kSet = 1,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kDelete,
  kAppend,
  kNumKeys,
  kListKeys,
  kQueuePush,
  kQueuePop,
  kBarrier,
  kQueueLen,
};

// A longer value is not sent to those who wait for its key.
constexpr size_t kMostAwaited = 4096;

struct KvRequest {
  KvOp op = KvOp::kGet;
  std::string key;
  std::string value;
  std::string expected;
  int64_t amount = 0;
};

struct KvReply {
  bool found = true;
  int64_t number = 0;
  std::string value;
  std::vector<std::string> keys;
};

class KeyValue {
 public:
  using Done = std::function<void(KvReply&&)>;
  virtual ~KeyValue() = default;
  // `done` may be called before this returns, and every operation is answered, once it has taken
  // effect.  Requests of one caller for one key need not take effect in order: a caller that
  // cares waits for the answer.
  virtual uint64_t request(KvRequest&& request, Done done) = 0;
  // After this `done` is not called any more; an operation under way may still take effect.
  // An id that is unknown or answered is ignored.
  virtual void cancel(uint64_t id) = 0;
};

}  // namespace commkit
