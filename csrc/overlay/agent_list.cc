#include "overlay/agent_list.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>

#include "net/loop.h"
#include "net/peer.h"
#include "net/stream.h"
#include "overlay/spawn.h"

namespace commkit {

Fields inspect_agent(const std::string& name, bool stop, double timeout) {
  int fd = connect_agent(name);
  if (fd < 0) return {};
  // Anybody may bind a name that looks like one of this user's agents.
  if (peer_credentials(fd).uid != getuid()) {
    ::close(fd);
    return {};
  }
  Writer w;
  w.u32(kMagic);
  std::string ask = frame(stop ? kStop : kInspect, w.take());
  if (send(fd, ask.data(), ask.size(), MSG_NOSIGNAL) < 0) {
    ::close(fd);
    return {};
  }
  std::string in;
  double deadline = now() + timeout;
  Fields fields;
  while (now() < deadline) {
    pollfd ready{fd, POLLIN, 0};
    if (poll(&ready, 1, 50) <= 0) continue;
    char buffer[4096];
    ssize_t n = recv(fd, buffer, sizeof buffer, 0);
    if (n <= 0) break;
    in.append(buffer, static_cast<size_t>(n));
    if (in.size() < kFrameHeader) continue;
    Reader header(in);
    uint32_t length = header.u32();
    if (in.size() < kFrameHeader + length) continue;
    try {
      Reader r(std::string_view(in).substr(kFrameHeader, length));
      fields = get_fields(r);
    } catch (const BadFrame&) {
    }
    break;
  }
  // An agent that was told to end is gone when its socket is.
  while (stop && !fields.empty() && now() < deadline) {
    pollfd ready{fd, POLLIN, 0};
    char byte;
    if (poll(&ready, 1, 50) > 0 && recv(fd, &byte, 1, 0) <= 0) break;
  }
  ::close(fd);
  return fields;
}

std::vector<std::string> agent_names() {
  std::ifstream in("/proc/net/unix");
  std::string line, prefix = "@commkit-" + std::to_string(getuid()) + "-";
  std::set<std::string> names;
  while (std::getline(in, line)) {
    size_t at = line.find(prefix);
    if (at == std::string::npos) continue;
    std::istringstream fields(line);
    std::string num, refs, protocol, flags;
    fields >> num >> refs >> protocol >> flags;
    // The listening socket, not the connections that carry its name.
    if (flags == "00010000") names.insert(line.substr(at + 1));
  }
  return {names.begin(), names.end()};
}

}  // namespace commkit
