// Both sides of an agent connection's opening, and the search for the root with what it reads from
// torchrun's store, each against a peer that says anything.  With a secret nobody gets through who
// has not proved it.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "fuzz/input.h"
#include "fuzz/simulated.h"
#include "net/crypto.h"
#include "net/system_error.h"
#include "overlay/config.h"
#include "overlay/contact.h"
#include "overlay/hello.h"

namespace {

using namespace commkit;
using fuzz::require;

const char kSecret[] = "a secret";

struct Wire {
  int fd = -1;
  std::string in;
  bool proved = false;  // with the secret
  ~Wire() { end(); }
  void end() {
    if (fd < 0) return;
    linger now{1, 0};  // a reset: thousands of connections must not wait for their port
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    close(fd);
    fd = -1;
  }
  void say(const std::string& bytes) {
    if (fd >= 0 && !bytes.empty()) (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void hear() {
    char buffer[4096];
    for (ssize_t n; fd >= 0 && (n = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;)
      in.append(buffer, static_cast<size_t>(n));
  }
  // The payload of the first frame of this type.
  bool find(uint16_t type, std::string* payload) {
    hear();
    for (size_t at = 0; in.size() - at >= kFrameHeader;) {
      Reader header(std::string_view(in).substr(at));
      uint32_t length = header.u32();
      uint16_t kind = header.u16();
      if (in.size() - at - kFrameHeader < length) return false;
      *payload = in.substr(at + kFrameHeader, length);
      if (kind == type) return true;
      at += kFrameHeader + length;
    }
    return false;
  }
};

Hello some_hello(fuzz::Input& in) {
  Hello h;
  h.kind = static_cast<HelloKind>(in.below(3));
  h.job = in.u8() < 220 ? "job" : in.some(8);
  h.session = in.u8();
  h.index = in.small();
  h.world_size = in.small();
  h.local_size = in.small();
  h.host = in.some(8);
  h.release = in.some(8);
  h.machine = in.some(8);
  h.secret = in.u8() % 2 == 0;
  h.addresses = {"127.0.0.1", in.some(20)};
  h.port = static_cast<uint16_t>(in.number(2));
  return h;
}

std::string mac(const char* side, const std::string& nonce, const std::string& hello) {
  return handshake_mac(kSecret, side, nonce, hello);
}

// What a peer may say at any time, besides the right thing.
std::string noise(fuzz::Input& in) {
  static const uint16_t types[] = {kHello,   kChallenge, kProof, kHeld, kRefused,
                                   kWelcome, kAccepted,  kUp,    kGo,   kBeat};
  Writer w;
  switch (in.below(6)) {
    case 0:
      return in.some(64);
    case 1:
      w.str(in.some(40)).str(in.some(40));
      break;
    case 2:
      w.str(in.some(40)).u8(in.u8());
      break;
    case 3:
      return frame(types[in.below(10)], in.some(200), in.u8() < 128 ? 1 : 2);
    case 4:
      return frame(kHello, some_hello(in).encode(in.some(20)) + in.some(4));
    default:
      break;
  }
  return frame(types[in.below(10)], w.take());
}

void acceptor(fuzz::Input& in) {
  Loop loop;
  int fds[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0, "socketpair");
  Wire wire;
  wire.fd = fds[1];
  bool secret = in.u8() % 2 == 1;
  int taken = 0, ended = 0;
  Acceptor::Outcome outcome;
  outcome.taken = [&](StreamPtr stream, const Hello& hello) {
    ++taken;
    require(!secret || wire.proved, "a secret is proved before a peer is taken in");
    require(hello.job == "job", "a peer is of this job");
    stream->on_frames([](uint16_t, std::string_view) {});
    if (in.u8() % 2 == 0) {
      stream->close();
    } else {
      stream->close_when_sent();
    }
  };
  outcome.stranger = [](const std::string&, const std::string&) {};
  outcome.spoke = [] {};
  outcome.other_version = [](const std::string& text) { require(!text.empty(), "a version"); };
  outcome.ended = [&] { ++ended; };
  Acceptor::start(loop, Stream::make(loop, fds[0], "peer"),
                  {"job", "its owner", "its host", secret ? kSecret : ""}, outcome);
  std::string hello;
  while (!in.done()) {
    switch (in.below(6)) {
      case 0:
        hello = some_hello(in).encode(std::string(16, 'n'));
        wire.say(frame(kHello, hello));
        break;
      case 1: {
        std::string challenge;
        if (!wire.find(kChallenge, &challenge)) break;
        Reader r(challenge);
        std::string nonce = r.str();
        if (r.str() != mac("acceptor", nonce, hello)) break;
        Writer w;
        bool right = in.u8() < 128;
        w.str(mac(right ? "initiator" : "acceptor", nonce, hello));
        wire.proved = wire.proved || right;
        wire.say(frame(kProof, w.take()));
        break;
      }
      case 2:
        wire.say(noise(in));
        break;
      case 3:
        fuzz::advance(in.u8() / 20.0);
        break;
      default:
        break;
    }
    fuzz::turn(loop, 2);
  }
  wire.end();
  fuzz::turn(loop, 2);
  fuzz::advance(30);
  fuzz::turn(loop, 4);
  require(ended == 1, "an opening comes to an end");
  require(taken <= 1, "a peer is taken in once");
}

struct Port {
  int fd;
  uint16_t port;
  Port() {
    auto here = SocketAddress::parse("127.0.0.1", 0);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    require(bind(fd, here->get(), here->length()) == 0 && listen(fd, 64) == 0, "listen");
    port = SocketAddress::local_of(fd).port();
  }
  int accept_one() { return accept4(fd, nullptr, nullptr, SOCK_NONBLOCK); }
};

// The right thing, or nearly.
std::string answer(fuzz::Input& in, Wire& wire) {
  std::string hello;
  switch (in.below(6)) {
    case 0:
      return frame(kHeld, in.some(3));
    case 1:
      return frame(kAccepted, "");
    case 2: {
      if (!wire.find(kHello, &hello)) return "";
      std::string nonce = in.some(20);
      Writer w;
      w.str(nonce).str(mac("acceptor", nonce, hello));
      wire.proved = true;
      return frame(kChallenge, w.take());
    }
    case 3: {
      Writer w;
      w.str("no").u8(in.u8() % 2);
      return frame(kRefused, w.take());
    }
    default:
      return noise(in);
  }
}

// As a store that waits for the key, then has it.
std::string stored(fuzz::Input& in, uint16_t port) {
  std::string value;
  switch (in.below(4)) {
    case 0:
      value = root_text(port, {"127.0.0.1", "::1", in.some(20)}, "m");
      break;
    case 1:
      value = in.some(100);
      break;
    case 2:
      return in.some(40);
    default:
      value = "commkit1 port=" + in.some(8) + " machine=m addr=127.0.0.1";
  }
  Writer w;
  w.u32(1).u8(in.u8() < 240 ? 0 : 1).u64(in.u8() < 240 ? value.size() : in.number(8));
  return w.take() + value;
}

void contact(fuzz::Input& in) {
  static Port port;
  for (int old; (old = port.accept_one()) >= 0;) close(old);
  Loop loop;
  bool secret = in.u8() % 2 == 1;
  uint8_t kind = in.u8() % 4;
  Fields fields{{"root_host", "127.0.0.1"}, {"machine", "m"}, {"job_id", "fuzz"}};
  fields["root_kind"] = kind == 0 ? "published" : kind == 1 ? "endpoint" : "elastic";
  fields["root_ports"] = std::to_string(port.port) + (kind == 1 ? "," + fields["root_ports"] : "");
  fields["root_published"] = root_text(port.port, {"127.0.0.1"}, "m");
  int held = 0, hopeless = 0;
  bool proved = false;
  std::vector<StreamPtr> streams;
  Dialer::Terms terms;
  terms.secret = secret ? kSecret : "";
  Hello hello;
  hello.job = "job";
  hello.secret = secret;
  Contact::Outcome outcome;
  outcome.held = [&](StreamPtr stream) {
    ++held;
    require(!secret || proved, "a root has proved the secret");
    stream->on_frames([](uint16_t, std::string_view) {});
    streams.push_back(std::move(stream));
  };
  outcome.hopeless = [&](const std::string&) { ++hopeless; };
  auto it = Contact::start(loop, Config::parse(fields), hello, terms, outcome);
  std::vector<std::unique_ptr<Wire>> wires;
  while (!in.done()) {
    fuzz::turn(loop, 2);
    for (int fd; (fd = port.accept_one()) >= 0;) {
      wires.push_back(std::make_unique<Wire>());
      wires.back()->fd = fd;
    }
    uint8_t what = in.u8();
    if (what < 60) fuzz::advance(what / 30.0);
    if (wires.empty()) continue;
    Wire& wire = *wires.back();
    if (what >= 60 && what < 140) {
      std::string bytes = answer(in, wire);
      proved = proved || wire.proved;
      wire.say(bytes);
    }
    if (what >= 140 && what < 220) wire.say(stored(in, port.port));
    if (what >= 220 && what < 240) wire.end();
    if (what >= 250) wire.hear();
  }
  fuzz::turn(loop, 2);
  require(held <= 1 && held + hopeless <= 1, "a search ends once");
  require(!it->status().empty(), "a search can be described");
  it->stop();
  it.reset();
  for (auto& stream : streams) stream->close();
  wires.clear();
  fuzz::turn(loop, 2);
}

void publish(fuzz::Input& in) {
  static Port port;
  for (int old; (old = port.accept_one()) >= 0;) close(old);
  Loop loop;
  int done = 0;
  std::vector<SocketAddress> to{*SocketAddress::parse("127.0.0.1", port.port)};
  publish_in_store(loop, to, "key", in.some(40), [&](const std::string&) { ++done; });
  fuzz::turn(loop, 3);
  Wire wire;
  wire.fd = port.accept_one();
  while (!in.done()) {
    wire.say(in.some(8));
    if (in.u8() < 40) wire.end();
    fuzz::turn(loop, 2);
  }
  wire.end();
  fuzz::advance(10);
  fuzz::turn(loop, 4);
  require(done == 1, "publishing ends once");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  fuzz::freeze();
  void (*sides[])(fuzz::Input&) = {acceptor, contact, contact, publish};
  sides[in.below(4)](in);
  return 0;
}
