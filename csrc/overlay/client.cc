#include "overlay/client.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <system_error>

#include "net/peer.h"
#include "net/stream.h"
#include "net/version.h"
#include "overlay/config.h"
#include "overlay/log.h"
#include "overlay/spawn.h"

namespace commkit {

namespace {

constexpr size_t kMaxPayload = 512u << 20;

std::mutex registry_mutex;
std::set<Client*> registry;

// Seconds since this process was started or forked.
double process_age() {
  char text[1024];
  int fd = ::open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t size = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  text[std::max<ssize_t>(size, 0)] = '\0';
  const char* at = std::strrchr(text, ')');
  // starttime is the 22nd field of all, the 20th after the name.
  for (int i = 0; at != nullptr && i < 20; ++i) at = std::strchr(at + 1, ' ');
  if (at == nullptr) return 0;
  timespec boot{};
  clock_gettime(CLOCK_BOOTTIME, &boot);
  double started = std::strtod(at, nullptr) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return static_cast<double>(boot.tv_sec) + static_cast<double>(boot.tv_nsec) * 1e-9 - started;
}

// Removes a field that is a rank's own; -1 where there is none.
int take_number(Fields& fields, const std::string& name) {
  auto it = fields.find(name);
  if (it == fields.end()) return -1;
  int number = std::atoi(it->second.c_str());
  fields.erase(it);
  return number;
}

// False: the connection is broken, or the deadline has passed; `sent` tells how far it came.
bool send_all(int fd, const std::string& bytes, double deadline, const Client::Tick& tick,
              size_t& sent) {
  while (sent < bytes.size()) {
    ssize_t n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      if (now() > deadline) return false;
      pollfd ready{fd, POLLOUT, 0};
      poll(&ready, 1, static_cast<int>(kTick * 1000));
      if (tick) tick();
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

// In a forked child: the connection belongs to the parent, the reader thread does not exist.
void clients_forked() {
  for (Client* client : registry) {
    client->forked_ = true;
    if (client->fd_ >= 0) ::close(client->fd_);
    if (client->wake_ >= 0) ::close(client->wake_);
    client->fd_ = client->wake_ = -1;
    (void)client->reader_.release();
  }
}

namespace {

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); },
                   [] {
                     clients_forked();
                     registry_mutex.unlock();
                   });
  });
}

}  // namespace

Client::Client(const Fields& config, double timeout, Notice notice, const Tick& tick)
    : notice_(std::move(notice)) {
  watch_forks();
  Config parsed;
  try {
    parsed = Config::parse(config);
  } catch (const std::invalid_argument& error) {
    throw Failure("usage", error.what());
  }
  const std::string& name = agent_ = parsed.agent_name();
  if (!parsed.log_dir.empty()) log_ = Log::path(parsed.log_dir, name, "*");
  auto program = config.find("agent");
  Fields common = config;
  int rank = take_number(common, "rank"), local_rank = take_number(common, "local_rank");
  if (program != config.end()) program_ = program->second;
  common.erase("agent");
  double began = now();
  // Both change while an agent is being started.
  hello_ = [common, rank, local_rank, timeout, began] {
    Writer w;
    w.u32(kMagic).u32(milliseconds(timeout - (now() - began))).u32(milliseconds(process_age()));
    w.i32(rank).i32(local_rank);
    put(w, common);
    return frame(kRankJoin, w.take());
  };
  double deadline = now() + std::min(timeout, 30.0);
  std::string last = "it does not accept connections";
  // An agent may leave between our connect and our first word: then the next round starts another.
  for (int round = 0;; ++round) {
    try {
      fd_ = connect_agent(name);
      if (fd_ < 0 && program != config.end() && start_agent(name, program->second, deadline, tick))
        fd_ = connect_agent(name);
    } catch (const std::runtime_error& error) {
      throw Failure("agent", error.what());
    }
    if (fd_ >= 0) {
      PeerCredentials owner = peer_credentials(fd_);
      if (owner.uid != getuid()) {
        ::close(fd_);
        fd_ = -1;
        throw Failure("agent", "the agent's socket @" + name + " belongs to uid " +
                                   std::to_string(owner.uid));
      }
      // The agent's first byte shows that it has taken us in; until then it may be a socket about
      // to close.
      size_t sent = 0;
      bool whole = false;
      try {
        whole = send_all(fd_, hello_(), deadline, tick, sent);
      } catch (...) {
        ::close(fd_);  // a signal: nobody will call the destructor
        throw;
      }
      if (whole) {
        pollfd ready{fd_, POLLIN, 0};
        int n = poll(&ready, 1, 50);
        char byte;
        bool ended = n == 1 && recv(fd_, &byte, 1, MSG_PEEK) <= 0;
        if (!ended) break;
      }
      ::close(fd_);
      fd_ = -1;
      last = "it closed the connection";
    }
    if (now() > deadline)
      throw Failure("agent", "cannot reach this host's agent @" + name + ": " + last);
    if (tick) tick();
    usleep(static_cast<useconds_t>(std::min(20000, 500 << std::min(round, 6))));
  }
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) {
    int why = errno;
    ::close(fd_);
    throw Failure("agent", std::string("eventfd: ") + std::strerror(why));
  }
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    registry.insert(this);
  }
}

void Client::start_reader() {
  std::lock_guard<std::mutex> only(close_mutex_);
  if (reader_ || closed_ || fd_ < 0) return;
  // Signals belong to the threads that the program started.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string error;
  try {
    reader_ = std::make_unique<std::thread>([this] {
      reader_id_ = std::this_thread::get_id();
      read_loop();
    });
  } catch (const std::system_error& failure) {
    error = failure.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!error.empty()) throw Failure("agent", "cannot start a thread: " + error);
}

Client::~Client() {
  if (forked_) {
    (void)changed_.release();
  } else {
    close();
  }
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry.erase(this);
}

void Client::read_loop() {
  while (wait_for_input(-1)) {
    if (!read_some()) return;
  }
}

// False: close() wants the reader to end, or nothing can be awaited any more.
bool Client::wait_for_input(int milliseconds) {
  pollfd ready[2] = {{fd_, POLLIN, 0}, {wake_, POLLIN, 0}};
  while (poll(ready, 2, milliseconds) < 0) {
    if (errno != EINTR) {
      broke(std::string("poll: ") + std::strerror(errno));
      return false;
    }
    if (milliseconds >= 0) return true;  // a signal: its handler may want to be heard
  }
  return ready[1].revents == 0;
}

// Takes what has come, and gives frames on.  False: the connection is of no more use.
bool Client::read_some() {
  char buffer[65536];
  ssize_t n = recv(fd_, buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (n <= 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = !formed_;
    }
    broke("the agent has ended; its log tells why");
    return false;
  }
  in_.append(buffer, static_cast<size_t>(n));
  size_t at = 0;
  while (in_.size() - at >= kFrameHeader) {
    Reader header(std::string_view(in_).substr(at, kFrameHeader));
    uint32_t length = header.u32();
    uint16_t type = header.u16();
    if (uint16_t version = header.u16(); version != protocol_version()) {
      // Agents answer in the version that they are asked in; this one is older than that rule.
      broke("this host's agent speaks protocol " + std::to_string(version) +
            " and this rank runs " + version_text() +
            "; end the agent (commkit agents stop) and try again");
      return false;
    }
    if (length > kMaxFrame) {
      broke("the agent sent a message of " + std::to_string(length) + " bytes");
      return false;
    }
    if (in_.size() - at - kFrameHeader < length) break;
    try {
      frame_in(type, std::string_view(in_).substr(at + kFrameHeader, length));
    } catch (const BadFrame& error) {
      broke(std::string("the agent sent a malformed message: ") + error.what());
      return false;
    }
    at += kFrameHeader + length;
  }
  in_.erase(0, at);
  return true;
}

void Client::broke(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (broken_.empty()) {
    broken_kind_ = "agent";
    std::string log = info_.count("log") ? info_["log"] : log_;
    broken_ = why + (log.empty() ? "" : " (" + log + ")");
    if (!closed_ && !left_) failures_.push_back(broken_);
  }
  changed_->notify_all();
}

void Client::frame_in(uint16_t type, std::string_view payload) {
  Reader r(payload);
  if (type == kNotice) {
    std::string kind = r.str(), text = r.str();
    if (kind == "died") {
      std::lock_guard<std::mutex> lock(mutex_);
      failures_.push_back(text);
    }
    if (notice_ && !muted_) notice_(kind, text);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  switch (type) {
    case kFormed:
      info_ = get_fields(r);
      formed_ = true;
      break;
    case kFailed:
      broken_kind_ = r.str();
      broken_ = r.str();
      if (broken_.empty()) broken_ = "the world has failed; the agent's log tells why";
      failures_.push_back(broken_);
      break;
    case kOpDone:
    case kOpFailed:
    case kKeyDone: {
      uint64_t id = r.u64();
      auto it = answers_.find(id);
      if (it == answers_.end()) return;  // its caller gave up
      it->second = {true, type, std::string(payload)};
      break;
    }
    case kLeft:
      left_ = true;
      left_open_ = r.u8() != 0;
      break;
    case kRootIs:
      root_ = r.str();
      root_known_ = true;
      break;
    default:
      return;
  }
  changed_->notify_all();
}

void Client::check_usable() const {
  if (forked_)
    throw Failure("usage",
                  "this process was forked after it had joined: only the parent can use the world");
  if (closed_) throw Failure("usage", "this rank has left the world");
  if (on_reader()) {
    throw Failure("usage",
                  "called from within a notice, which would wait for itself; use another thread");
  }
}

void Client::throw_broken() const { throw Failure(broken_kind_, broken_); }

bool Client::wait(std::unique_lock<std::mutex>& lock, double timeout, const Tick& tick,
                  const std::function<bool()>& ready) {
  double deadline = now() + timeout;
  double ticked = now();
  for (;;) {
    if (ready()) return true;
    if (closed_) throw Failure("usage", "this rank has left the world");
    if (!broken_.empty()) throw_broken();
    double left = deadline - now();
    if (left <= 0) return false;
    changed_->wait_for(lock, std::chrono::duration<double>(std::min(left, kTick)));
    if (tick && now() - ticked >= kTick / 2) {
      lock.unlock();
      tick();
      lock.lock();
      ticked = now();
    }
  }
}

void Client::send(uint16_t type, const std::string& payload, double timeout, const Tick& tick) {
  if (payload.size() > kMaxPayload) {
    throw Failure("usage", "a message of " + std::to_string(payload.size()) + " bytes; at most " +
                               std::to_string(kMaxPayload) + " go through the agents");
  }
  std::string bytes = frame(type, payload);
  double deadline = now() + timeout;
  std::unique_lock<std::timed_mutex> lock(send_mutex_, std::defer_lock);
  while (!lock.try_lock_for(std::chrono::duration<double>(kTick))) {
    if (tick) tick();
    if (now() > deadline) throw Failure("timeout", kNotReading);
  }
  size_t sent = 0;
  auto half_sent = [&] {
    // Half a message is on its way: nothing can follow it.
    std::lock_guard<std::mutex> guard(mutex_);
    if (sent == 0 || sent == bytes.size() || !broken_.empty()) return;
    broken_kind_ = "agent";
    broken_ = kNotReading;
    changed_->notify_all();
  };
  try {
    if (closed_) throw Failure("usage", "this rank has left the world");
    auto watch = [&] {
      if (closed_) throw Failure("usage", "this rank has left the world");
      if (tick) tick();
    };
    if (send_all(fd_, bytes, deadline, watch, sent)) return;
  } catch (...) {
    half_sent();
    throw;
  }
  half_sent();
  if (now() > deadline) throw Failure("timeout", kNotReading);
  // Else the connection is broken: the reader tells why.
}

bool Client::on_reader() const { return reader_id_.load() == std::this_thread::get_id(); }

bool Client::settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return formed_ || closed_ || !broken_.empty();
}

Fields Client::info() {
  if (forked_) throw Failure("usage", "this process was forked after it had joined");
  std::lock_guard<std::mutex> lock(mutex_);
  return info_;
}

void Client::exiting(const std::string& reason) {
  if (forked_) return;
  mute();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
  }
  Writer w;
  w.str(reason);
  try {
    send(kRankExiting, w.take(), 1.0, nullptr);
  } catch (const Failure&) {
    // It is about the good manners of the end: the pidfd tells as well.
  }
}

void Client::mute() { muted_ = true; }

void Client::close() {
  if (forked_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_->notify_all();
  }
  uint64_t one = 1;
  std::lock_guard<std::mutex> once(close_mutex_);
  if (fd_ < 0) return;
  ssize_t ignored = write(wake_, &one, sizeof one);
  (void)ignored;
  if (on_reader()) return;  // from within a notice: the destructor does the rest
  if (reader_ && reader_->joinable()) reader_->join();
  reader_.reset();
  // Whoever is sending sees closed_ within a tick; its descriptor must not become another's
  // meanwhile.
  std::lock_guard<std::timed_mutex> sending(send_mutex_);
  std::lock_guard<std::mutex> lock(registry_mutex);
  ::close(fd_);
  ::close(wake_);
  fd_ = wake_ = -1;
}

std::vector<std::string> Client::failures() {
  if (forked_) return {};  // the mutex may be locked by a thread that does not exist here
  std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

}  // namespace commkit
