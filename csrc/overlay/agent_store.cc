// The agent as torch's store: TCPStore connections over loopback, of this user's processes only.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>

#include "net/peer.h"
#include "overlay/agent.h"

namespace commkit {

namespace {

constexpr size_t kMaxUnread = 4 * 1024 * 1024;  // replies that wait for a client to read them

// Whether this host's file of names has a line for the address.
bool named_in_hosts_file(const std::string& address) {
  std::ifstream file("/etc/hosts");
  std::string line;
  while (std::getline(file, line)) {
    std::string first = line.substr(0, line.find_first_of(" \t#\r"));
    if (first == address && first.size() < line.size()) return true;
  }
  return false;
}

}  // namespace

// Torch looks its peer's name up in reverse, and 127.0.0.1, which it writes as an IPv6 address, is
// in no file of names: each rank would ask the name server.  So the store is at ::1 where that file
// has it.
std::string Agent::listen_store() {
  static const bool six_named = named_in_hosts_file("::1");
  std::string why;
  for (const char* host : {"::1", "127.0.0.1"}) {
    auto here = SocketAddress::parse(host, 0);
    if (here->family() == AF_INET6 && !six_named) continue;
    int fd = socket(here->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, here->get(), here->length()) == 0 && listen(fd, kTcpBacklog) == 0) {
      store_host_ = host;
      store_port_ = SocketAddress::local_of(fd).port();
      store_ = std::make_unique<Listener>(
          loop_, fd, [this](int f, std::string peer) { accept_store(f, std::move(peer)); });
      return "";
    }
    why = std::strerror(errno);
    if (fd >= 0) close(fd);
  }
  return why;
}

void Agent::accept_store(int fd, std::string peer) {
  std::optional<uid_t> uid;
  try {
    uid = tcp_owner_uid(SocketAddress::local_of(fd), SocketAddress::peer_of(fd));
  } catch (const std::exception& error) {
    log("cannot tell whose " + peer + " is: " + error.what());
  }
  // An unknown owner (its end is closed already, or the kernel does not tell) still needs a token.
  if (uid && *uid != getuid()) {
    stranger(peer, "is a process of uid " + std::to_string(*uid) + " at the store");
    close(fd);
    return;
  }
  auto conn = std::make_shared<StoreConn>();
  conn->stream = Stream::make(loop_, fd, std::move(peer));
  conn->stream->no_delay();
  std::weak_ptr<StoreConn> weak = conn;
  auto forget = [this, weak] {
    // Deferred: the session may be running.
    loop_.defer([this, weak] {
      if (auto self = weak.lock()) store_conns_.erase(self);
    });
  };
  conn->session = std::make_unique<StoreSession>(
      [this](std::string_view token) -> KeyValue* {
        return session_ ? session_->keys_of(token) : nullptr;
      },
      [weak](std::string_view bytes) {
        auto self = weak.lock();
        if (!self) return;
        self->stream->send(std::string(bytes));
        // A client that asks and does not read must not fill our memory.
        if (self->stream->queued() > kMaxUnread) self->session->hold(true);
      },
      [this, weak, forget](std::string_view why) {
        auto self = weak.lock();
        if (!self) return;
        stranger(self->stream->peer(), std::string(why));
        self->stream->close();
        forget();
      });
  // A fresh clone of a client may ask how many keys there are before it has named one.
  if (session_ && uid) conn->session->default_token(session_->any_token());
  conn->session->on_want_read([weak] {
    if (auto self = weak.lock()) self->stream->pause_reading(false);
  });
  conn->stream->on_bytes([weak](const char* data, size_t size) {
    auto self = weak.lock();
    if (!self) return;
    self->session->feed(data, size);
    if (!self->session->want_read()) self->stream->pause_reading(true);
  });
  conn->stream->on_drained([weak] {
    if (auto self = weak.lock()) self->session->hold(false);
  });
  conn->stream->on_close([forget](const std::string&) { forget(); });
  store_conns_.insert(conn);
  conn->stream->start();
}

void Agent::drop_store(const std::string& token, bool waiting_only, const std::string& why) {
  if (token.empty()) return;
  std::vector<std::shared_ptr<StoreConn>> out;
  for (const auto& conn : store_conns_) {
    if (conn->session->token() == token && (!waiting_only || conn->session->waiting()))
      out.push_back(conn);
  }
  if (out.empty()) return;
  log("closing " + std::to_string(out.size()) + " store connections: " + why);
  for (const auto& conn : out) {
    conn->stream->close();
    // Deferred: the connection's own request may be what led here.
    loop_.defer([this, conn = std::shared_ptr<StoreConn>(conn)]() mutable {
      store_conns_.erase(conn);
      conn.reset();  // here, and not when the loop forgets this task: its requests refer to the
                     // session
    });
  }
}

}  // namespace commkit
