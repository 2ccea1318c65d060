// Frames over a socket, cut anywhere: they arrive as they were sent, or the stream is closed.
#include "net/stream.h"

#include <sys/socket.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "fuzz/input.h"
#include "fuzz/simulated.h"
#include "net/codec.h"

namespace {

using namespace commkit;
using fuzz::require;

constexpr uint32_t kMost = 100000;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  fuzz::freeze();
  Loop loop;
  int fds[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0, "socketpair");
  std::vector<std::pair<uint16_t, std::string>> sent, got;
  int closed = 0;
  uint8_t habits = in.u8();
  auto stream = Stream::make(loop, fds[0], "peer");
  stream->max_frame(kMost);
  auto traffic = std::make_shared<Traffic>();
  stream->count_into(traffic);
  auto handler = [&](uint16_t type, std::string_view payload) {
    require(closed == 0 && !stream->closed(), "a closed stream is silent");
    require(payload.size() <= kMost, "no frame is longer than allowed");
    got.emplace_back(type, payload);
    if (type == 1) throw BadFrame("refused");
    if (type == 2) stream->close();
    if (type == 3) stream->close_when_sent();
    if (type == 4) stream->send_frame(5, payload);
    if (type == 6) stream->on_frames(nullptr);
    if (type == 7) stream->pause_reading(true);
  };
  // Without a handler yet, as between a hello and its session.
  if ((habits & 3) != 0) stream->on_frames(handler);
  stream->on_close([&](const std::string&) { ++closed; });
  stream->start();

  std::string wire;
  bool sound = true;
  while (!in.done()) {
    uint8_t what = in.u8();
    if (what < 160) {
      auto type = static_cast<uint16_t>(in.u8() % 16);
      std::string payload = in.some(255);
      if (what < 8) payload.resize(payload.size() * 300 + 1);
      if (sound && payload.size() <= kMost) sent.emplace_back(type, payload);
      wire += frame(type, payload);
      sound = sound && payload.size() <= kMost;
    } else if (what < 176) {
      wire += in.some(24);  // not a frame, or half of one
      sound = false;
    } else if (what < 184) {
      Writer w;
      w.u32(static_cast<uint32_t>(in.number(4)));
      wire += w.take() + in.some(8);
      sound = false;
    } else if (what < 188) {
      stream->pause_reading(what % 2 == 0);
    } else {
      size_t cut = std::min<size_t>(wire.size(), what < 220 ? what - 188 : wire.size());
      ssize_t n = cut == 0 ? 0 : send(fds[1], wire.data(), cut, MSG_NOSIGNAL);
      if (n > 0) wire.erase(0, static_cast<size_t>(n));
      fuzz::turn(loop, 2);
    }
  }
  while (!wire.empty()) {
    ssize_t n = send(fds[1], wire.data(), wire.size(), MSG_NOSIGNAL);
    if (n <= 0) break;
    wire.erase(0, static_cast<size_t>(n));
    fuzz::turn(loop, 4);
    if (stream->closed()) break;
    stream->pause_reading(false);
  }
  close(fds[1]);
  stream->pause_reading(false);
  fuzz::turn(loop, 40);
  // Each frame that came is one that was sent, in order.
  require(got.size() <= sent.size() || !sound, "no frame comes twice");
  for (size_t i = 0; i < got.size() && i < sent.size(); ++i) {
    require(got[i] == sent[i], "frames arrive as they were sent");
  }
  fuzz::advance(10);
  fuzz::turn(loop, 4);
  require(stream->closed(), "a stream whose peer has gone is closed");
  require(closed <= 1, "the end is told once");
  require(traffic->open == 0, "a closed stream is not counted as open");
  return 0;
}
