// Little-endian encoding of message fields.  A Reader never reads past its input: it throws
// BadFrame.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace commkit {

struct BadFrame : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  Writer& u8(uint8_t v) {
    out_.push_back(static_cast<char>(v));
    return *this;
  }
  Writer& u16(uint16_t v) { return little(v, 2); }
  Writer& u32(uint32_t v) { return little(v, 4); }
  Writer& u64(uint64_t v) { return little(v, 8); }
  Writer& i32(int32_t v) { return u32(static_cast<uint32_t>(v)); }
  Writer& i64(int64_t v) { return u64(static_cast<uint64_t>(v)); }
  Writer& str(std::string_view v) {
    u32(static_cast<uint32_t>(v.size()));
    out_.append(v);
    return *this;
  }
  Writer& strs(const std::vector<std::string>& vs) {
    u32(static_cast<uint32_t>(vs.size()));
    for (const auto& v : vs) str(v);
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  Writer& little(uint64_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) out_.push_back(static_cast<char>(v >> (8 * i)));
    return *this;
  }
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  uint8_t u8() { return static_cast<uint8_t>(little(1)); }
  uint16_t u16() { return static_cast<uint16_t>(little(2)); }
  uint32_t u32() { return static_cast<uint32_t>(little(4)); }
  uint64_t u64() { return little(8); }
  int32_t i32() { return static_cast<int32_t>(u32()); }
  int64_t i64() { return static_cast<int64_t>(u64()); }
  std::string_view view() {
    uint32_t size = u32();
    need(size);
    std::string_view v = in_.substr(0, size);
    in_.remove_prefix(size);
    return v;
  }
  std::string str() { return std::string(view()); }
  std::vector<std::string> strs() {
    uint32_t count = u32();
    need(count * uint64_t{4});  // each string has at least its length
    std::vector<std::string> vs;
    vs.reserve(std::min<uint32_t>(count, 1024));  // a count alone costs no memory
    for (uint32_t i = 0; i < count; ++i) vs.push_back(str());
    return vs;
  }
  // Number of elements that follow, each at least `least` bytes long.
  uint32_t count(uint32_t least) {
    uint32_t n = u32();
    need(n * uint64_t{least});
    return n;
  }
  bool done() const { return in_.empty(); }

 private:
  void need(uint64_t bytes) const {
    if (bytes > in_.size()) throw BadFrame("a field runs past the end of its frame");
  }
  uint64_t little(int bytes) {
    need(static_cast<uint64_t>(bytes));
    uint64_t v = 0;
    for (int i = 0; i < bytes; ++i)
      v |= static_cast<uint64_t>(static_cast<uint8_t>(in_[i])) << (8 * i);
    in_.remove_prefix(bytes);
    return v;
  }
  std::string_view in_;
};

}  // namespace commkit
