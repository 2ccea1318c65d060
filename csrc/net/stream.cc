#include "net/stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "net/address.h"
#include "net/codec.h"
#include "net/version.h"

namespace commkit {

namespace {

constexpr size_t kMostAhead = 1 << 20;
constexpr size_t kEnoughAtOnce = 64 * 1024;

}  // namespace

std::string frame(uint16_t type, std::string_view payload) {
  return frame(type, payload, protocol_version());
}

std::string frame(uint16_t type, std::string_view payload, uint16_t version) {
  Writer w;
  w.u32(static_cast<uint32_t>(payload.size())).u16(type).u16(version);
  std::string bytes = w.take();
  bytes.append(payload);
  return bytes;
}

std::shared_ptr<Stream> Stream::make(Loop& loop, int fd, std::string peer, bool connecting) {
  return std::shared_ptr<Stream>(new Stream(loop, fd, std::move(peer), connecting));
}

Stream::Stream(Loop& loop, int fd, std::string peer, bool connecting)
    : loop_(loop), fd_(fd), peer_(std::move(peer)), connecting_(connecting) {}

void Stream::no_delay() {
  int one = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

Stream::~Stream() { close(); }

void Stream::count_into(std::shared_ptr<Traffic> traffic) {
  traffic_ = std::move(traffic);
  traffic_->peak_open = std::max(traffic_->peak_open, ++traffic_->open);
}

void Stream::start() {
  std::weak_ptr<Stream> weak = weak_from_this();
  writing_ = connecting_ || !out_.empty();
  loop_.watch(fd_, EPOLLIN | (writing_ ? EPOLLOUT : 0u), [weak](uint32_t events) {
    if (auto self = weak.lock()) self->ready(events);
  });
}

void Stream::ready(uint32_t events) {
  if (connecting_) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return broken("connect to " + peer_ + ": " + std::strerror(error));
    if ((events & EPOLLOUT) == 0) return;
    connecting_ = false;
    if (on_connected_) on_connected_();
    if (closed()) return;
  }
  // Reading comes first: what a peer said before it closed must not be lost.
  bool ended = (events & (EPOLLHUP | EPOLLERR)) != 0;
  if ((ended || ((events & EPOLLIN) != 0 && !paused_)) && !readable()) return;
  if ((events & EPOLLOUT) != 0 && !closed()) flush();
}

bool Stream::readable() {
  char buffer[65536];
  // Bounded, so that one busy peer does not starve the others.
  for (int round = 0; round < 16; ++round) {
    ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    if (n == 0) {
      broken(peer_ + " closed the connection");
      return false;
    }
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR) return true;
      broken("recv from " + peer_ + ": " + std::strerror(errno));
      return false;
    }
    reading_ = true;
    bool sound = true;
    if (auto call = on_bytes_) {
      (*call)(buffer, static_cast<size_t>(n));
    } else {
      in_.append(buffer, static_cast<size_t>(n));
      sound = take_frames();
    }
    reading_ = false;
    if (!sound || closed()) return false;
    if (!writing_ && !out_.empty()) flush();
    if (closed()) return false;
    if (static_cast<size_t>(n) < sizeof buffer || paused_) return true;
  }
  return true;
}

bool Stream::take_frames() {
  size_t at = 0;
  while (in_.size() - at >= kFrameHeader) {
    Reader header(std::string_view(in_).substr(at, kFrameHeader));
    uint32_t length = header.u32();
    uint16_t type = header.u16();
    uint16_t version = header.u16();
    bool foreign = version != protocol_version();
    if ((foreign && !on_foreign_) || length > max_frame_) {
      broken(peer_ +
             (foreign ? " does not speak commkit's protocol, version "
                      : " sent a frame that is too long for version ") +
             std::to_string(protocol_version()));
      return false;
    }
    if (in_.size() - at - kFrameHeader < length) {
      // Memory follows the bytes that came, not those announced.
      in_.reserve(at + kFrameHeader + std::min<size_t>(length, kMostAhead));
      break;
    }
    if (traffic_) {
      ++traffic_->frames_in;
      traffic_->bytes_in += kFrameHeader + length;
    }
    auto call = on_frame_;  // a frame's handler may install the next one's
    auto call_foreign = on_foreign_;
    if (!foreign && !call && !closing_) {
      broken(peer_ + " spoke before it was its turn");
      return false;
    }
    try {
      std::string_view payload = std::string_view(in_).substr(at + kFrameHeader, length);
      if (foreign) {
        (*call_foreign)(version, type, payload);
      } else if (call) {
        (*call)(type, payload);
      }
    } catch (const BadFrame& error) {
      broken(peer_ + " sent a malformed frame: " + error.what());
      return false;
    }
    if (closed()) return false;
    at += kFrameHeader + length;
  }
  in_.erase(0, at);
  return true;
}

void Stream::send(std::string bytes) {
  if (closed() || closing_ || dying_ || bytes.empty()) return;
  if (traffic_) {
    ++traffic_->frames_out;
    traffic_->bytes_out += bytes.size();
  }
  queued_ += bytes.size();
  out_.push_back(std::move(bytes));
  if (writing_ || connecting_ || reading_) return;
  if (loop_.in_round() && queued_ < kEnoughAtOnce) return flush_later();
  flush();
}

// What one round sends to a peer is one message of the kernel's, and wakes the peer once.
void Stream::flush_later() {
  if (!std::exchange(later_, true)) loop_.at_end(weak_from_this());
}

void Stream::at_end() {
  if (!std::exchange(later_, false)) return;
  if (!closed() && !writing_ && !out_.empty()) flush();
}

void Stream::flush() {
  while (!out_.empty()) {
    std::array<iovec, 16> parts;
    msghdr message{};
    message.msg_iov = parts.data();
    for (size_t i = written_; i < out_.size() && message.msg_iovlen < parts.size(); ++i) {
      std::string& bytes = out_[i];
      size_t from = message.msg_iovlen == 0 ? sent_ : 0;
      parts[message.msg_iovlen++] = {bytes.data() + from, bytes.size() - from};
    }
    ssize_t n = ::sendmsg(fd_, &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR) return want_write(true);
      std::string why = "send to " + peer_ + ": " + std::strerror(errno);
      // What the peer said before it went away is read first, and its end then reported from there.
      forget_queued();
      dying_ = true;
      want_write(false);
      std::weak_ptr<Stream> weak = weak_from_this();
      loop_.defer([weak, why] {
        auto self = weak.lock();
        if (self && !self->closed() && self->readable() && !self->closed()) self->broken(why);
      });
      return;
    }
    sent_ += static_cast<size_t>(n);
    queued_ -= static_cast<size_t>(n);
    while (written_ < out_.size() && sent_ >= out_[written_].size()) {
      sent_ -= out_[written_].size();
      std::string().swap(out_[written_++]);
    }
    // Seldom, since what is left moves.
    if (written_ == out_.size() || (written_ >= 64 && 2 * written_ >= out_.size())) {
      out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(written_));
      written_ = 0;
    }
  }
  want_write(false);
  if (closing_) return close();
  if (on_drained_) on_drained_();
}

void Stream::forget_queued() {
  out_.clear();
  written_ = sent_ = queued_ = 0;
}

void Stream::want_write(bool on) {
  if (on == writing_ || closed()) return;
  writing_ = on;
  update_events();
}

void Stream::pause_reading(bool on) {
  if (on == paused_ || closed()) return;
  paused_ = on;
  update_events();
}

void Stream::update_events() {
  loop_.modify(fd_, (paused_ ? 0u : EPOLLIN) | (writing_ ? EPOLLOUT : 0u));
}

void Stream::close() {
  if (fd_ < 0) return;
  if (std::exchange(later_, false) && !dying_ && !writing_ && !out_.empty()) {
    // What was sent before counts as sent.
    closing_ = false;
    on_drained_ = nullptr;
    flush();
  }
  loop_.unwatch(fd_);
  ::close(fd_);
  fd_ = -1;
  if (traffic_) --traffic_->open;
  forget_queued();
}

void Stream::close_when_sent(double seconds) {
  if (closed()) return;
  // Whatever the callbacks hold is let go, even where there is nothing to send.
  on_close_ = nullptr;
  on_frame_ = nullptr;
  on_foreign_ = nullptr;
  if (out_.empty() || dying_) return close();
  closing_ = true;
  if (on_bytes_) on_bytes([](const char*, size_t) {});
  auto self = shared_from_this();  // keeps the stream until it has been sent
  loop_.after(seconds, [self] { self->close(); });
}

void Stream::broken(std::string why) {
  auto self = shared_from_this();
  auto call = std::move(on_close_);
  on_close_ = nullptr;
  if (on_ending_) on_ending_();
  close();
  if (call) call(why);
}

Listener::Listener(Loop& loop, int fd, OnAccept on_accept)
    : loop_(loop), fd_(fd), on_accept_(std::move(on_accept)) {
  loop_.watch(fd_, EPOLLIN, [this](uint32_t) { accept_all(); });
}

Listener::~Listener() {
  loop_.cancel(rest_);
  loop_.unwatch(fd_);
  ::close(fd_);
}

void Listener::pause(bool on) {
  if (on == paused_) return;
  paused_ = on;
  loop_.modify(fd_, on ? 0u : EPOLLIN);
}

void Listener::accept_all() {
  for (int i = 0; i < 64 && !paused_; ++i) {
    sockaddr_storage from{};
    socklen_t size = sizeof from;
    int fd = accept4(fd_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        loop_.modify(fd_, 0);
        rest_ = loop_.after(0.1, [this] { loop_.modify(fd_, paused_ ? 0u : EPOLLIN); });
      }
      return;  // ECONNABORTED and the like: the next event will tell
    }
    std::string peer =
        from.ss_family == AF_UNIX ? "a local process" : SocketAddress(from, size).unmapped().text();
    on_accept_(fd, std::move(peer));
  }
}

}  // namespace commkit
