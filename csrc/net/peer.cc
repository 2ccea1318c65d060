#include "net/peer.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "net/system_error.h"

namespace commkit {
namespace {

struct Closer {
  int fd;
  ~Closer() { close(fd); }
};

// The address as the kernel's tables hold it: four words in network byte order.
std::array<uint32_t, 4> words(const SocketAddress& address) {
  std::array<uint32_t, 4> out{};
  if (address.family() == AF_INET) {
    std::memcpy(out.data(), &reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr, 4);
  } else {
    std::memcpy(out.data(), &reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr, 16);
  }
  return out;
}

std::string both(const SocketAddress& local, const SocketAddress& remote) {
  return "the connection " + remote.text() + " -> " + local.text();
}

// 0100007F:1F90, as /proc/net/tcp and tcp6 write it.
std::string in_proc(const SocketAddress& address, bool v6) {
  std::array<uint32_t, 4> w = words(address);
  if (v6 && address.family() == AF_INET) w = {0, 0, htonl(0xffff), w[0]};
  char buffer[48];
  if (v6) {
    std::snprintf(buffer, sizeof buffer, "%08X%08X%08X%08X:%04X", w[0], w[1], w[2], w[3],
                  static_cast<unsigned>(address.port()));
  } else {
    std::snprintf(buffer, sizeof buffer, "%08X:%04X", w[0], static_cast<unsigned>(address.port()));
  }
  return buffer;
}

std::optional<uid_t> find_in_proc(const char* path, bool v6, const SocketAddress& from,
                                  const SocketAddress& to, bool* readable) {
  std::ifstream table(path);
  std::string line;
  if (!std::getline(table, line)) return std::nullopt;  // the heading
  *readable = true;
  const std::string source = in_proc(from, v6);
  const std::string target = in_proc(to, v6);
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state, queues, timer, retransmits;
    uint64_t uid = 0;
    if (fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid &&
        local == source && remote == target) {
      return static_cast<uid_t>(uid);
    }
  }
  return std::nullopt;
}

}  // namespace

PeerCredentials peer_credentials(int unix_fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(unix_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) < 0) {
    throw SystemError("getsockopt(SO_PEERCRED)", "descriptor " + std::to_string(unix_fd), errno);
  }
  return {credentials.pid, credentials.uid};
}

std::optional<uid_t> tcp_owner_uid_by_diag(const SocketAddress& local,
                                           const SocketAddress& remote) {
  // The wanted socket sees the connection the other way round.  An IPv6 socket that speaks IPv4
  // is found by its IPv4 addresses.
  const SocketAddress from = remote.unmapped();
  const SocketAddress to = local.unmapped();
  const std::string about = both(local, remote);

  int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
  if (fd < 0) throw SystemError("socket(NETLINK_SOCK_DIAG)", about, errno);
  Closer closer{fd};
  timeval patience{1, 0};  // the kernel answers inside sendmsg; this is for the day it does not
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);

  struct {
    nlmsghdr header;
    inet_diag_req_v2 query;
  } message{};
  message.header.nlmsg_len = sizeof message;
  message.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  message.header.nlmsg_flags = NLM_F_REQUEST;  // no dump: one socket
  message.query.sdiag_family = static_cast<uint8_t>(from.family());
  message.query.sdiag_protocol = IPPROTO_TCP;
  message.query.idiag_states = ~0u;
  auto& id = message.query.id;
  std::array<uint32_t, 4> source = words(from);
  std::array<uint32_t, 4> target = words(to);
  std::memcpy(id.idiag_src, source.data(), sizeof source);
  std::memcpy(id.idiag_dst, target.data(), sizeof target);
  id.idiag_sport = htons(from.port());
  id.idiag_dport = htons(to.port());
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  if (from.family() == AF_INET6) {
    id.idiag_if = reinterpret_cast<const sockaddr_in6*>(from.get())->sin6_scope_id;
  }

  sockaddr_nl kernel{};
  kernel.nl_family = AF_NETLINK;
  ssize_t n;
  do {
    n = sendto(fd, &message, sizeof message, 0, reinterpret_cast<sockaddr*>(&kernel),
               sizeof kernel);
  } while (n < 0 && errno == EINTR);
  if (n < 0) throw SystemError("sendto(NETLINK_SOCK_DIAG)", about, errno);

  alignas(nlmsghdr) char answer[4096];
  do {
    n = recv(fd, answer, sizeof answer, 0);
  } while (n < 0 && errno == EINTR);
  if (n < 0) throw SystemError("recv(NETLINK_SOCK_DIAG)", about, errno);

  nlmsghdr header;
  if (static_cast<size_t>(n) < sizeof header) {
    throw SystemError("recv(NETLINK_SOCK_DIAG)", about, EPROTO);
  }
  std::memcpy(&header, answer, sizeof header);
  if (header.nlmsg_type == NLMSG_ERROR) {
    nlmsgerr error{};
    std::memcpy(&error, answer + NLMSG_HDRLEN,
                std::min(sizeof error, static_cast<size_t>(n) - NLMSG_HDRLEN));
    if (error.error == -ENOENT) return std::nullopt;
    throw SystemError("sock_diag", about, -error.error);
  }
  inet_diag_msg found;
  if (header.nlmsg_type != SOCK_DIAG_BY_FAMILY ||
      static_cast<size_t>(n) < NLMSG_HDRLEN + sizeof found) {
    throw SystemError("recv(NETLINK_SOCK_DIAG)", about, EPROTO);
  }
  std::memcpy(&found, answer + NLMSG_HDRLEN, sizeof found);
  // Without an established socket the kernel's look-up goes on to a listener of that port.
  if (found.id.idiag_dport != id.idiag_dport) return std::nullopt;
  return found.idiag_uid;
}

std::optional<uid_t> tcp_owner_uid_by_proc(const SocketAddress& local,
                                           const SocketAddress& remote) {
  const SocketAddress from = remote.unmapped();
  const SocketAddress to = local.unmapped();
  bool readable = false;
  errno = 0;
  if (from.family() == AF_INET) {
    auto uid = find_in_proc("/proc/net/tcp", false, from, to, &readable);
    if (uid) return uid;
  }
  // IPv4 connections of IPv6 sockets are in this table only.
  bool readable6 = false;
  auto uid = find_in_proc("/proc/net/tcp6", true, from, to, &readable6);
  if (!readable && !readable6) {
    throw SystemError("open(/proc/net/tcp)", both(local, remote), errno != 0 ? errno : ENOENT);
  }
  return uid;
}

std::optional<uid_t> tcp_owner_uid(const SocketAddress& local, const SocketAddress& remote) {
  std::string refused;
  try {
    return tcp_owner_uid_by_diag(local, remote);
  } catch (const SystemError& error) {
    refused = error.what();  // no sock_diag module, a seccomp filter
  }
  try {
    return tcp_owner_uid_by_proc(local, remote);
  } catch (const SystemError& error) {
    throw SystemError(refused + "; open(/proc/net/tcp)", both(local, remote), error.code());
  }
}

}  // namespace commkit
