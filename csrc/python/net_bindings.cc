// commkit._C: addresses, host identity, digests.
#include <net/if.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "net/address.h"
#include "net/crypto.h"
#include "net/identity.h"

namespace commkit {
namespace {

namespace py = pybind11;
using Dict = std::map<std::string, std::string>;

std::string flag_names(unsigned flags) {
  constexpr std::pair<unsigned, const char*> kNames[] = {{IFF_UP, "up"},
                                                         {IFF_RUNNING, "running"},
                                                         {IFF_LOOPBACK, "loopback"},
                                                         {IFF_POINTOPOINT, "pointopoint"}};
  std::string out;
  for (const auto& [bit, name] : kNames) {
    if ((flags & bit) != 0) out += (out.empty() ? "" : ",") + std::string(name);
  }
  return out;
}

std::vector<Dict> list_interfaces() {
  std::vector<Dict> out;
  for (const auto& one : interfaces()) {
    out.push_back({{"name", one.name},
                   {"address", one.address.ip()},
                   {"prefix", std::to_string(one.prefix)},
                   {"flags", flag_names(one.flags)},
                   {"scope", scope_name(one.address.scope())}});
  }
  return out;
}

InterfaceAddress interface_address(const std::string& name, const std::string& text) {
  InterfaceAddress out;
  out.name = name;
  size_t slash = text.find('/');
  std::string ip = text.substr(0, slash);
  auto address = SocketAddress::parse(ip, 0);
  int most = address && address->family() == AF_INET6 ? 128 : 32;
  bool good = address.has_value();
  out.prefix = most;
  if (good && slash != std::string::npos) {
    std::string bits = text.substr(slash + 1);
    good = !bits.empty() && bits.size() <= 3 &&
           bits.find_first_not_of("0123456789") == std::string::npos && std::stoi(bits) <= most;
    if (good) out.prefix = std::stoi(bits);
  }
  if (!good) {
    throw std::invalid_argument("address " + text + " of interface " + name +
                                ": expected a numeric address and its prefix length, such as "
                                "10.0.0.1/24");
  }
  out.address = *address;
  out.flags = IFF_UP | IFF_RUNNING;
  if (name == "lo") out.flags |= IFF_LOOPBACK;
  return out;
}

std::vector<std::string> choose(const std::vector<std::pair<std::string, std::string>>& addresses,
                                const std::string& pattern) {
  std::vector<InterfaceAddress> all;
  for (const auto& [name, text] : addresses) all.push_back(interface_address(name, text));
  return choose_addresses(all, pattern);
}

std::vector<std::string> match(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const auto& name : names) {
    if (matches_interface(pattern, name)) out.push_back(name);
  }
  return out;
}

Dict identity() {
  HostIdentity id = host_identity();
  return {
      {"boot_id", id.boot_id}, {"netns", id.netns}, {"mntns", id.mntns}, {"hostname", id.hostname}};
}

}  // namespace

void register_net(py::module_& m) {
  m.def("interfaces", &list_interfaces);
  m.def("match_interfaces", &match, py::arg("pattern"), py::arg("names"));
  m.def("choose_addresses", &choose, py::arg("addresses"), py::arg("pattern"));
  m.def("host_identity", &identity);
  m.def(
      "sha256", [](const py::bytes& data) { return py::bytes(sha256(std::string_view(data))); },
      py::arg("data"));
  m.def(
      "hmac_sha256",
      [](const py::bytes& key, const py::bytes& data) {
        return py::bytes(hmac_sha256(std::string_view(key), std::string_view(data)));
      },
      py::arg("key"), py::arg("data"));
}

}  // namespace commkit
