// The agent as others in the network meet it: its listeners, strangers, contacts, children.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "net/port_owner.h"
#include "overlay/agent.h"

namespace commkit {

namespace {

constexpr int kHostsAListener = 2048, kMostListeners = 16;
// Strangers that keep silent do not hold up others for longer: a hello follows its connection at
// once, however long the way.
constexpr double kYoungSeconds = 0.02;
// While hellos come, the hosts may only be busy.
constexpr double kBusySeconds = 1.0;
constexpr int kMostYoung = 64;  // the others wait in the kernel

struct Bound {
  int fd = -1;
  uint16_t port = 0;
  std::string error;
};

// Both families where the host has IPv6, else IPv4 alone.
Bound bind_tcp(uint16_t port, bool shared) {
  Bound bound;
  int one = 1, zero = 0;
  for (int family : {AF_INET6, AF_INET}) {
    bound.fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bound.fd < 0) continue;
    setsockopt(bound.fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (shared) setsockopt(bound.fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    sockaddr_storage where{};
    socklen_t size;
    if (family == AF_INET6) {
      setsockopt(bound.fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
      auto* in6 = reinterpret_cast<sockaddr_in6*>(&where);
      in6->sin6_family = AF_INET6;
      in6->sin6_port = htons(port);
      size = sizeof *in6;
    } else {
      auto* in4 = reinterpret_cast<sockaddr_in*>(&where);
      in4->sin_family = AF_INET;
      in4->sin_port = htons(port);
      size = sizeof *in4;
    }
    if (bind(bound.fd, reinterpret_cast<sockaddr*>(&where), size) == 0 &&
        listen(bound.fd, kTcpBacklog) == 0) {
      getsockname(bound.fd, reinterpret_cast<sockaddr*>(&where), &size);
      bound.port =
          ntohs(reinterpret_cast<sockaddr_in*>(&where)->sin_port);  // the same offset in both
      return bound;
    }
    bound.error = std::strerror(errno);
    bool unusable = errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT;
    close(bound.fd);
    bound.fd = -1;
    if (!unusable) return bound;
  }
  if (bound.error.empty()) bound.error = std::string("socket: ") + std::strerror(errno);
  return bound;
}

}  // namespace

std::string Agent::choose_interfaces(const Config& config) {
  if (config.ifname.empty()) return "";
  interfaces_ = interfaces();
  addresses_ = choose_addresses(interfaces_, config.ifname);
  source_ = addresses_.empty() ? "" : addresses_.front();
  if (!addresses_.empty()) return "";
  std::set<std::string> names;
  for (const auto& one : interfaces_) names.insert(one.name);
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return "COMMKIT_IFNAME=" + config.ifname + " matches no interface with an address; there are " +
         text;
}

std::string Agent::listen_tcp(const Config& config, const std::vector<uint16_t>& ports, int hosts) {
  std::vector<uint16_t> tries = ports;
  std::string errors;
  if (tries.empty() || tries == std::vector<uint16_t>{0}) {
    // The listener of an earlier epoch, or of a rank 0 that came late, serves as well.
    if (listening()) return "";
    tries.clear();
    for (int port = config.port_low; config.port_low > 0 && port <= config.port_high; ++port) {
      tries.push_back(static_cast<uint16_t>(port));
    }
    // Hosts that share one network namespace would otherwise all begin at the same port.
    if (!tries.empty())
      std::rotate(tries.begin(), tries.begin() + getpid() % tries.size(), tries.end());
    if (tries.empty()) {
      tries.push_back(0);
    } else {
      errors = "no free port in COMMKIT_PORT_RANGE=" + std::to_string(config.port_low) + "-" +
               std::to_string(config.port_high);
      if (tries.size() == 1) {
        errors =
            "COMMKIT_ONE_PORT or COMMKIT_PORT_RANGE leaves one port, which agents cannot share "
            "(end the other job, or give this one another port; hosts that share a network "
            "namespace need a range)";
      }
    }
  } else if (listening() && std::find(tries.begin(), tries.end(), port_) != tries.end()) {
    if (hosts <= kHostsAListener || tcp_.size() > 1) return "";
    tcp_.clear();  // whoever is in its queue dials again
  }
  for (uint16_t port : tries) {
    Bound bound = bind_tcp(port, false);
    if (bound.fd < 0) {
      std::string owner = port_owner(port);
      if (errors.size() < 300) {
        errors += (errors.empty() ? "port " : "; port ") + std::to_string(port) + ": " +
                  bound.error + (owner.empty() ? "" : " (held by " + owner + ")");
      }
      continue;
    }
    port_ = bound.port;
    job_.hash = config.job_hash();
    job_.secret = config.secret;
    job_.host = config.host_name;
    job_.owner = "job '" + config.job_id + "' of uid " + std::to_string(getuid()) + " (agent pid " +
                 std::to_string(getpid()) + " on host " + config.host_name + ")";
    std::vector<int> fds{bound.fd};
    if (hosts > kHostsAListener && !share_port(hosts, fds)) {
      return "port " + std::to_string(port) + " was taken while it was being shared";
    }
    tcp_.clear();
    for (int listener : fds) {
      tcp_.push_back(std::make_unique<Listener>(
          loop_, listener, [this](int fd, std::string peer) { accept_tcp(fd, std::move(peer)); }));
    }
    interfaces_ = interfaces();
    addresses_ = choose_addresses(interfaces_, config.ifname);
    std::string list;
    for (const auto& address : addresses_) list += " " + address;
    log("listening on port " + std::to_string(port_) + ", addresses" + list);
    return "";
  }
  return errors;
}

// The kernel bounds a listener's queue (somaxconn, 4096 by default) and drops what comes on top: a
// big world's root listens on its port several times.  The plain socket before this one has shown
// that nobody else holds the port.
bool Agent::share_port(int hosts, std::vector<int>& fds) {
  uint16_t port = port_;
  std::vector<int> shared;
  close(fds[0]);
  for (int i = 0; i < std::min(kMostListeners, hosts / kHostsAListener + 1); ++i) {
    Bound bound = bind_tcp(port, true);
    if (bound.fd < 0) break;
    shared.push_back(bound.fd);
  }
  fds = shared;
  return !shared.empty();
}

void Agent::stranger(const std::string& peer, const std::string& why) {
  // The first few tell what it is; a scanner must not fill the disk.
  if (++strangers_ <= 20 || strangers_ % 1000 == 0) {
    log("dropped " + peer + ": " + why + " (" + std::to_string(strangers_) + " strangers so far)");
  }
}

void Agent::accept_tcp(int fd, std::string peer) {
  ++accepted_total_;
  if (opening_ >= most_opening_ && !drop_silent()) {
    stranger(peer, "came while " + std::to_string(opening_) + " others had not said who they are");
    close(fd);
    return;
  }
  ++opening_;
  ++young_;
  auto coming = std::make_shared<Coming>();
  coming->came = now();
  age(coming, hellos_);
  throttle();
  auto stream = Stream::make(loop_, fd, std::move(peer));
  while (!opening_list_.empty() && opening_list_.front().coming.expired())
    opening_list_.pop_front();
  opening_list_.push_back({coming, stream});
  stream->no_delay();
  stream->count_into(traffic_);
  Acceptor::Outcome outcome;
  outcome.taken = [this](StreamPtr stream, Hello hello) {
    ++hellos_;
    taken(std::move(stream), std::move(hello));
  };
  outcome.stranger = [this](const std::string& who, const std::string& why) { stranger(who, why); };
  outcome.other_version = [this](const std::string& text) { met_other_version(text); };
  outcome.spoke = [coming] { coming->spoke = true; };
  outcome.ended = [this, coming] {
    --opening_;
    grow(*coming);
  };
  Acceptor::start(loop_, std::move(stream), job_, std::move(outcome));
}

// That host's ranks fail at once.  Ours do as well where it is certain that they wait for them;
// else it is told with the progress and at the deadline.
void Agent::met_other_version(const std::string& text) {
  if (other_version_ == text) return;
  other_version_ = text;
  if (session_) session_->met_other_version(text);
}

void Agent::age(const std::weak_ptr<Coming>& coming, uint64_t hellos) {
  loop_.after(kYoungSeconds, [this, coming, hellos] {
    auto still = coming.lock();
    if (!still || !still->young) return;
    bool busy = still->spoke || hellos_ != hellos;
    if (busy && now() - still->came < kBusySeconds) return age(coming, hellos_);
    grow(*still);
  });
}

void Agent::grow(Coming& coming) {
  if (!coming.young) return;
  coming.young = false;
  --young_;
  throttle();
}

// Whoever has been silent for longest makes room.  False: all of them have only just come.
bool Agent::drop_silent() {
  while (!opening_list_.empty()) {
    auto coming = opening_list_.front().coming.lock();
    if (coming && coming->young) return false;
    auto stream = opening_list_.front().stream.lock();
    opening_list_.pop_front();
    if (!coming || !stream || stream->closed()) continue;
    coming.reset();
    stream->give_up("had to make room for others");
    return true;
  }
  return false;
}

void Agent::throttle() {
  int most = session_ && session_->root() ? session_->most_contacts() : kMostYoung;
  bool enough = young_ + (session_ ? session_->contacts() : 0) >= most;
  for (auto& listener : tcp_) listener->pause(enough);
}

void Agent::taken(StreamPtr stream, Hello hello) {
  if (hello.kind == kContact) {
    if (hello.pid == static_cast<uint32_t>(getpid()) && session_ && session_->is_host(hello.host)) {
      // We have read our own address, of an epoch in which we were the root.
      Writer w;
      w.str("this agent is itself looking for the root").u8(1);
      stream->send_frame(kRefused, w.take());
      return stream->close_when_sent();
    }
    stream->send_frame(kHeld, "");
    if (too_late(hello.agent(), now() - hello.born)) {
      Writer w;
      w.str(failed_.kind).str(failed_.text);
      stream->send_frame(kFailDown, w.take());
      return stream->close_when_sent();
    }
    if (session_ && session_->takes_contacts())
      return session_->add_contact(std::move(stream), std::move(hello));
    std::weak_ptr<Stream> weak = stream;
    stream->on_frames([this, weak](uint16_t type, std::string_view) {
      auto self = weak.lock();
      if (!self || type != kFailUp) return;
      Writer w;
      w.str("join-timeout").str("the deadline passed: " + no_root_text());
      self->send_frame(kFailDown, w.take());
    });
    stream->on_close([this, weak](const std::string&) {
      auto gone = std::find_if(waiting_contacts_.begin(), waiting_contacts_.end(),
                               [&](const Greeted& c) { return c.stream == weak.lock(); });
      if (gone != waiting_contacts_.end()) waiting_contacts_.erase(gone);
    });
    // It may be of an attempt that has failed, though it looks like one of the next; and this agent
    // may be gone when its deadline comes.
    Writer w;
    w.str(no_root_text());
    if (failed_.at > formed_at_) stream->send_frame(kProgress, w.take());
    waiting_contacts_.push_back({std::move(stream), std::move(hello)});
    return;
  }
  bool child = hello.kind == kChild;
  if (session_ && (session_->is_session(hello.session) || (child && session_->unplaced()))) {
    return child ? session_->add_child(std::move(stream), hello)
                 : session_->add_mesh(std::move(stream), hello);
  }
  Writer w;
  w.str("this agent is not part of that session any more").u8(0);
  stream->send_frame(kRefused, w.take());
  stream->close_when_sent();
}

std::vector<Greeted> Agent::take_waiting_contacts() {
  std::vector<Greeted> out(std::make_move_iterator(waiting_contacts_.begin()),
                           std::make_move_iterator(waiting_contacts_.end()));
  waiting_contacts_.clear();
  return out;
}

// Whoever waits here for a root has been misled by an old address.
void Agent::not_root() {
  for (auto& waiting : take_waiting_contacts()) waiting.stream->close();
}

std::string Agent::interface_of(const std::string& address) {
  if (interfaces_.empty()) interfaces_ = interfaces();
  for (const auto& one : interfaces_) {
    if (one.address.ip() == address) return one.name;
  }
  return "";
}

}  // namespace commkit
