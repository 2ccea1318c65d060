#include "overlay/hello.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "net/crypto.h"
#include "net/version.h"

namespace commkit {

namespace {

// A stranger that says nothing is dropped after this long; a hello comes with the connection.
constexpr double kHelloSeconds = 5.0;
constexpr double kRedialSeconds = 0.05, kLongestRedial = 1.0;

}  // namespace

// The lengths keep two different pairs of nonce and hello from being the same bytes.
std::string handshake_mac(const std::string& secret, const char* side, const std::string& nonce,
                          const std::string& hello) {
  Writer w;
  w.str(side).str(nonce).str(hello);
  return hmac_sha256(secret, w.take());
}

double jitter() {
  static std::mt19937 generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0.5, 1.5)(generator);
}

std::string Hello::encode(const std::string& nonce) const {
  Writer w;
  // By now, since it may have been long in getting through.
  double age = born > 0 ? std::clamp((now() - born) * 1000, 0.0, 4e9) : 0;
  w.u32(kMagic).u8(kind).str(job).str(host).str(release);
  w.u64(session).i32(index).i32(world_size).i32(local_size);
  w.str(placement)
      .str(machine)
      .u32(uid)
      .u32(pid)
      .u32(static_cast<uint32_t>(age))
      .u8(secret ? 1 : 0)
      .strs(addresses)
      .u16(port)
      .str(nonce);
  return w.take();
}

HelloStart HelloStart::decode(Reader& r) {
  HelloStart h;
  if (r.u32() != kMagic) throw BadFrame("not a commkit hello");
  uint8_t kind = r.u8();
  if (kind > kMesh) throw BadFrame("an unknown kind of hello");
  h.kind = static_cast<HelloKind>(kind);
  h.job = r.str();
  h.host = r.str();
  h.release = r.str();
  return h;
}

Hello Hello::decode(std::string_view payload, std::string& nonce) {
  Reader r(payload);
  Hello h;
  static_cast<HelloStart&>(h) = HelloStart::decode(r);
  h.session = r.u64();
  h.index = r.i32();
  h.world_size = r.i32();
  h.local_size = r.i32();
  h.placement = r.str();
  h.machine = r.str();
  h.uid = r.u32();
  h.pid = r.u32();
  h.born = now() - r.u32() / 1000.0;
  h.secret = r.u8() != 0;
  h.addresses = r.strs();
  h.port = r.u16();
  nonce = r.str();
  if (h.kind != kContact && h.index <= 0) throw BadFrame("a place in the tree that cannot be");
  if (!r.done()) throw BadFrame("a hello is followed by something else");
  return h;
}

std::shared_ptr<Dialer> Dialer::dial(Loop& loop, std::vector<SocketAddress> to, Hello hello,
                                     Terms terms, Outcome outcome) {
  auto self = std::shared_ptr<Dialer>(new Dialer(loop));
  self->to_ = std::move(to);
  self->hello_ = std::move(hello);
  self->terms_ = std::move(terms);
  self->outcome_ = std::move(outcome);
  // Never from inside dial(): the caller has not stored the dialer yet.
  std::weak_ptr<Dialer> weak = self;
  loop.defer([weak] {
    if (auto me = weak.lock(); me && !me->stopped_) me->next();
  });
  return self;
}

void Dialer::stop() {
  stopped_ = true;
  loop_.cancel(timer_);
  loop_.cancel(redial_timer_);
  if (stream_) stream_->close();
  stream_.reset();
}

void Dialer::next() {
  std::weak_ptr<Dialer> weak = weak_from_this();
  while (at_ < to_.size()) {
    const SocketAddress& to = to_[at_++];
    redial_after_ = kRedialSeconds;
    if (!connect_to(to)) continue;
    arm(terms_.connect_seconds);
    return;
  }
  auto failed = outcome_.failed;
  std::string errors = errors_.empty() ? "no address to connect to" : errors_;
  stop();
  failed(errors, true);
}

void Dialer::arm(double seconds) {
  loop_.cancel(timer_);
  std::weak_ptr<Dialer> weak = weak_from_this();
  timer_ = loop_.after(seconds, [weak] {
    if (auto self = weak.lock()) {
      self->fail_one("no answer from " + self->to_[self->at_ - 1].text());
    }
  });
}

bool Dialer::connect_to(const SocketAddress& to) {
  auto failed = [&](const char* call) {
    errors_ += (errors_.empty() ? "" : "; ") + std::string(call) + " " + to.text() + ": " +
               std::strerror(errno);
  };
  int fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    failed("socket for");
    return false;
  }
  auto from = SocketAddress::parse(terms_.source, 0);
  if (from && from->family() == to.family()) {
    int one = 1;
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    bind(fd, from->get(), from->length());
  }
  if (connect(fd, to.get(), to.length()) < 0 && errno != EINPROGRESS) {
    failed("connect to");
    ::close(fd);
    return false;
  }
  stream_ = Stream::make(loop_, fd, to.text(), true);
  if (terms_.traffic) stream_->count_into(terms_.traffic);
  stream_->no_delay();
  stream_->max_frame(kMaxHello);
  std::weak_ptr<Dialer> weak = weak_from_this();
  stream_->on_connected([weak] {
    auto self = weak.lock();
    if (!self) return;
    self->loop_.cancel(self->redial_timer_);
    self->arm(self->terms_.answer_seconds);
    // Where the route to this peer leaves from is the best address to give it.
    sockaddr_storage local{};
    socklen_t size = sizeof local;
    if (self->hello_.port != 0 &&
        getsockname(self->stream_->fd(), reinterpret_cast<sockaddr*>(&local), &size) == 0) {
      std::string mine = SocketAddress(local, size).unmapped().ip();
      auto& list = self->hello_.addresses;
      list.erase(std::remove(list.begin(), list.end(), mine), list.end());
      list.insert(list.begin(), mine);
    }
    self->nonce_ = random_bytes(16);
    self->sent_ = self->hello_.encode(self->nonce_);
    self->stream_->send_frame(kHello, self->sent_);
  });
  stream_->on_frames([weak](uint16_t type, std::string_view payload) {
    if (auto self = weak.lock()) self->answered(type, payload);
  });
  stream_->on_close([weak](const std::string& why) {
    if (auto self = weak.lock()) self->fail_one(why);
  });
  stream_->start();
  redial_timer_ = loop_.after(redial_after_ * jitter(), [weak] {
    if (auto self = weak.lock()) self->redial();
  });
  return true;
}

// A listener whose queue was full has dropped our SYN, and the kernel would wait a second to repeat
// it.
void Dialer::redial() {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (!stream_ || getsockopt(stream_->fd(), IPPROTO_TCP, TCP_INFO, &info, &size) < 0 ||
      info.tcpi_state != TCP_SYN_SENT) {
    return;
  }
  stream_->close();
  redial_after_ = std::min(redial_after_ * 2, kLongestRedial);
  if (!connect_to(to_[at_ - 1])) fail_one("");
}

void Dialer::fail_one(const std::string& why) {
  auto self = shared_from_this();
  loop_.cancel(timer_);
  loop_.cancel(redial_timer_);
  if (stream_) stream_->close();
  stream_.reset();
  if (!why.empty()) errors_ += (errors_.empty() ? "" : "; ") + why;
  next();
}

void Dialer::answered(uint16_t type, std::string_view payload) {
  auto self = shared_from_this();
  if (type == kChallenge && !terms_.secret.empty()) {
    Reader r(payload);
    std::string nonce = r.str(), mac = r.str();
    if (!equal_in_constant_time(mac, handshake_mac(terms_.secret, "acceptor", nonce, sent_))) {
      return fail_one(stream_->peer() + " does not know this job's COMMKIT_SECRET");
    }
    proven_ = true;
    Writer w;
    w.str(handshake_mac(terms_.secret, "initiator", nonce, sent_));
    stream_->send_frame(kProof, w.take());
    return;
  }
  if (type == kChallenge) {
    return fail_one(stream_->peer() +
                    " asks for COMMKIT_SECRET, which is not set here; set it on every host");
  }
  if (type == kRefused) {
    Reader r(payload);
    std::string text = r.str();
    bool retry = r.u8() != 0;
    if (retry) return fail_one(stream_->peer() + ": " + text);
    auto failed = outcome_.failed;
    std::string whole = stream_->peer() + ": " + text;
    stop();
    return failed(whole, false);
  }
  if (type != kHeld && type != kAccepted)
    return fail_one(stream_->peer() + " answered out of order");
  if (!terms_.secret.empty() && !proven_) {
    return fail_one(stream_->peer() +
                    " did not ask for COMMKIT_SECRET: it is not set there; set it on every host");
  }
  loop_.cancel(timer_);
  auto stream = std::move(stream_);
  stream_.reset();
  stream->max_frame(kMaxFrame);
  stream->on_close(nullptr);
  stream->on_frames(nullptr);
  auto open = outcome_.open;
  stopped_ = true;
  open(stream, type, std::string(payload));
}

void Acceptor::start(Loop& loop, StreamPtr stream, Job job, Outcome outcome) {
  auto self = std::shared_ptr<Acceptor>(new Acceptor(loop));
  self->stream_ = stream;
  self->job_ = std::move(job);
  self->outcome_ = std::move(outcome);
  stream->max_frame(kMaxHello);
  // The stream's callbacks own the acceptor; replacing them ends it.
  stream->on_frames(
      [self](uint16_t type, std::string_view payload) { self->frame(type, payload); });
  stream->on_foreign([self](uint16_t version, uint16_t type, std::string_view payload) {
    self->foreign(version, type, payload);
  });
  stream->on_close([self](const std::string& why) {
    self->outcome_.stranger(
        self->stream_->peer(),
        why + (self->seen_.empty() ? " before its hello" : " before it had proved COMMKIT_SECRET"));
    self->release_stream();
  });
  std::weak_ptr<Acceptor> weak = self;
  self->timer_ = loop.after(kHelloSeconds, [weak] {
    if (auto me = weak.lock())
      me->drop("said nothing for " + std::to_string(static_cast<int>(kHelloSeconds)) + " s");
  });
  stream->start();
}

Acceptor::~Acceptor() {
  loop_.cancel(timer_);
  outcome_.ended();
}

void Acceptor::release_stream() {
  stream_->on_close(nullptr);
  stream_->on_frames(nullptr);
  stream_->on_foreign(nullptr);
}

void Acceptor::drop(const std::string& why) {
  outcome_.stranger(stream_->peer(), why);
  stream_->close();
  release_stream();
}

void Acceptor::refuse_other_job(const HelloStart& from, const std::string& more, uint16_t version) {
  Writer w;
  w.str("this listener belongs to " + job_.owner).u8(1);
  stream_->send(commkit::frame(kRefused, w.take(), version));
  outcome_.stranger(stream_->peer(), "is of another job (host " + from.host + more + ")");
  stream_->close_when_sent();
}

void Acceptor::foreign(uint16_t version, uint16_t type, std::string_view payload) {
  auto self = shared_from_this();
  HelloStart from;
  try {
    Reader r(payload);
    if (type != kHello || !seen_.empty()) throw BadFrame("not a hello");
    from = HelloStart::decode(r);
  } catch (const BadFrame&) {
    return drop("does not speak commkit's protocol, version " + std::to_string(protocol_version()));
  }
  if (from.job != job_.hash) {
    return refuse_other_job(from, ", " + version_text(from.release, version), version);
  }
  std::string text = "host " + from.host + " runs " + version_text(from.release, version) +
                     " and host " + job_.host + " runs " + version_text() +
                     "; install one version on every host";
  Writer w;
  w.str(text).u8(0);
  stream_->send(commkit::frame(kRefused, w.take(), version));
  outcome_.stranger(stream_->peer(), text);
  stream_->close_when_sent();
  outcome_.other_version(text);
}

void Acceptor::frame(uint16_t type, std::string_view payload) {
  auto self = shared_from_this();
  if (type == kHello && seen_.empty()) {
    std::string nonce;
    try {
      hello_ = Hello::decode(payload, nonce);
    } catch (const BadFrame& error) {
      return drop(error.what());
    }
    seen_ = std::string(payload);
    if (hello_.job != job_.hash) {
      return refuse_other_job(
          hello_, ", uid " + std::to_string(hello_.uid) + ", pid " + std::to_string(hello_.pid),
          protocol_version());
    }
    if (job_.secret.empty() && hello_.secret) {
      Writer w;
      w.str("COMMKIT_SECRET is set on host " + hello_.host + " and not here; set it on every host")
          .u8(0);
      stream_->send_frame(kRefused, w.take());
      outcome_.stranger(stream_->peer(),
                        "COMMKIT_SECRET is set on host " + hello_.host + " and not here");
      return stream_->close_when_sent();
    }
    if (job_.secret.empty()) return take();
    outcome_.spoke();
    nonce_ = random_bytes(16);
    expected_ = handshake_mac(job_.secret, "initiator", nonce_, seen_);
    Writer w;
    w.str(nonce_).str(handshake_mac(job_.secret, "acceptor", nonce_, seen_));
    stream_->send_frame(kChallenge, w.take());
    return;
  }
  if (type == kProof && !expected_.empty()) {
    Reader r(payload);
    if (!equal_in_constant_time(r.str(), expected_))
      return drop("does not know this job's COMMKIT_SECRET");
    return take();
  }
  drop("sent a message out of order");
}

void Acceptor::take() {
  loop_.cancel(timer_);
  auto taken = std::move(outcome_.taken);
  auto stream = stream_;
  auto hello = std::move(hello_);
  stream->max_frame(kMaxFrame);
  release_stream();
  taken(stream, std::move(hello));
}

}  // namespace commkit
