#include "overlay/agent.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "net/crypto.h"
#include "net/peer.h"
#include "net/version.h"

namespace commkit {

namespace {

constexpr double kLingerSeconds = 3;  // after a join that failed
// A new agent to which nobody comes: its starter was killed.  One that was only slow starts
// another.
constexpr double kIdleStartSeconds = 5;
// A local connection that says nothing does not keep an agent for longer.
constexpr double kSilentSeconds = 3;
// For what is still in the sockets when the agent leaves.
constexpr double kLastWordsSeconds = 0.02;
// A world that forms at once is not held up by the watch over its processes.
constexpr double kWatchSeconds = 1.0;
constexpr double kAgeSeconds = 0.01;  // the kernel gives a process's start in clock ticks
constexpr double kEofSeconds = 0.3;   // between a connection's end and its process's
// The same for one that is exiting and has named no failure: its exit code tells, once there is
// one.
constexpr double kTeardownSeconds = 10.0;

}  // namespace

Agent::Agent(Loop& loop, int unix_listener) : loop_(loop), started_(now()) {
  std::string random = random_bytes(4);
  std::memcpy(&nonce_, random.data(), sizeof nonce_);
  nonce_ &= 0x7fffffff;  // epochs are shown as signed 64-bit numbers by some
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    rlim_t was = files.rlim_cur;
    files.rlim_cur = files.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &files) == 0) {
      log("raised the limit of open files from " + std::to_string(was) + " to " +
          std::to_string(files.rlim_max));
    }
  }
  // Strangers are not to have all descriptors.
  if (files.rlim_cur != 0)
    most_opening_ = static_cast<int>(std::clamp<rlim_t>(files.rlim_cur / 4, 4, 512));
  sockaddr_un name{};
  socklen_t size = sizeof name;
  if (getsockname(unix_listener, reinterpret_cast<sockaddr*>(&name), &size) < 0 ||
      name.sun_family != AF_UNIX) {
    throw std::runtime_error("descriptor " + std::to_string(unix_listener) +
                             " is not a Unix socket");
  }
  name_ = std::string(name.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  unix_ = std::make_unique<Listener>(loop_, unix_listener,
                                     [this](int fd, std::string) { accept_unix(fd); });
  std::string error = listen_store();
  if (!error.empty()) throw std::runtime_error("cannot listen on loopback for the store: " + error);
  loop_.after(kIdleStartSeconds, [this] { leave_if_idle(); });
}

Agent::~Agent() = default;

// ---------------------------------------------------------------- ranks

void Agent::accept_unix(int fd) {
  auto conn = std::make_shared<RankConn>();
  PeerCredentials who;
  try {
    who = peer_credentials(fd);
  } catch (const std::exception& error) {
    log(std::string("refused a local process: ") + error.what());
    close(fd);
    return;
  }
  if (who.uid != getuid()) {
    log("refused pid " + std::to_string(who.pid) + " of uid " + std::to_string(who.uid));
    close(fd);
    return;
  }
  conn->pid = who.pid;
  conn->came = now();
  conn->stream = Stream::make(loop_, fd, "pid " + std::to_string(conn->pid));
  conns_.insert(conn);
  std::weak_ptr<RankConn> weak = conn;
  conn->stream->on_frames([this, weak](uint16_t type, std::string_view payload) {
    if (auto self = weak.lock()) rank_frame(self, type, payload);
  });
  conn->stream->on_foreign([this, weak](uint16_t version, uint16_t type, std::string_view payload) {
    if (auto self = weak.lock()) rank_foreign(self, version, type, payload);
  });
  conn->stream->on_ending([this, weak] {
    auto self = weak.lock();
    // It ended before its process was watched; the socket still knows which it was.
    if (self && self->joined && self->pidfd < 0) watch_process(self);
  });
  conn->stream->on_close([this, weak](const std::string&) {
    auto self = weak.lock();
    if (!self) return;
    if (!self->joined || self->pidfd < 0 || self->gone()) return rank_gone(self);
    // The connection ends before the process: wait, to tell how it ended.
    bool quiet = self->said_exit && self->exit_reason.empty();
    loop_.after(quiet ? kTeardownSeconds : kEofSeconds, [this, weak] {
      if (auto still = weak.lock()) rank_gone(still);
    });
  });
  conn->stream->start();
}

void Agent::rank_frame(const std::shared_ptr<RankConn>& conn, uint16_t type,
                       std::string_view payload) {
  if (!conn->joined) {
    Reader r(payload);
    if ((type != kRankJoin && type != kInspect && type != kStop) || r.u32() != kMagic) {
      stranger(conn->stream->peer(), "is not a commkit rank");
      conn->stream->close();
      loop_.defer([this, conn] { conns_.erase(conn); });
      return;
    }
    if (type == kRankJoin) return rank_joins(conn, payload);
    Writer w;
    put(w, inspect());
    conn->stream->send_frame(kInspected, w.take());
    if (type == kStop) stopped_by_hand(conn->pid);
    return;
  }
  if (conn->gone()) return;  // of an epoch that has failed
  bool mine = session_ && !std::count(waiting_.begin(), waiting_.end(), conn);
  if (mine) return session_->rank_frame(conn, type, payload);
  if (type == kRankExiting) {
    conn->said_exit = true;
    conn->exit_reason = Reader(payload).str();
  }
}

void Agent::stopped_by_hand(pid_t by) {
  log("stopped by pid " + std::to_string(by));
  if (session_) session_->stop("its agent was stopped by hand");
  loop_.after(kLastWordsSeconds, [this] { leave(); });
}

// A rank, or `commkit agents`, of another version: it is told so in frames of its own.
void Agent::rank_foreign(const std::shared_ptr<RankConn>& conn, uint16_t version, uint16_t type,
                         std::string_view payload) {
  // One that has joined is lost by this, like one whose connection ends.
  if (conn->joined) throw BadFrame("of protocol " + std::to_string(version));
  Reader r(payload);
  if ((type != kRankJoin && type != kInspect && type != kStop) || r.u32() != kMagic) {
    stranger(conn->stream->peer(), "is not a commkit rank");
    conn->stream->close();
    return loop_.defer([this, conn] { conns_.erase(conn); });
  }
  Writer w;
  if (type != kRankJoin) {
    put(w, inspect());
    conn->stream->send(frame(kInspected, w.take(), version));
    if (type == kStop) stopped_by_hand(conn->pid);
    return;
  }
  std::string host = session_ ? session_->host_name() : host_identity().hostname;
  std::string text = "the agent on host " + host + " (pid " + std::to_string(getpid()) + ") runs " +
                     version_text() + " and the rank with pid " + std::to_string(conn->pid) +
                     " there protocol " + std::to_string(version) +
                     "; install one version for all ranks of a host, or end an agent that was left "
                     "from before: commkit agents stop " +
                     name_;
  log("refused: " + text);
  w.str("agent").str(text);
  conn->stream->send(frame(kFailed, w.take(), version));
}

void Agent::rank_joins(const std::shared_ptr<RankConn>& conn, std::string_view payload) {
  Reader r(payload);
  r.u32();
  double timeout = r.u32() / 1000.0;
  double age = r.u32() / 1000.0;
  conn->rank = r.i32();
  conn->local_rank = r.i32();
  std::string_view fields = payload.substr(20);
  try {
    // The ranks of a host say the same: it is read once.
    if (!join_config_ || fields != join_fields_) {
      Reader body(fields);
      join_config_ = std::make_shared<const Config>(Config::parse(get_fields(body)));
      join_fields_ = std::string(fields);
    }
    conn->config = join_config_;
    if (conn->rank < 0 || conn->rank >= conn->config->world_size) {
      throw std::invalid_argument("rank " + std::to_string(conn->rank) + " is outside a world of " +
                                  std::to_string(conn->config->world_size));
    }
  } catch (const std::invalid_argument& error) {
    Writer w;
    w.str("usage").str(error.what());
    conn->stream->send_frame(kFailed, w.take());
    return;
  }
  conn->joined = true;
  conn->deadline = now() + timeout;
  conn->born = now() - age;
  // Off the critical path: while joining, the end of the connection tells as well.
  if (watch_timer_ == 0) {
    watch_timer_ = loop_.after(kWatchSeconds, [this] { watch_processes(); });
  }
  if (log_.path().empty() && !conn->config->log_dir.empty()) {
    log("agent " + name_ + " of host " + conn->config->host_name + ", job '" +
        conn->config->job_id + "'");
    std::string error = log_.open(conn->config->log_dir, name_);
    if (!error.empty()) {
      Writer w;
      w.str("log").str("the agent on host " + conn->config->host_name + " writes no log: " + error);
      conn->stream->send_frame(kNotice, w.take());
    }
  }
  if (too_late("pid " + std::to_string(conn->pid), age)) {
    Writer w;
    w.str(failed_.kind).str(failed_.text);
    conn->left = true;
    return conn->stream->send_frame(kFailed, w.take());
  }
  waiting_.push_back(conn);
  place_waiting();
  if (!std::count(waiting_.begin(), waiting_.end(), conn)) return;
  // The world before this one is still alive.  At the deadline the rank learns which.
  std::weak_ptr<RankConn> weak = conn;
  log("rank " + std::to_string(conn->rank) + " waits: " + session_->summary());
  loop_.after(timeout, [this, weak] {
    auto self = weak.lock();
    auto it = self ? std::find(waiting_.begin(), waiting_.end(), self) : waiting_.end();
    if (it == waiting_.end()) return;
    waiting_.erase(it);
    Writer w;
    w.str("join-timeout")
        .str("the deadline passed: " + (session_ ? session_->summary() : "the agent is leaving"));
    self->stream->send_frame(kFailed, w.take());
  });
}

// A process that is older than the failure, and was not told of it, belongs to the attempt that
// failed.  Whoever came into being within a tick of it, or after it, waits for the next attempt's
// root, knowing of the failure (no_root_text).
bool Agent::too_late(const std::string& who, double age) const {
  double since = now() - failed_.at;
  return failed_.at > 0 && since < kLingerSeconds && age > since + kAgeSeconds &&
         failed_.told.count(who) == 0;
}

std::string Agent::no_root_text() const {
  if (session_) return session_->summary();
  std::string text = "rank 0 has not come to host " + job_.host;
  if (failed_.at <= formed_at_) return text;
  char since[32];
  std::snprintf(since, sizeof since, "%.1f", now() - failed_.at);
  return text + " since the last join failed there " + since + " s ago: " + failed_.text;
}

void Agent::join_failed(const std::string& kind, const std::string& text,
                        std::set<std::string> told) {
  failed_ = {now(), kind, text, std::move(told)};
}

void Agent::place_waiting() {
  // A rank may be what ends a session, and so what starts the next one.
  while (!waiting_.empty() && (!session_ || session_->takes(*waiting_.front()))) {
    auto conn = waiting_.front();
    waiting_.pop_front();
    if (conn->ended) continue;
    if (!session_) session_ = std::make_unique<Session>(*this, *conn->config);
    served_ = true;
    session_->add_rank(conn);
  }
}

void Agent::watch_processes() {
  watch_timer_ = 0;
  std::vector<std::shared_ptr<RankConn>> conns(conns_.begin(), conns_.end());
  for (const auto& conn : conns) {
    if (!conn->joined || conn->stream->closed()) continue;
    if (conn->pidfd >= 0) continue;
    watch_process(conn);
    // It ended before we looked, and a child of its may be holding the connection.
    bool ended = conn->pidfd < 0 && conn->pid > 0 && kill(conn->pid, 0) < 0 && errno == ESRCH;
    if (ended) rank_gone(conn);
  }
}

void Agent::watch_process(const std::shared_ptr<RankConn>& conn) {
  conn->pidfd = peer_pidfd(conn->stream->fd(), conn->pid);
  if (conn->pidfd < 0) return;
  std::weak_ptr<RankConn> weak = conn;
  loop_.watch(conn->pidfd, EPOLLIN, [this, weak](uint32_t) {
    if (auto self = weak.lock()) rank_gone(self);
  });
}

void Agent::rank_gone(const std::shared_ptr<RankConn>& conn) {
  if (conns_.erase(conn) == 0) return;
  if (conn->pidfd >= 0) {
    loop_.unwatch(conn->pidfd);
    pollfd ended{conn->pidfd, POLLIN, 0};
    bool dead = poll(&ended, 1, 0) == 1;
    std::string how = dead ? how_it_ended(conn->pidfd, conn->pid) : "";
    close(conn->pidfd);
    conn->pidfd = -1;
    // A reason given before the end, such as an exception, says more than its exit code.
    if (conn->said_exit && !conn->exit_reason.empty()) how = "ended: " + conn->exit_reason;
    if (!dead && !conn->said_exit) how = "closed its connection while its process lives on";
    if (how == "?") how = conn->said_exit ? "" : "ended without a word (killed, or os._exit)";
    conn->exit_reason = how;
  } else if (!conn->said_exit && conn->joined && !conn->gone()) {
    std::string how = conn->pid > 0 ? how_it_ended(-1, conn->pid) : "?";
    conn->exit_reason = how == "?" ? "ended without a word" : how;
  }
  conn->stream->close();
  auto waiting = std::find(waiting_.begin(), waiting_.end(), conn);
  if (waiting != waiting_.end()) {
    waiting_.erase(waiting);
  } else if (session_ && conn->joined) {
    session_->rank_ended(conn, conn->exit_reason);
  }
  leave_if_idle();
}

// ---------------------------------------------------------------- the end

void Agent::session_over() {
  loop_.defer([this] {
    if (!session_) return;
    other_version_.clear();
    // Its store connections refer to its keys.
    std::vector<std::shared_ptr<StoreConn>> stores(store_conns_.begin(), store_conns_.end());
    for (const auto& conn : stores) conn->stream->close();
    store_conns_.clear();
    stores.clear();
    // One turn later: connections that were dropped in this one still cancel their requests.
    loop_.defer([this] {
      session_.reset();
      throttle();  // the contacts that it held are gone
      place_waiting();
      leave_if_idle();
    });
  });
}

void Agent::leave_if_idle() {
  if (session_ || !waiting_.empty()) return;
  for (const auto& conn : conns_) {
    // A connection that has not spoken yet may be a rank about to join.
    if (!conn->joined && !conn->stream->closed() && now() - conn->came < kSilentSeconds) {
      loop_.after(1.0, [this] { leave_if_idle(); });
      return;
    }
  }
  if (!served_ && now() - started_ < kIdleStartSeconds) return;  // a rank is on its way
  // Those who come too late for a join that has failed are to hear of it, not to wait for their
  // deadline.
  double linger = failed_.at + kLingerSeconds - now();
  if (failed_.at > 0 && linger > 0) {
    loop_.cancel(linger_timer_);
    linger_timer_ = loop_.after(linger + 0.01, [this] { leave_if_idle(); });
    return;
  }
  leave();
}

void Agent::leave() {
  if (!unix_) return;  // already on the way
  // In this order: whoever finds no Unix socket starts a new agent, which needs the port.
  tcp_.clear();
  store_.reset();
  unix_.reset();
  loop_.after(kLastWordsSeconds, [this] {
    log("leaving");
    loop_.stop();
  });
}

Fields Agent::inspect() const {
  Fields fields{{"name", name_},
                {"version", release()},
                {"protocol", std::to_string(protocol_version())},
                {"pid", std::to_string(getpid())},
                {"seconds", std::to_string(static_cast<long>(now() - started_))},
                {"log", log_.path()},
                {"port", std::to_string(port_)},
                {"store_port", std::to_string(store_port_)},
                {"store_connections", std::to_string(store_conns_.size())},
                {"waiting_ranks", std::to_string(waiting_.size())},
                {"strangers", std::to_string(strangers_)},
                {"accepted_total", std::to_string(accepted_total_)},
                {"peak_open", std::to_string(traffic_->peak_open)},
                {"messages", std::to_string(traffic_->frames_in + traffic_->frames_out)},
                {"bytes", std::to_string(traffic_->bytes_in + traffic_->bytes_out)},
                {"state", "idle"}};
  if (session_) {
    for (auto& [key, value] : session_->inspect()) fields[key] = value;
  }
  return fields;
}

}  // namespace commkit
