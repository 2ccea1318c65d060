// A connected, non-blocking socket on a Loop: bytes or frames in, a queue of bytes out.
//
// A frame is: u32 payload length, u16 type, u16 protocol version (little-endian), payload.
// Streams are shared_ptrs; a closed stream keeps its memory until the last owner lets go, calls
// nothing any more, and ignores what is sent to it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "net/loop.h"

namespace commkit {

constexpr uint32_t kMaxFrame = 1u << 30;
constexpr size_t kFrameHeader = 8;

std::string frame(uint16_t type, std::string_view payload);
// For a peer of another version; only messages that are the same in every version.
std::string frame(uint16_t type, std::string_view payload, uint16_t version);

// What went over a set of streams; whoever owns it outlives them.
struct Traffic {
  uint64_t open = 0, peak_open = 0;
  uint64_t frames_in = 0, frames_out = 0;
  uint64_t bytes_in = 0, bytes_out = 0;
};

class Stream : public std::enable_shared_from_this<Stream>, public AtEnd {
 public:
  using OnBytes = std::function<void(const char*, size_t)>;
  using OnFrame = std::function<void(uint16_t type, std::string_view payload)>;
  using OnClose = std::function<void(const std::string& why)>;

  // Takes the descriptor over.  `connecting`: a connect() is under way; `peer` names the other end.
  static std::shared_ptr<Stream> make(Loop& loop, int fd, std::string peer,
                                      bool connecting = false);
  ~Stream();

  // Exactly one of the two; on_close is called once, from the loop, never from send() or close().
  void on_bytes(OnBytes f) { on_bytes_ = shared(std::move(f)); }
  void on_frames(OnFrame f) { on_frame_ = shared(std::move(f)); }
  // A whole frame of another protocol version; without a callback it breaks the stream.
  using OnForeign = std::function<void(uint16_t version, uint16_t type, std::string_view payload)>;
  void on_foreign(OnForeign f) { on_foreign_ = shared(std::move(f)); }
  void on_close(OnClose f) { on_close_ = std::move(f); }
  // The peer has ended; the descriptor is still open.
  void on_ending(std::function<void()> f) { on_ending_ = std::move(f); }
  void on_connected(std::function<void()> f) { on_connected_ = std::move(f); }
  void start();

  // For TCP: small messages go out at once.
  void no_delay();
  // While paused, bytes stay in the socket and the peer feels it.
  void pause_reading(bool on);
  // Called whenever everything queued has been handed to the kernel.
  void on_drained(std::function<void()> f) { on_drained_ = std::move(f); }

  void send(std::string bytes);
  void send_frame(uint16_t type, std::string_view payload) { send(frame(type, payload)); }

  // As if the connection had broken: on_close hears why.
  void give_up(std::string why) {
    if (!closed()) broken(std::move(why));
  }
  // At once, without on_close.
  void close();
  // Sends what is queued (for at most `seconds`), then closes without on_close.
  void close_when_sent(double seconds = 2.0);

  // Before start().
  void count_into(std::shared_ptr<Traffic> traffic);
  bool closed() const { return fd_ < 0; }
  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }
  void max_frame(uint32_t bytes) { max_frame_ = bytes; }
  size_t queued() const { return queued_; }

 private:
  template <typename F>
  static std::shared_ptr<F> shared(F f) {
    return f ? std::make_shared<F>(std::move(f)) : nullptr;
  }
  Stream(Loop& loop, int fd, std::string peer, bool connecting);
  void ready(uint32_t events);
  bool readable();
  void flush();
  void flush_later();
  void at_end() override;
  void forget_queued();
  void want_write(bool on);
  void update_events();
  void broken(std::string why);
  bool take_frames();

  Loop& loop_;
  int fd_;
  std::string peer_;
  bool connecting_;
  bool writing_ = false;
  bool later_ = false;    // what is queued goes out at the end of the loop's round
  bool reading_ = false;  // answers to what is being read go out together
  bool paused_ = false;
  bool closing_ = false;
  bool dying_ = false;
  uint32_t max_frame_ = kMaxFrame;
  // Shared: a callback may replace itself, or close its own stream.
  std::shared_ptr<OnBytes> on_bytes_;
  std::shared_ptr<OnFrame> on_frame_;
  std::shared_ptr<OnForeign> on_foreign_;
  OnClose on_close_;
  std::function<void()> on_connected_;
  std::function<void()> on_drained_;
  std::function<void()> on_ending_;
  std::shared_ptr<Traffic> traffic_;
  std::string in_;
  std::vector<std::string> out_;
  size_t written_ = 0;  // how many of out_ have been written whole
  size_t sent_ = 0;     // bytes of the next one already written
  size_t queued_ = 0;
};

using StreamPtr = std::shared_ptr<Stream>;

// Accepts until destroyed; on EMFILE it rests instead of spinning, and keeps the listener.
class Listener {
 public:
  using OnAccept = std::function<void(int fd, std::string peer)>;
  Listener(Loop& loop, int fd, OnAccept on_accept);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int fd() const { return fd_; }
  // While paused, connections wait in the kernel's queue.
  void pause(bool on);

 private:
  void accept_all();
  Loop& loop_;
  int fd_;
  OnAccept on_accept_;
  Loop::TimerId rest_ = 0;
  bool paused_ = false;
};

}  // namespace commkit
