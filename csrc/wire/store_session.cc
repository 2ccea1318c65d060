#include "wire/store_session.h"

#include <array>
#include <cstring>
#include <utility>

namespace commkit {
namespace {

enum Op : int {
  kValidate,
  kSet,
  kCompareSet,
  kGet,
  kAdd,
  kCheck,
  kWait,
  kGetNumKeys,
  kDeleteKey,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancelWait,
  kPing,
  kQueuePush,
  kQueuePop,
  kQueueLen,
  kListKeys,
  kBarrier,
};

// An operation is a row: its fields (k key, v value, e expected value, 8 and 4 an integer of so
// many bytes), whether they repeat after a count, and the request that each repetition becomes.
struct Row {
  const char* name;
  const char* fields;
  bool counted;
  KvOp request;
};

constexpr KvOp kNoRequest = KvOp{};

constexpr std::array<Row, 19> kRows = {{
    {"VALIDATE", "4", false, kNoRequest},
    {"SET", "kv", false, KvOp::kSet},
    {"COMPARE_SET", "kev", false, KvOp::kCompareSet},
    {"GET", "k", false, KvOp::kGet},
    {"ADD", "k8", false, KvOp::kAdd},
    {"CHECK", "k", true, KvOp::kCheck},
    {"WAIT", "k", true, KvOp::kWait},
    {"GETNUMKEYS", "", false, KvOp::kNumKeys},
    {"DELETE_KEY", "k", false, KvOp::kDelete},
    {"APPEND", "kv", false, KvOp::kAppend},
    {"MULTI_GET", "k", true, KvOp::kGet},
    {"MULTI_SET", "kv", true, KvOp::kSet},
    {"CANCEL_WAIT", "", false, kNoRequest},
    {"PING", "4", false, kNoRequest},
    {"QUEUE_PUSH", "kv", false, KvOp::kQueuePush},
    {"QUEUE_POP", "k", false, KvOp::kQueuePop},
    {"QUEUE_LEN", "k", false, KvOp::kQueueLen},
    {"LIST_KEYS", "", false, KvOp::kListKeys},
    {"BARRIER", "k8", false, KvOp::kBarrier},
}};

constexpr uint32_t kMagic = 0x3c85f7ce;
constexpr uint8_t kStopWaiting = 0, kWaitCancelled = 1;
constexpr const char kInitKey[] = "init/";

// Requests of one CHECK, MULTI_GET or MULTI_SET under way at a time: enough to hide the hops to
// their owners, few enough to bound what a client can make us hold.
constexpr size_t kWindow = 256;
constexpr size_t kEnoughBuffered = 64 * 1024;
constexpr size_t kKeepCapacity = 1024 * 1024;

const Row& row(int op) { return kRows[static_cast<size_t>(op)]; }

// May the reply say found = false without being a refusal?
bool may_be_missing(KvOp op) {
  return op == KvOp::kGet || op == KvOp::kCheck || op == KvOp::kDelete || op == KvOp::kQueuePop;
}

std::string printable(std::string_view text) {
  std::string out;
  for (char c : text.substr(0, 64)) out += c >= ' ' && c <= '~' ? c : '?';
  return out + (text.size() > 64 ? "..." : "");
}

}  // namespace

StoreSession::StoreSession(Lookup lookup, Send send, Drop drop)
    : lookup_(std::move(lookup)), send_(std::move(send)), drop_(std::move(drop)) {}

StoreSession::~StoreSession() { cancel_all(); }

bool StoreSession::waiting() const {
  return !dead_ && parsed_ && (op_ == kWait || op_ == kBarrier) && !outstanding_.empty();
}

void StoreSession::feed(const char* data, size_t size) {
  if (dead_) return;
  in_.append(data, size);
  pump();
  if (!dead_ && buffered() > kMaxBacklog) {
    drop("more than " + std::to_string(kMaxBacklog) + " bytes wait behind " +
         (op_ < 0 ? "replies that it does not read" : row(op_).name));
  }
}

void StoreSession::hold(bool on) {
  held_ = on;
  if (on) {
    update_want_read();
  } else {
    pump();
  }
}

// --- Reading -----------------------------------------------------------------------------------

// A loop, not recursion: requests may be answered from within, thousands of frames in a row.
void StoreSession::pump() {
  if (pumping_ || dead_) return;
  pumping_ = true;
  while (!dead_ && step()) {
  }
  pumping_ = false;
  if (dead_) return;
  // Moving what is left to the front costs its size: only when it is the smaller part.
  if (at_ > buffered()) {
    in_.erase(0, at_);
    at_ = 0;
    if (in_.capacity() > kKeepCapacity && in_.size() < kEnoughBuffered) in_.shrink_to_fit();
  }
  update_want_read();
}

// True if it got anywhere.
bool StoreSession::step() {
  if (op_ < 0) {
    if (held_ || buffered() == 0) return false;
    int op = static_cast<uint8_t>(in_[at_]);
    if (!validated_ && op != kValidate) {
      drop("not a TCPStore client: its first byte is " + std::to_string(op) + ", expected 0");
      return false;
    }
    if (op >= static_cast<int>(kRows.size())) {
      drop("operation " + std::to_string(op) + " is unknown, expected 0 to " +
           std::to_string(kRows.size() - 1) + "; this torch may be newer than commkit");
      return false;
    }
    consume(1);
    op_ = op;
    if (op != kGet && op != kMultiGet) forget_awaited();
    field_ = 0;
    left_ = row(op).counted ? std::nullopt : std::optional<uint64_t>(1);
    parsed_ = false;
    element_ = Element{};
    wait_bytes_ = 0;
    first_slot_ = next_slot_;
    all_found_ = true;
    return true;
  }
  if (!parsed_) return parse();
  if (outstanding_.empty()) {
    finish();
    op_ = -1;
    return true;
  }
  if (waiting() && buffered() > 0 && in_[at_] == kCancelWait) {
    consume(1);
    cancel_all();
    op_ = -1;
    send_value(kWaitCancelled, 1);
    return true;
  }
  return false;
}

bool StoreSession::parse() {
  if (!left_) {
    uint64_t count = 0;
    if (!take_fixed(8, &count)) return false;
    if (count > kMaxKeys) {
      drop(std::string(row(op_).name) + " of " + std::to_string(count) +
           " keys, expected at most " + std::to_string(kMaxKeys));
      return false;
    }
    left_ = count;
  }
  if (*left_ == 0) {
    parsed_ = true;
    return true;
  }
  if (op_ != kWait && outstanding_.size() >= kWindow) return false;
  // A frame that is half answered goes on being answered only while its client reads.
  if (op_ == kMultiGet && held_) return false;
  if (!take_element()) return false;
  // Two writes to one key must not overtake each other on their way to its owner.
  if (op_ == kMultiSet && !writing_.insert(element_.key).second) return false;
  --*left_;
  field_ = 0;
  element_done();
  element_ = Element{};
  return !dead_;
}

// The fields of one repetition.
bool StoreSession::take_element() {
  for (const char* fields = row(op_).fields; fields[field_] != '\0'; ++field_) {
    uint64_t number = 0;
    bool complete = false;
    switch (fields[field_]) {
      case 'k':
        complete = take_bytes(kMaxKey, "key", &element_.key);
        break;
      case 'v':
        complete = take_bytes(kMaxValue, "value", &element_.value);
        break;
      case 'e':
        complete = take_bytes(kMaxValue, "expected value", &element_.expected);
        break;
      default:
        complete = take_fixed(fields[field_] == '8' ? 8 : 4, &number);
        element_.number = static_cast<int64_t>(number);
    }
    if (!complete) return false;
  }
  return true;
}

bool StoreSession::take_fixed(size_t size, uint64_t* out) {
  if (buffered() < size) return false;
  if (size == 4) {
    uint32_t value;
    std::memcpy(&value, in_.data() + at_, size);
    *out = value;
  } else {
    std::memcpy(out, in_.data() + at_, size);
  }
  consume(size);
  return true;
}

bool StoreSession::take_bytes(uint64_t limit, const char* what, std::string* out) {
  if (!length_) {
    uint64_t length = 0;
    if (!take_fixed(8, &length)) return false;
    // Before any of it is awaited: memory follows the bytes that came, not those announced.
    if (length > limit) {
      drop(std::string(row(op_).name) + ": a " + what + " of " + std::to_string(length) +
           " bytes, expected at most " + std::to_string(limit));
      return false;
    }
    length_ = length;
  }
  if (buffered() < *length_) return false;
  out->assign(in_, at_, *length_);
  consume(*length_);
  length_.reset();
  return true;
}

void StoreSession::consume(size_t size) { at_ += size; }

void StoreSession::update_want_read() {
  bool blocked = held_ || (op_ >= 0 && !outstanding_.empty());
  bool want = !blocked || buffered() < kEnoughBuffered;
  bool resumed = want && !want_read_;
  want_read_ = want;
  if (resumed && on_want_read_) on_want_read_();
}

// --- Working -----------------------------------------------------------------------------------

void StoreSession::element_done() {
  Element& e = element_;
  if (keyless(e)) return;
  KeyValue* keys = *row(op_).fields == 'k' ? bind(&e.key) : whole_store();
  if (keys == nullptr) return;
  KvRequest request;
  request.op = row(op_).request;
  if (op_ == kWait) wait_bytes_ += e.key.size();
  if (wait_bytes_ > kMaxWaitBytes) {
    return drop("WAIT for keys of more than " + std::to_string(kMaxWaitBytes) + " bytes together");
  }
  request.key = std::move(e.key);
  request.value = std::move(e.value);
  request.expected = std::move(e.expected);
  request.amount = e.number;  // 0 for QUEUE_POP: a client waits with WAIT first
  this->request(keys, std::move(request));
}

// What needs no keys; true if it was that.
bool StoreSession::keyless(Element& e) {
  switch (op_) {
    case kValidate:
      if (validated_) {
        drop("VALIDATE twice");
      } else if (static_cast<uint32_t>(e.number) != kMagic) {
        drop("not a TCPStore client: VALIDATE without torch's magic number");
      }
      validated_ = true;
      return true;
    case kPing:
      send_value(static_cast<uint64_t>(e.number), 4);
      return true;
    case kCancelWait:
      // The wait was answered before its cancellation came; the client takes both.
      send_value(kWaitCancelled, 1);
      return true;
    case kAdd:
      // TCPStore counts clients itself when constructed with wait_for_workers.  Nobody here reads
      // the count (only torch's own server would), and the key carries no token.
      if (e.key != kInitKey) return false;
      init_ += e.number;
      send_value(static_cast<uint64_t>(init_), 8);
      return true;
    default:
      return false;
  }
}

// Takes the token off the key; the first one decides whose keys these are.
KeyValue* StoreSession::bind(std::string* key) {
  size_t slash = key->empty() || key->front() != '/' ? std::string::npos : key->find('/', 1);
  if (slash == std::string::npos) {
    // torch's NCCL asks for keys below all prefixes every second, such as "exception_dump": they
    // are those of the connection's job.
    if (KeyValue* keys = key->size() > 1 && key->front() == '/' ? own_keys() : nullptr) {
      key->erase(0, 1);
      return keys;
    }
    drop(std::string(row(op_).name) + ": key '" + printable(*key) +
         "' has no job's token, expected /<token>/<key>");
    return nullptr;
  }
  std::string_view token = std::string_view(*key).substr(1, slash - 1);
  if (keys_ == nullptr) {
    keys_ = lookup_(token);
    if (keys_ == nullptr) {
      drop("token of another job: '" + printable(token) + "'");
      return nullptr;
    }
    token_ = token;
  } else if (token != token_) {
    drop("a second token, '" + printable(token) + "', on a connection of '" + printable(token_) +
         "'");
    return nullptr;
  }
  key->erase(0, slash + 1);
  return keys_;
}

KeyValue* StoreSession::own_keys() {
  if (keys_ != nullptr) return keys_;
  return default_token_.empty() ? nullptr : lookup_(default_token_);
}

KeyValue* StoreSession::whole_store() {
  KeyValue* keys = own_keys();
  if (keys == nullptr) {
    drop(std::string(row(op_).name) + " before any key has named the job");
  }
  return keys;
}

void StoreSession::request(KeyValue* keys, KvRequest&& request) {
  uint64_t slot = next_slot_++;
  outstanding_.emplace(slot, std::nullopt);
  asked_ = keys;
  if (op_ == kWait) awaited_keys_.push_back(request.key);
  if (op_ == kGet || op_ == kMultiGet) {
    if (auto it = awaited_.find(request.key); it != awaited_.end()) {
      KvReply reply;
      reply.value = it->second;
      return answered(slot, std::move(reply));
    }
  }
  uint64_t id = keys->request(std::move(request),
                              [this, slot](KvReply&& reply) { answered(slot, std::move(reply)); });
  if (auto it = outstanding_.find(slot); it != outstanding_.end()) {
    it->second = id;
  } else if (dead_) {
    keys->cancel(id);  // dropped meanwhile, when the id was not known yet
  }
}

void StoreSession::answered(uint64_t slot, KvReply&& reply) {
  if (dead_ || outstanding_.erase(slot) == 0) return;
  KvOp op = row(op_).request;
  if (!reply.found && !may_be_missing(op)) {
    return drop(std::string(row(op_).name) + " was refused: " + reply.value);
  }
  if (op_ == kMultiGet) {
    send_in_order(slot, std::move(reply));
  } else if (op_ == kWait) {
    keep_awaited(slot, std::move(reply));
  } else {
    all_found_ = all_found_ && reply.found;
    reply_ = std::move(reply);
  }
  // Only when all are through: a window's worth of waiting is nothing beside a MULTI_SET's length.
  if (outstanding_.empty()) writing_.clear();
  pump();
}

void StoreSession::keep_awaited(uint64_t slot, KvReply&& reply) {
  if (reply.number >= 0 || awaited_bytes_ + reply.value.size() > kMaxAwaited) return;
  awaited_bytes_ += reply.value.size();
  awaited_[awaited_keys_[slot - first_slot_]] = std::move(reply.value);
}

void StoreSession::forget_awaited() {
  if (awaited_keys_.empty()) return;
  awaited_keys_.clear();
  awaited_.clear();
  awaited_bytes_ = 0;
}

void StoreSession::send_in_order(uint64_t slot, KvReply&& reply) {
  size_t place = slot - first_slot_;
  if (values_.size() <= place) values_.resize(place + 1);
  values_[place] = std::move(reply.value);
  while (!values_.empty() && values_.front()) {
    send_bytes(*values_.front());
    values_.pop_front();
    ++first_slot_;
  }
}

// Everything is answered: reply to the client, where the operation has a reply.
void StoreSession::finish() {
  switch (op_) {
    case kCompareSet:
    case kGet:
      send_bytes(reply_.value);
      break;
    case kAdd:
      if (next_slot_ == first_slot_) break;  // init/ has been answered
      [[fallthrough]];
    case kGetNumKeys:
    case kDeleteKey:
    case kQueueLen:
      send_value(static_cast<uint64_t>(reply_.number), 8);
      break;
    case kCheck:
      send_value(all_found_ ? 0 : 1, 1);
      break;
    case kWait:
    case kBarrier:
      send_value(kStopWaiting, 1);
      break;
    case kQueuePop:
      if (reply_.found) {
        send_value(static_cast<uint64_t>(reply_.number), 8);
        send_bytes(reply_.value);
      } else {
        send_value(0, 8);
      }
      break;
    case kListKeys: {
      // TCPStore takes the first slash off again, PrefixStore the token and the second.
      const std::string prefix = "/" + (token_.empty() ? default_token_ : token_) + "/";
      send_value(reply_.keys.size(), 8);
      for (const auto& key : reply_.keys) send_bytes(prefix + key);
      break;
    }
    default:
      break;
  }
  if (op_ != kWait) forget_awaited();
  reply_ = KvReply{};
}

void StoreSession::cancel_all() {
  auto outstanding = std::move(outstanding_);
  outstanding_.clear();
  for (const auto& [slot, id] : outstanding) {
    if (id) asked_->cancel(*id);
  }
  writing_.clear();
  values_.clear();
}

void StoreSession::send_value(uint64_t value, size_t size) {
  char bytes[8];
  if (size == 1) {
    bytes[0] = static_cast<char>(value);
  } else if (size == 4) {
    uint32_t narrow = static_cast<uint32_t>(value);
    std::memcpy(bytes, &narrow, size);
  } else {
    std::memcpy(bytes, &value, size);
  }
  send_(std::string_view(bytes, size));
}

void StoreSession::send_bytes(std::string_view bytes) {
  std::string out(8, '\0');
  uint64_t size = bytes.size();
  std::memcpy(out.data(), &size, sizeof size);
  out.append(bytes);
  send_(out);
}

void StoreSession::drop(const std::string& why) {
  if (dead_) return;
  dead_ = true;
  cancel_all();
  in_.clear();
  at_ = 0;
  drop_(why);
}

}  // namespace commkit
