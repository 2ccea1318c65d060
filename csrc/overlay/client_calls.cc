// What a rank asks of its agent: that the world forms, operations, keys, groups, leaving.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "net/loop.h"
#include "net/stream.h"
#include "overlay/client.h"
#include "overlay/spawn.h"

namespace commkit {

namespace {

constexpr double kFarewellSeconds = 1.0;

}  // namespace

// The agent has ended in the middle of the join, and perhaps before the root had heard of this
// host; another rank that comes may have started the next one, which would then wait for us.
void Client::tell_next_agent(const std::string& why) {
  double deadline = now() + kFarewellSeconds;
  Writer w;
  w.str(why);
  std::string words = hello_() + frame(kRankExiting, w.take());
  try {
    while (now() < deadline) {
      int fd = connect_agent(agent_);
      if (fd < 0 && start_agent(agent_, program_, deadline, nullptr)) fd = connect_agent(agent_);
      if (fd < 0) {
        usleep(2000);
        continue;
      }
      // It may be the one that is ending: that one closes.
      pollfd ready{fd, POLLIN, 0};
      char byte;
      ssize_t sent = ::send(fd, words.data(), words.size(), MSG_NOSIGNAL);
      bool whole = sent == static_cast<ssize_t>(words.size());
      bool taken = whole && (poll(&ready, 1, 50) != 1 || recv(fd, &byte, 1, MSG_PEEK) > 0);
      ::close(fd);
      if (taken) return;
    }
  } catch (const std::runtime_error&) {
    // This rank's own error says what matters.
  }
}

void Client::formed(double timeout, const Tick& tick) {
  check_usable();
  double deadline = now() + timeout + kGrace;
  if (!reader_) {
    // Until then nothing comes but this, and one thread is woken instead of two.
    reader_id_ = std::this_thread::get_id();
    try {
      while (now() < deadline && !settled()) {
        if (!wait_for_input(static_cast<int>(kTick * 1000)) || !read_some()) break;
        if (tick && !settled()) tick();
      }
    } catch (...) {
      reader_id_ = std::thread::id();
      throw;
    }
    reader_id_ = std::thread::id();
    start_reader();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  bool in_time;
  try {
    in_time = wait(lock, std::max(0.0, deadline - now()), tick, [this] { return formed_; });
  } catch (const Failure&) {
    bool tell = ended_ && !program_.empty() && broken_kind_ == "agent";
    lock.unlock();
    if (tell) tell_next_agent("its agent had ended");
    throw;
  }
  if (!in_time) {
    throw Failure("join-timeout",
                  "this host's agent did not say by the deadline why the world has not formed");
  }
}

std::string Client::root_endpoint(double timeout, const Tick& tick) {
  check_usable();
  start_reader();
  send(kRankRoot, "", timeout, tick);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!wait(lock, timeout, tick, [this] { return root_known_; })) {
    throw Failure("join-timeout", "this host's agent did not become the root in time");
  }
  return root_;
}

uint64_t Client::expect_answer() {
  check_usable();
  start_reader();
  std::lock_guard<std::mutex> lock(mutex_);
  answers_[++next_];
  return next_;
}

Client::Answer Client::request(uint16_t type, uint64_t id, const std::string& payload,
                               double timeout, const Tick& tick) {
  double deadline = now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  try {
    send(type, payload, timeout, tick);
    lock.lock();
    wait(lock, std::max(0.0, deadline - now()), tick, [this, id] { return answers_[id].done; });
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    answers_.erase(id);
    throw;
  }
  Answer answer = std::move(answers_[id]);
  answers_.erase(id);
  lock.unlock();
  if (answer.done && answer.type == kOpFailed) {
    std::string kind, text;
    read_answer(answer, kOpFailed, [&](Reader& r) {
      kind = r.str();
      text = r.str();
    });
    throw Failure(kind, text);
  }
  return answer;
}

// An answer that cannot be read is the agent's fault, and told like any other failure.
void Client::read_answer(const Answer& answer, uint16_t type,
                         const std::function<void(Reader&)>& read) {
  try {
    Reader r(answer.payload);
    r.u64();
    if (answer.type != type) throw BadFrame("an answer to another kind of request");
    read(r);
  } catch (const BadFrame& error) {
    throw Failure("agent", std::string("the agent sent a malformed message: ") + error.what());
  }
}

std::vector<std::string> Client::operation(OpKind kind, const std::string& tag, int peer,
                                           bool gives, std::string_view bytes,
                                           const std::string& description, double timeout,
                                           const Tick& tick) {
  uint64_t id = expect_answer();
  Writer w;
  w.u64(id)
      .u8(kind)
      .str(tag)
      .u32(milliseconds(timeout))
      .i32(peer)
      .u8(gives ? 1 : 0)
      .str(bytes)
      .str(description);
  Answer answer;
  try {
    answer = request(kRankOp, id, w.take(), timeout + kGrace, tick);
  } catch (const Failure& failure) {
    if (failure.what() != std::string(kNotReading)) throw;
    throw Failure(failure.kind,
                  "'" + tag.substr(0, tag.rfind('#')) + "' passed its deadline: " + kNotReading);
  }
  if (!answer.done)
    throw Failure("timeout", "'" + tag + "' passed its deadline, and the agent did not say why");
  std::vector<std::string> payloads;
  read_answer(answer, kOpDone, [&](Reader& r) {
    r.u8();
    payloads = r.strs();
    if (kind == kBroadcast && payloads.size() != 1) throw BadFrame("a broadcast has one payload");
  });
  return payloads;
}

KvReply Client::key(KvRequest request_, double timeout, const Tick& tick) {
  uint64_t id = expect_answer();
  Writer w;
  w.u64(id);
  put(w, request_);
  Answer answer;
  Writer cancel;
  cancel.u64(id);
  try {
    answer = request(kRankKey, id, w.take(), timeout, tick);
  } catch (const Failure&) {
    throw;
  } catch (...) {
    send(kRankKeyCancel, cancel.take(), kShortSend, nullptr);  // a signal
    throw;
  }
  if (!answer.done) {
    send(kRankKeyCancel, cancel.take(), kShortSend, nullptr);
    throw Failure("timeout",
                  "key '" + request_.key.substr(0, 80) + "' was not there by the deadline");
  }
  KvReply reply;
  read_answer(answer, kKeyDone, [&](Reader& r) { reply = get_reply(r); });
  return reply;
}

void Client::creating(bool on) {
  check_usable();
  Writer w;
  w.u8(on ? 1 : 0);
  send(kRankCreating, w.take(), kShortSend, nullptr);
}

void Client::connected(const std::string& group, const RankSet& members) {
  check_usable();
  Writer w;
  w.str(group);
  members.encode(w);
  send(kRankConnected, w.take(), kShortSend, nullptr);
}

void Client::note(const std::string& key, const std::string& value) {
  check_usable();
  KvRequest request;
  request.op = KvOp::kSet;
  request.key = key;
  request.value = value;
  Writer w;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    w.u64(++next_);  // nobody waits for this answer
  }
  put(w, request);
  send(kRankKey, w.take(), kShortSend, nullptr);
}

bool Client::leave(double timeout, const Tick& tick) {
  if (forked_) return false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
  }
  if (on_reader()) {
    // From within a notice there is no waiting for the agent's word.
    Writer now_;
    now_.u32(0);
    send(kRankLeave, now_.take(), kShortSend, nullptr);
    close();
    return false;
  }
  Writer w;
  w.u32(milliseconds(timeout));
  bool open = false;
  try {
    start_reader();
    send(kRankLeave, w.take(), timeout + kGrace, tick);
    std::unique_lock<std::mutex> lock(mutex_);
    wait(lock, timeout + kGrace, tick, [this] { return left_; });
    open = left_open_;
  } catch (const Failure&) {
    // The agent or the world is gone: there is nothing left to leave.
  }
  close();
  return open;
}

}  // namespace commkit
