// A fuzzer's bytes, read as decisions.  At their end every decision is 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool done() const { return size_ == 0; }
  uint8_t u8() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint64_t number(int bytes) {
    uint64_t v = 0;
    for (int i = 0; i < bytes; ++i) v |= static_cast<uint64_t>(u8()) << (8 * i);
    return v;
  }
  size_t below(size_t n) { return u8() % n; }
  // Mostly what can be a rank, an index or a count; else the ends of the range, or anything.
  int32_t small() {
    uint8_t b = u8();
    if (b < 200) return b % 10;
    if (b < 215) return -1;
    if (b < 225) return INT32_MAX;
    if (b < 235) return INT32_MIN;
    if (b < 245) return 1 << 24;
    return static_cast<int32_t>(number(4));
  }
  std::string bytes(size_t most) {
    size_t n = std::min(most, size_);
    std::string out(reinterpret_cast<const char*>(data_), n);
    data_ += n;
    size_ -= n;
    return out;
  }
  std::string some(size_t most) { return bytes(std::min<size_t>(most, u8())); }
  std::string rest() { return bytes(size_); }

 private:
  const uint8_t* data_;
  size_t size_;
};

// What must hold however the peer behaves.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

}  // namespace fuzz
