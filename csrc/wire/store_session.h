// The server's side of torch's TCPStore protocol for one client, whatever carries the bytes.
//
// The protocol has no specification; the facts are in torch/csrc/distributed/c10d/TCPStore.cpp
// and TCPStoreLibUvBackend.cpp.  Integers are in host byte order, since torch copies them as they
// are: the client must be on this machine.  A frame is one byte that names the operation and then
//
//    0 VALIDATE     u32 magic                 -
//    1 SET          key, bytes                -
//    2 COMPARE_SET  key, bytes, bytes         bytes
//    3 GET          key                       bytes
//    4 ADD          key, i64                  i64
//    5 CHECK        u64 n, n keys             u8: 0 all exist, 1 not
//    6 WAIT         u64 n, n keys             u8: 0, when all exist
//    7 GETNUMKEYS                             i64
//    8 DELETE_KEY   key                       i64: 1 deleted, 0 missing
//    9 APPEND       key, bytes                -
//   10 MULTI_GET    u64 n, n keys             n bytes
//   11 MULTI_SET    u64 n, n (key, bytes)     -
//   12 CANCEL_WAIT                            u8: 1 (also when nothing waits)
//   13 PING         u32                       the same u32
//   14 QUEUE_PUSH   key, bytes                -
//   15 QUEUE_POP    key                       i64 length before, bytes if > 0
//   16 QUEUE_LEN    key                       i64
//   17 LIST_KEYS                              i64 n, n bytes
//   18 BARRIER      key, i64 world size       u8: 0, when so many have come
//
// Operations have only ever been added at the end.
//
// `key` and `bytes` are a u64 length and as many bytes.  A client sends "/" before each of
// its keys; commkit wraps the client in a PrefixStore of the job's token, hence "/<token>/<key>".
// A key of the bare client, "/<key>", is one of the same job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "wire/key_value.h"

namespace commkit {

class StoreSession {
 public:
  // The keys of the job with this token, or null: no such job here.
  using Lookup = std::function<KeyValue*(std::string_view token)>;
  using Send = std::function<void(std::string_view bytes)>;
  using Drop = std::function<void(std::string_view why)>;

  // torch's own limits (TCPStoreLibUvBackend.cpp), in bytes and keys.
  static constexpr uint64_t kMaxKey = 8 * 1024;
  static constexpr uint64_t kMaxValue = 8 * 1024 * 1024;
  static constexpr uint64_t kMaxKeys = 128 * 1024;
  // Ours: keys of one WAIT, in bytes together; input that came while it should have been held back.
  static constexpr size_t kMaxWaitBytes = 32 * 1024 * 1024;
  static constexpr size_t kMaxBacklog = 64 * 1024 * 1024;
  // Values that came with the answers of one WAIT, in bytes together.
  static constexpr size_t kMaxAwaited = 64 * 1024;

  // `drop` is called at most once, because the client broke the protocol or a request of its was
  // refused; the session then ignores everything.  None of the functions may destroy the session:
  // do that on the next turn of the loop.  The KeyValue must outlive the session.
  StoreSession(Lookup lookup, Send send, Drop drop);
  ~StoreSession();  // cancels what is outstanding
  StoreSession(const StoreSession&) = delete;
  StoreSession& operator=(const StoreSession&) = delete;

  void feed(const char* data, size_t size);

  // False: leave the client's bytes in the socket, a request is being worked on and enough is
  // buffered.  on_want_read's function is called when it becomes true again.
  bool want_read() const { return want_read_; }
  void on_want_read(std::function<void()> f) { on_want_read_ = std::move(f); }
  // While on, no further frame is begun: for a client that does not read its replies.  Call it as
  // soon as too much is unsent, from within `send`; otherwise one feed() answers all that came.
  void hold(bool on);
  // Whose keys GETNUMKEYS, LIST_KEYS and bare keys mean while no key has named a token, as in a
  // fresh clone() of a store.  Without it such a client is dropped.
  void default_token(std::string token) { default_token_ = std::move(token); }

  // A WAIT or BARRIER is outstanding.
  bool waiting() const;
  // Empty until the first key.
  const std::string& token() const { return token_; }

 private:
  struct Element {
    std::string key, value, expected;
    int64_t number = 0;
  };

  void pump();
  bool step();
  bool parse();
  bool take_element();
  bool take_fixed(size_t size, uint64_t* out);
  bool take_bytes(uint64_t limit, const char* what, std::string* out);
  size_t buffered() const { return in_.size() - at_; }
  void consume(size_t size);
  void update_want_read();

  void element_done();
  bool keyless(Element& element);
  KeyValue* bind(std::string* key);
  // Of the job that a key has named, else of the default token; null where there is neither.
  KeyValue* own_keys();
  KeyValue* whole_store();
  void request(KeyValue* keys, KvRequest&& request);
  void answered(uint64_t slot, KvReply&& reply);
  void keep_awaited(uint64_t slot, KvReply&& reply);
  void forget_awaited();
  void finish();
  void cancel_all();
  void send_in_order(uint64_t slot, KvReply&& reply);
  void send_value(uint64_t value, size_t size);
  void send_bytes(std::string_view bytes);
  void drop(const std::string& why);

  Lookup lookup_;
  Send send_;
  Drop drop_;
  std::function<void()> on_want_read_;
  std::string default_token_;
  std::string token_;
  KeyValue* keys_ = nullptr;

  std::string in_;
  size_t at_ = 0;  // first byte of in_ that is not consumed
  bool want_read_ = true;
  bool held_ = false;
  bool pumping_ = false;
  bool dead_ = false;
  bool validated_ = false;
  int64_t init_ = 0;  // the client's own count of its key init/

  // The frame being read or worked on.
  int op_ = -1;  // -1: none
  size_t field_ = 0;
  std::optional<uint64_t> length_;  // of the string being read
  std::optional<uint64_t> left_;    // elements still to be read; none: the count is to be read
  bool parsed_ = false;
  Element element_;
  size_t wait_bytes_ = 0;

  // Its requests.
  uint64_t next_slot_ = 0;   // never reused
  uint64_t first_slot_ = 0;  // of this frame
  KeyValue* asked_ = nullptr;
  // slot -> id of the request; none while it is being made
  std::unordered_map<uint64_t, std::optional<uint64_t>> outstanding_;
  // Values read after the WAIT before this frame began, for the GET or MULTI_GET that torch's get()
  // sends right after it: the client has heard nothing in between.
  std::vector<std::string> awaited_keys_;
  std::unordered_map<std::string, std::string> awaited_;
  size_t awaited_bytes_ = 0;
  std::unordered_set<std::string> writing_;        // MULTI_SET: keys under way
  std::deque<std::optional<std::string>> values_;  // MULTI_GET: from first_slot_ on
  bool all_found_ = true;
  KvReply reply_;  // of an operation with one request
};

}  // namespace commkit
