// The rank's side of its agent connection, and what lists agents, against an agent that answers
// with anything: each call ends, with a result or with a Failure.
#include "overlay/client.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <thread>

#include "fuzz/agent_peers.h"
#include "overlay/agent_list.h"

namespace {

using namespace commkit;
using namespace fuzz;

constexpr Grammar kAnswers[] = {
    {kFormed, "[ss]"}, {kFailed, "ss"}, {kNotice, "ss"}, {kOpDone, "qb[s]"}, {kOpFailed, "qss"},
    {kKeyDone, "qP"},  {kLeft, "b"},    {kRootIs, "s"},  {kNotice, "ss"},    {kInspected, "[ss]"}};

// What the agent says between one request and the next.
std::string answers(Input& in) {
  std::string out;
  for (size_t n = 1 + in.below(3); n > 0; --n) {
    uint8_t what = in.u8();
    if (what >= 250) {
      out += in.some(16);
      continue;
    }
    const Grammar& message = kAnswers[what % 10];
    out += frame(message.type, payload(in, message.fields, 0));
  }
  return out;
}

int listen_as(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  require(bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(fd, 8) == 0,
          "a local socket");
  return fd;
}

// One answer to each frame, or when no frame comes; then the end.
void serve(int fd, const std::vector<std::string>& script) {
  std::string in;
  char buffer[65536];
  for (const auto& bytes : script) {
    while (in.size() < kFrameHeader || in.size() - kFrameHeader < Reader(in).u32()) {
      pollfd ready{fd, POLLIN, 0};
      // The first frame always comes; without it the client would try another connection.
      int patience = &bytes == &script.front() ? 5000 : 3;
      ssize_t n = poll(&ready, 1, patience) == 1 ? recv(fd, buffer, sizeof buffer, 0) : 0;
      if (n <= 0) break;
      in.append(buffer, static_cast<size_t>(n));
    }
    if (in.size() >= kFrameHeader) {
      in.erase(0, std::min<size_t>(in.size(), kFrameHeader + Reader(in).u32()));
    }
    size_t half = bytes.size() / 2;
    (void)!send(fd, bytes.data(), half, MSG_NOSIGNAL);
    (void)!send(fd, bytes.data() + half, bytes.size() - half, MSG_NOSIGNAL);
  }
  close(fd);
}

// An agent that is late answers nobody; all the calls of an input have to end long before the
// fuzzer takes them for stuck.
constexpr double kSeconds = 1;

template <typename Call>
void ends(const Call& call) {
  try {
    call();
  } catch (const Failure& failure) {
    require(std::strlen(failure.what()) < 100000, "an error is short");
  }
}

void as_rank(Input& in, int listener, const Fields& config, const std::vector<uint8_t>& calls) {
  // An agent that says nothing at all before it ends is taken for one that was about to leave.
  std::vector<std::string> script{frame(kNotice, Writer().str("log").str("").take()) + answers(in)};
  for (size_t i = 0; i < calls.size(); ++i) script.push_back(answers(in));
  std::thread agent([listener, &script] { serve(accept(listener, nullptr, nullptr), script); });
  ends([&] {
    int notices = 0;
    Client client(config, 5.0, [&](const std::string&, const std::string&) { ++notices; }, nullptr);
    for (uint8_t what : calls) {
      ends([&] {
        switch (what % 8) {
          case 0:
            client.formed(kSeconds, nullptr);
            break;
          case 1: {
            auto kind = static_cast<OpKind>(1 + what / 8 % 3);
            auto out = client.operation(kind, "t#0", kind == kBroadcast ? 0 : -1, true, "x", "d",
                                        kSeconds, nullptr);
            require(kind != kBroadcast || out.size() == 1, "a broadcast has one payload");
            break;
          }
          case 2:
          case 3: {
            KvRequest request;
            request.op = what % 16 < 8 ? KvOp::kGet : KvOp::kListKeys;
            request.key = "k";
            client.key(std::move(request), kSeconds, nullptr);
            break;
          }
          case 4:
            client.root_endpoint(kSeconds, nullptr);
            break;
          case 5:
            client.info();
            client.failures();
            break;
          case 6:
            client.connected("g", RankSet::all(4));
            break;
          default:
            client.leave(1, nullptr);
        }
      });
    }
  });
  agent.join();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Fields config{{"host_key", "fuzz " + std::to_string(getpid())}, {"rank", "0"}};
  static const std::string name = Config::parse(config).agent_name();
  static const int listener = listen_as(name);
  Input in(data, size);
  if (in.u8() % 8 == 7) {
    std::vector<std::string> script{answers(in)};
    std::thread agent([&] { serve(accept(listener, nullptr, nullptr), script); });
    inspect_agent(name, false, 5.0);
    agent.join();
    return 0;
  }
  std::vector<uint8_t> calls;
  for (size_t n = in.below(6); n > 0; --n) calls.push_back(in.u8());
  as_rank(in, listener, config, calls);
  return 0;
}
