// Numeric socket addresses, and which of this host's own are worth telling to another host.
// Nothing here asks a name server.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace commkit {

// How far an address reaches.  kNone: unspecified or multicast, never a peer.
enum class Scope { kNone, kLoopback, kLink, kPrivate, kGlobal };

const char* scope_name(Scope scope);

class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr_storage& storage, socklen_t length)
      : storage_(storage), length_(length) {}

  // A numeric IPv4 or IPv6 address, the latter with or without brackets, and with %scope by name
  // or number: fe80::1%eth0.  nullopt: not numeric, or no such interface.
  static std::optional<SocketAddress> parse(std::string_view text, uint16_t port);
  // The ends of a connected or bound socket.  Throw SystemError.
  static SocketAddress local_of(int fd);
  static SocketAddress peer_of(int fd);

  int family() const { return storage_.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  uint16_t port() const;
  void set_port(uint16_t port);

  // 10.0.0.1, fe80::1%eth0
  std::string ip() const;
  // 10.0.0.1:29500, [fe80::1%eth0]:29500
  std::string text() const;

  Scope scope() const;
  bool is_loopback() const { return scope() == Scope::kLoopback; }
  // An IPv4 address that IPv6 sockets write as ::ffff:10.0.0.1, as IPv4; any other unchanged.
  SocketAddress unmapped() const;

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

struct InterfaceAddress {
  std::string name;
  SocketAddress address;
  int prefix = 0;      // bits
  unsigned flags = 0;  // IFF_*
};

constexpr size_t kMostAddresses = 32;  // that choose_addresses gives

// Every IPv4 and IPv6 address of this network namespace, in the kernel's order.
// Throws SystemError.
std::vector<InterfaceAddress> interfaces();

// COMMKIT_IFNAME's syntax is that of NCCL_SOCKET_IFNAME: a list of prefixes; "=" makes them whole
// names, "^" excludes instead, "^=" both.  An empty pattern matches every name.
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
bool matches_interface(std::string_view pattern, std::string_view name);

// The numeric addresses that another host should try, best first, chosen by their scope:
//   1  addresses of interfaces, IPv4 before IPv6, then by interface name, so that hosts agree
//   2  routed addresses on a loopback interface (hosts that announce themselves by BGP), then
//      those of point-to-point links (/31, /127)
//   3  interfaces without carrier; bridges, tunnels and container interfaces, by their names:
//      often the same address on every host
// Link-local addresses only if there is nothing of these, 127.0.0.0/8 and ::1 only if there is
// nothing else at all.  The best kMostAddresses: a Kubernetes node has one for every service
// (kube-ipvs0), and all of them travel to whoever is to dial this host.

std::vector<std::string> choose_addresses(const std::vector<InterfaceAddress>& all,
                                          std::string_view pattern);

}  // namespace commkit
