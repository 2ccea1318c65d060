#include "net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>

#include "net/system_error.h"

namespace commkit {
namespace {

sockaddr_in as4(const sockaddr_storage& storage) {
  sockaddr_in out;
  std::memcpy(&out, &storage, sizeof out);
  return out;
}

sockaddr_in6 as6(const sockaddr_storage& storage) {
  sockaddr_in6 out;
  std::memcpy(&out, &storage, sizeof out);
  return out;
}

bool is_number(std::string_view text) {
  return !text.empty() && text.size() < 10 &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Scope scope4(uint32_t host_order) {
  auto in = [host_order](uint32_t network, int bits) {
    return (host_order ^ network) >> (32 - bits) == 0;
  };
  if (in(0x00000000, 8) || in(0xe0000000, 3)) return Scope::kNone;
  if (in(0x7f000000, 8)) return Scope::kLoopback;
  if (in(0xa9fe0000, 16)) return Scope::kLink;
  if (in(0x0a000000, 8) || in(0xac100000, 12) || in(0xc0a80000, 16) || in(0x64400000, 10)) {
    return Scope::kPrivate;
  }
  return Scope::kGlobal;
}

// Interfaces that container engines, hypervisors and VPNs make.
bool is_virtual(std::string_view name) {
  constexpr std::array<std::string_view, 26> kPrefixes = {
      "docker", "br-", "veth",  "virbr",  "vnet",   "cni",    "flannel",      "cali",      "cilium",
      "lxc",    "lxd", "incus", "podman", "weave",  "kube",   "nodelocaldns", "tailscale", "wg",
      "zt",     "tun", "tap",   "vxlan",  "geneve", "antrea", "ovn",          "nerdctl"};
  return std::any_of(kPrefixes.begin(), kPrefixes.end(),
                     [name](std::string_view p) { return name.substr(0, p.size()) == p; });
}

// eth2 before eth10: runs of digits compare as numbers.
bool natural_less(std::string_view a, std::string_view b) {
  auto digit = [](char c) { return c >= '0' && c <= '9'; };
  size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      size_t m = i, n = j;
      while (m < a.size() && digit(a[m])) ++m;
      while (n < b.size() && digit(b[n])) ++n;
      unsigned long x = std::strtoul(std::string(a.substr(i, m - i)).c_str(), nullptr, 10);
      unsigned long y = std::strtoul(std::string(b.substr(j, n - j)).c_str(), nullptr, 10);
      if (x != y) return x < y;
      i = m;
      j = n;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

int prefix_bits(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  std::array<uint8_t, 16> bytes{};
  if (mask->sa_family == AF_INET) {
    std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in*>(mask)->sin_addr, 4);
  } else if (mask->sa_family == AF_INET6) {
    std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr, 16);
  }
  int bits = 0;
  for (uint8_t byte : bytes) {
    for (; byte != 0; byte = static_cast<uint8_t>(byte << 1)) ++bits;
  }
  return bits;
}

SocketAddress end_of(int fd, const char* call,
                     int (*get)(int, sockaddr*, socklen_t*) noexcept(true)) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (get(fd, reinterpret_cast<sockaddr*>(&storage), &length) < 0) {
    throw SystemError(call, "descriptor " + std::to_string(fd), errno);
  }
  return SocketAddress(storage, length);
}

}  // namespace

const char* scope_name(Scope scope) {
  switch (scope) {
    case Scope::kNone:
      return "none";
    case Scope::kLoopback:
      return "loopback";
    case Scope::kLink:
      return "link";
    case Scope::kPrivate:
      return "private";
    case Scope::kGlobal:
      return "global";
  }
  return "none";
}

std::optional<SocketAddress> SocketAddress::parse(std::string_view text, uint16_t port) {
  if (text.find('\0') != text.npos) return std::nullopt;
  bool bracketed = text.size() >= 2 && text.front() == '[' && text.back() == ']';
  if (bracketed) text = text.substr(1, text.size() - 2);
  std::string host(text.substr(0, text.find('%')));
  SocketAddress out;
  if (sockaddr_in v4{}; !bracketed && inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    if (host.size() != text.size()) return std::nullopt;
    v4.sin_family = AF_INET;
    std::memcpy(&out.storage_, &v4, sizeof v4);
    out.length_ = sizeof v4;
    out.set_port(port);
    return out;
  }
  sockaddr_in6 v6{};
  if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return std::nullopt;
  v6.sin6_family = AF_INET6;
  if (host.size() != text.size()) {
    std::string zone(text.substr(host.size() + 1));
    v6.sin6_scope_id = if_nametoindex(zone.c_str());
    if (v6.sin6_scope_id == 0 && is_number(zone)) {
      v6.sin6_scope_id = static_cast<uint32_t>(std::strtoul(zone.c_str(), nullptr, 10));
    }
    if (v6.sin6_scope_id == 0) return std::nullopt;
  }
  std::memcpy(&out.storage_, &v6, sizeof v6);
  out.length_ = sizeof v6;
  out.set_port(port);
  return out;
}

SocketAddress SocketAddress::local_of(int fd) { return end_of(fd, "getsockname", ::getsockname); }

SocketAddress SocketAddress::peer_of(int fd) { return end_of(fd, "getpeername", ::getpeername); }

uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(as4(storage_).sin_port);
  if (family() == AF_INET6) return ntohs(as6(storage_).sin6_port);
  return 0;
}

void SocketAddress::set_port(uint16_t port) {
  if (family() == AF_INET) {
    sockaddr_in v4 = as4(storage_);
    v4.sin_port = htons(port);
    std::memcpy(&storage_, &v4, sizeof v4);
  } else if (family() == AF_INET6) {
    sockaddr_in6 v6 = as6(storage_);
    v6.sin6_port = htons(port);
    std::memcpy(&storage_, &v6, sizeof v6);
  }
}

std::string SocketAddress::ip() const {
  char buffer[INET6_ADDRSTRLEN] = "";
  if (family() == AF_INET) {
    sockaddr_in v4 = as4(storage_);
    return inet_ntop(AF_INET, &v4.sin_addr, buffer, sizeof buffer);
  }
  if (family() != AF_INET6) return "address family " + std::to_string(family());
  sockaddr_in6 v6 = as6(storage_);
  std::string out = inet_ntop(AF_INET6, &v6.sin6_addr, buffer, sizeof buffer);
  if (v6.sin6_scope_id != 0) {
    char name[IF_NAMESIZE] = "";
    out += '%';
    out += if_indextoname(v6.sin6_scope_id, name) != nullptr ? std::string(name)
                                                             : std::to_string(v6.sin6_scope_id);
  }
  return out;
}

std::string SocketAddress::text() const {
  std::string host = family() == AF_INET6 ? "[" + ip() + "]" : ip();
  return host + ":" + std::to_string(port());
}

Scope SocketAddress::scope() const {
  SocketAddress plain = unmapped();
  if (plain.family() == AF_INET) return scope4(ntohl(as4(plain.storage_).sin_addr.s_addr));
  if (plain.family() != AF_INET6) return Scope::kNone;
  in6_addr a = as6(plain.storage_).sin6_addr;
  if (IN6_IS_ADDR_UNSPECIFIED(&a) || IN6_IS_ADDR_MULTICAST(&a)) return Scope::kNone;
  if (IN6_IS_ADDR_LOOPBACK(&a)) return Scope::kLoopback;
  if (IN6_IS_ADDR_LINKLOCAL(&a)) return Scope::kLink;
  if ((a.s6_addr[0] & 0xfe) == 0xfc || IN6_IS_ADDR_SITELOCAL(&a)) return Scope::kPrivate;
  return Scope::kGlobal;
}

SocketAddress SocketAddress::unmapped() const {
  if (family() != AF_INET6) return *this;
  sockaddr_in6 v6 = as6(storage_);
  if (!IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return *this;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = v6.sin6_port;
  std::memcpy(&v4.sin_addr, v6.sin6_addr.s6_addr + 12, 4);
  SocketAddress out;
  std::memcpy(&out.storage_, &v4, sizeof v4);
  out.length_ = sizeof v4;
  return out;
}

std::vector<InterfaceAddress> interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) < 0) {
    throw SystemError("getifaddrs", "this network namespace", errno);
  }
  std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<InterfaceAddress> out;
  for (ifaddrs* it = list; it != nullptr; it = it->ifa_next) {
    if (it->ifa_addr == nullptr) continue;
    int family = it->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    sockaddr_storage storage{};
    std::memcpy(&storage, it->ifa_addr, length);
    out.push_back({it->ifa_name, SocketAddress(storage, length), prefix_bits(it->ifa_netmask),
                   it->ifa_flags});
  }
  return out;
}

bool matches_interface(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return true;
  bool exclude = pattern.front() == '^';
  if (exclude) pattern.remove_prefix(1);
  bool exact = !pattern.empty() && pattern.front() == '=';
  if (exact) pattern.remove_prefix(1);
  bool listed = false;
  while (!pattern.empty() && !listed) {
    size_t comma = std::min(pattern.find(','), pattern.size());
    std::string_view item = pattern.substr(0, comma);
    pattern.remove_prefix(std::min(comma + 1, pattern.size()));
    // An empty item, as in "eth0,", would be a prefix of every name.
    if (!item.empty()) listed = exact ? name == item : name.substr(0, item.size()) == item;
  }
  return listed != exclude;
}

std::vector<std::string> choose_addresses(const std::vector<InterfaceAddress>& all,
                                          std::string_view pattern) {
  enum Class { kOrdinary, kOnLoopback, kPointToPoint, kNoCarrier, kVirtual, kLink, kLoopback };
  struct Candidate {
    Class rank;
    const InterfaceAddress* from;
  };
  std::vector<Candidate> found;
  for (const InterfaceAddress& one : all) {
    if (!matches_interface(pattern, one.name) || (one.flags & IFF_UP) == 0) continue;
    bool v4 = one.address.family() == AF_INET;
    Class rank = kOrdinary;
    switch (one.address.scope()) {
      case Scope::kNone:
        continue;
      case Scope::kLoopback:
        rank = kLoopback;
        break;
      case Scope::kLink:
        rank = kLink;
        break;
      case Scope::kPrivate:
      case Scope::kGlobal:
        if (is_virtual(one.name)) {
          rank = kVirtual;
        } else if ((one.flags & IFF_LOOPBACK) != 0) {
          rank = kOnLoopback;
        } else if ((one.flags & IFF_RUNNING) == 0) {
          rank = kNoCarrier;
        } else if (one.prefix == (v4 ? 31 : 127)) {
          rank = kPointToPoint;
        }
    }
    found.push_back({rank, &one});
  }
  // Stable: an interface's primary address stays before its secondary ones.
  std::stable_sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    auto major = [](const Candidate& c) {
      return std::make_tuple(c.rank, c.from->address.family() == AF_INET ? 0 : 1);
    };
    if (major(a) != major(b)) return major(a) < major(b);
    return natural_less(a.from->name, b.from->name);
  });
  std::vector<std::string> out;
  for (const Candidate& one : found) {
    if (one.rank >= kLink && one.rank != found.front().rank) break;
    if (out.size() == kMostAddresses) break;
    std::string ip = one.from->address.ip();
    // A link-local IPv6 address says nothing without its interface.
    bool zoned =
        one.rank != kLink || one.from->address.family() == AF_INET || ip.find('%') != ip.npos;
    out.push_back(zoned ? ip : ip + "%" + one.from->name);
  }
  return out;
}

}  // namespace commkit
