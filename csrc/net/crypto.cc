#include "net/crypto.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "net/system_error.h"

namespace commkit {
namespace {

constexpr size_t kBlock = 64;
constexpr size_t kDigest = 32;

// Fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int by) { return (x >> by) | (x << (32 - by)); }

class Sha256 {
 public:
  void update(std::string_view data) {
    length_ += data.size();
    while (!data.empty()) {
      size_t take = std::min(data.size(), kBlock - filled_);
      std::memcpy(block_.data() + filled_, data.data(), take);
      filled_ += take;
      data.remove_prefix(take);
      if (filled_ == kBlock) {
        mix();
        filled_ = 0;
      }
    }
  }

  std::string finish() {
    uint64_t bits = length_ * 8;
    update(std::string_view("\x80", 1));
    while (filled_ != kBlock - 8) update(std::string_view("\0", 1));
    std::string tail(8, '\0');
    for (size_t i = 0; i < 8; ++i) tail[i] = static_cast<char>(bits >> (8 * (7 - i)));
    update(tail);
    std::string digest(kDigest, '\0');
    for (size_t i = 0; i < kDigest; ++i) {
      digest[i] = static_cast<char>(state_[i / 4] >> (8 * (3 - i % 4)));
    }
    return digest;
  }

 private:
  void mix() {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t* b = block_.data() + 4 * i;
      w[i] = uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | uint32_t{b[3]};
    }
    for (size_t i = 16; i < 64; ++i) {
      uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
      uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < 64; ++i) {
      uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
      uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
      uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state_[i] += add[i];
  }

  // Fractional parts of the square roots of the first 8 primes.
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlock> block_{};
  size_t filled_ = 0;
  uint64_t length_ = 0;
};

}  // namespace

std::string sha256(std::string_view data) {
  Sha256 hash;
  hash.update(data);
  return hash.finish();
}

std::string hmac_sha256(std::string_view key, std::string_view data) {
  std::string block(key.size() > kBlock ? sha256(key) : std::string(key));
  block.resize(kBlock, '\0');
  std::string inner_key = block;
  std::string outer_key = block;
  for (char& c : inner_key) c = static_cast<char>(c ^ 0x36);
  for (char& c : outer_key) c = static_cast<char>(c ^ 0x5c);
  Sha256 inner;
  inner.update(inner_key);
  inner.update(data);
  Sha256 outer;
  outer.update(outer_key);
  outer.update(inner.finish());
  return outer.finish();
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile: or the compiler may stop at the first difference.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (a[i] ^ b[i]));
  }
  return difference == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  size_t have = 0;
  while (have < count) {
    ssize_t n = getrandom(bytes.data() + have, count - have, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      throw SystemError("getrandom", std::to_string(count) + " bytes", errno);
    }
    have += static_cast<size_t>(n);
  }
  return bytes;
}

}  // namespace commkit
