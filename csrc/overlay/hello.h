// The opening of every connection between two agents: hello, and where a secret is set a mutual
// proof.
//
//   initiator                                  acceptor
//   kHello (nonce a) ------------------------->
//            <--------- kChallenge (nonce b, mac over a, b)      only with COMMKIT_SECRET
//   kProof (mac over b, a) ------------------->                  only with COMMKIT_SECRET
//            <--------- kHeld (root) or kAccepted, or kRefused
//
// The macs cover the hello itself, so nothing in it can be changed on the way; later frames are not
// covered.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/address.h"
#include "net/stream.h"
#include "overlay/protocol.h"

namespace commkit {

// Between 0.5 and 1.5, so that those who try again do not do so together.
double jitter();

// What `side` ("acceptor" or "initiator") shows to prove that it knows the secret: over the other
// side's nonce and the hello as it went over the wire.
std::string handshake_mac(const std::string& secret, const char* side, const std::string& nonce,
                          const std::string& hello);

enum HelloKind : uint8_t { kContact = 0, kChild = 1, kMesh = 2 };

// How a hello begins in every version, so that two of them can name each other and their hosts.
struct HelloStart {
  HelloKind kind = kContact;
  std::string job;      // hash: listeners of other jobs refuse
  std::string host;     // for people
  std::string release;  // of commkit

  static HelloStart decode(Reader& r);
};

struct Hello : HelloStart {
  uint64_t session = 0;  // child and mesh: the root's session
  int32_t index = -1;    // child and mesh: the initiator's index in the tree
  int32_t world_size = 0;
  int32_t local_size = -1;  // -1: unknown
  std::string placement;    // Config::placement
  std::string machine;      // boot id and network namespace: loopback addresses are good inside it
  uint32_t uid = 0;
  uint32_t pid = 0;
  // Contact: when the process of its oldest rank started, on this process's monotonic clock; an age
  // on the wire.  0: not told.
  double born = 0;
  bool secret = false;  // the initiator will prove COMMKIT_SECRET, and asks for proof
  std::vector<std::string> addresses;  // numeric, best first
  uint16_t port = 0;

  // Tells one agent from every other.
  std::string agent() const { return machine + "/" + host + "/" + std::to_string(pid); }
  std::string encode(const std::string& nonce) const;
  static Hello decode(std::string_view payload, std::string& nonce);
};

// A connection whose hello has been verified, until it is given its place.
struct Greeted {
  StreamPtr stream;
  Hello hello;
};

// Connects to the first of the given addresses that takes us in.
class Dialer : public std::enable_shared_from_this<Dialer> {
 public:
  struct Outcome {
    std::function<void(StreamPtr, uint16_t type, std::string payload)>
        open;  // the acceptor's answer
    std::function<void(std::string text, bool retry)> failed;
  };
  struct Terms {
    std::string source;  // numeric address to bind, "" for the kernel's choice
    std::string secret;
    double connect_seconds = 3.0;  // for one address
    // Once connected: a root that takes thousands in lets the last of them wait.
    double answer_seconds = 30.0;
    std::shared_ptr<Traffic> traffic;
  };
  static std::shared_ptr<Dialer> dial(Loop& loop, std::vector<SocketAddress> to, Hello hello,
                                      Terms terms, Outcome outcome);
  void stop();
  ~Dialer() { stop(); }

 private:
  explicit Dialer(Loop& loop) : loop_(loop) {}
  void next();
  bool connect_to(const SocketAddress& to);
  void redial();
  void arm(double seconds);
  void answered(uint16_t type, std::string_view payload);
  void fail_one(const std::string& why);

  Loop& loop_;
  std::vector<SocketAddress> to_;
  size_t at_ = 0;
  Hello hello_;
  Terms terms_;
  std::string sent_;
  std::string nonce_;
  Outcome outcome_;
  StreamPtr stream_;
  Loop::TimerId timer_ = 0, redial_timer_ = 0;
  double redial_after_ = 0;
  bool proven_ = false;
  bool stopped_ = false;
  std::string errors_;
};

// The other side: hands over only connections whose hello is sound, and of this job.
class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  using Taken = std::function<void(StreamPtr, Hello)>;
  using Stranger = std::function<void(const std::string& peer, const std::string& why)>;
  // What the listener belongs to.
  struct Job {
    std::string hash;
    std::string owner;   // for people
    std::string host;    // its name
    std::string secret;  // "": none
  };
  struct Outcome {
    Taken taken;
    Stranger stranger;
    // It has named our job, and has yet to prove that it belongs to it.
    std::function<void()> spoke;
    // A host of this job (nothing proves it) that another version of commkit runs on.
    std::function<void(const std::string& text)> other_version;
    std::function<void()> ended;
  };
  static void start(Loop& loop, StreamPtr stream, Job job, Outcome outcome);
  ~Acceptor();

 private:
  explicit Acceptor(Loop& loop) : loop_(loop) {}
  void frame(uint16_t type, std::string_view payload);
  void foreign(uint16_t version, uint16_t type, std::string_view payload);
  void refuse_other_job(const HelloStart& from, const std::string& more, uint16_t version);
  void release_stream();
  void drop(const std::string& why);
  void take();

  Loop& loop_;
  StreamPtr stream_;
  Job job_;
  std::string nonce_, expected_, seen_;
  Hello hello_;
  Outcome outcome_;
  Loop::TimerId timer_ = 0;
};

}  // namespace commkit
