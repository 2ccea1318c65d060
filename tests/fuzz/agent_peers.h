// Those whom an agent meets, with raw sockets, and messages of every type with fields that make
// some sense, since random bytes alone would not get past the first field.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "fuzz/input.h"
#include "overlay/config.h"
#include "overlay/hello.h"
#include "overlay/protocol.h"

namespace fuzz {

constexpr uint64_t kSession = 77;

// A peer of the agent under test: one connection.
struct Peer {
  int fd = -1;
  std::string in;

  explicit Peer(int f) : fd(f) {}
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer() { end(true); }

  void end(bool reset) {
    if (fd < 0) return;
    // With a reset the port is free again at once.
    linger now{1, 0};
    if (reset) setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(fd);
    fd = -1;
  }
  void say(const std::string& bytes) {
    if (fd >= 0 && !bytes.empty()) (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void say(uint16_t type, const std::string& payload) { say(commkit::frame(type, payload)); }
  // Takes what has come; the first frame of this type, if any, goes into `payload`.
  bool hear(uint16_t type = 0, std::string* payload = nullptr) {
    char buffer[65536];
    for (ssize_t n; fd >= 0 && (n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;)
      in.append(buffer, static_cast<size_t>(n));
    size_t at = 0;
    while (in.size() - at >= commkit::kFrameHeader) {
      commkit::Reader header(std::string_view(in).substr(at));
      uint32_t length = header.u32();
      uint16_t kind = header.u16();
      if (in.size() - at - commkit::kFrameHeader < length) break;
      std::string body = in.substr(at + commkit::kFrameHeader, length);
      at += commkit::kFrameHeader + length;
      if (payload != nullptr && kind == type) {
        *payload = body;
        in.erase(0, at);
        return true;
      }
    }
    in.erase(0, at);
    return false;
  }
};

// -1: the agent is leaving and listens no more.
inline int connect_to(const sockaddr* address, socklen_t size) {
  int fd = socket(address->sa_family, SOCK_STREAM, 0);
  require(fd >= 0, "a socket");
  if (connect(fd, address, size) == 0) return fd;
  close(fd);
  return -1;
}

inline int connect_port(uint16_t port) {
  auto to = commkit::SocketAddress::parse("127.0.0.1", port);
  return connect_to(to->get(), to->length());
}

// A listener of the harness itself, for what the agent dials.
struct Port {
  int fd;
  uint16_t port;
  Port() {
    auto here = commkit::SocketAddress::parse("127.0.0.1", 0);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    require(bind(fd, here->get(), here->length()) == 0 && listen(fd, 256) == 0, "listen");
    port = commkit::SocketAddress::local_of(fd).port();
  }
  int accept_one() { return accept4(fd, nullptr, nullptr, SOCK_NONBLOCK); }
  void clear() {
    for (int one; (one = accept_one()) >= 0;) close(one);
  }
};

// --- Messages --------------------------------------------------------------------------------

// Fields of each message: q id, b byte, h port, w u32, i small number, s text, R ranks, K key
// request, P its reply, D dumped keys, O the body of an operation, [..] a list.
struct Grammar {
  uint16_t type;
  const char* fields;
};

constexpr Grammar kMessages[] = {
    {commkit::kRankOp, "qbswibss"},
    {commkit::kRankKey, "qK"},
    {commkit::kRankKeyCancel, "q"},
    {commkit::kRankCreating, "b"},
    {commkit::kRankConnected, "sR"},
    {commkit::kRankLeave, "w"},
    {commkit::kRankExiting, "s"},
    {commkit::kRankRoot, ""},
    {commkit::kInspect, "m"},
    {commkit::kHeld, ""},
    {commkit::kRefused, "sb"},
    {commkit::kWelcome, "Niiisb[a]hb"},
    {commkit::kUnreachable, "s"},
    {commkit::kAccepted, ""},
    {commkit::kListens, "[a]h"},
    {commkit::kUp, "[i[ii]]"},
    {commkit::kFailUp, "ss"},
    {commkit::kLostUp, "R[s]"},
    {commkit::kOpUp, "sbiRO"},
    {commkit::kOpExpired, "s"},
    {commkit::kProbed, "qRqb[s]"},
    {commkit::kLeaving, "D"},
    {commkit::kTableAsk, ""},
    {commkit::kGo, "qii"},
    {commkit::kFailDown, "ss"},
    {commkit::kProgress, "s"},
    {commkit::kLossDown, "R[s]"},
    {commkit::kOpDown, "sbiO"},
    {commkit::kOpFailDown, "sss"},
    {commkit::kProbe, "qbs"},
    {commkit::kLeavingAck, ""},
    {commkit::kTable, "[iR[a]h]"},
    {commkit::kKeyRequest, "qK"},
    {commkit::kKeyReply, "qP"},
    {commkit::kKeyCancel, "q"},
    {commkit::kKeyMoved, "q"},
    {commkit::kBeat, ""},
    {commkit::kRankJoin, "mwwii"},
    {commkit::kStop, "m"},
};
constexpr size_t kMessageCount = sizeof kMessages / sizeof kMessages[0];

// In a list of their own: inputs that are kept mean by a number what they meant before.
constexpr Grammar kHandovers[] = {{commkit::kLeaving, "D[isR]"}, {commkit::kHandover, ""},
                                  {commkit::kParentReady, "s"},  {commkit::kMoved, ""},
                                  {commkit::kTakeOver, "s[a]h"}, {commkit::kNewParent, "iss[a]h"},
                                  {commkit::kMove, ""},          {commkit::kStay, ""}};
constexpr size_t kHandoverCount = sizeof kHandovers / sizeof kHandovers[0];

inline std::string text(Input& in) {
  static const char* const texts[] = {"",   "a",           "k",           "t1",       "t2#0",
                                      "g",  "commkit:0/x", "commkit:1/x", "h3",       "commkit:3/x",
                                      "up", "commkit:7/x", "commkit:6/x", "\1fence/g"};
  uint8_t which = in.u8();
  if (which < 224) return texts[which % 14];
  if (which < 250) return in.some(12);
  return std::string(3000, 'x');
}

std::string payload(Input& in, const char* fields, uint16_t port);

}  // namespace fuzz
